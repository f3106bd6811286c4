"""Pushes on their way out, on data threads; and the transfers that failed rooms leave behind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING

from statelink.backend import SendHook

from ._delivery import Delivered, deliver
from ._mover import reason_of

if TYPE_CHECKING:
    import weakref

    from statelink.backend import Transfer
    from statelink.errors import Reason

    from ._node import Node
    from ._order import Job
    from ._sending import Delivery, Push, Sending

__all__ = ["Outgoing"]

log = logging.getLogger("statelink.link")

POLL_PENDING, POLL_STRAYS, POLL_BROKEN = 0.01, 0.25, 1.0
"""Seconds between looks at transfers that a failed room left behind: that run, that failed without being settled, and
after ``poll`` raised."""


class Outgoing:
    """Runs what a delivery has to do, in the lane of its destination, and reports back to the control thread.

    Methods are for the control thread unless they say otherwise; none blocks.

    Args:
        node: The link's control thread.
        delivered: Told, on the control thread, what became of each push.
        unsettled: Told, likewise, of transfers that were left running and of which it is not known that they stopped.
        settled: Told, likewise, that all of a delivery's that were not settled are so by now.
    """

    def __init__(
        self,
        node: Node,
        delivered: Callable[[Sending, Delivery, Push, Delivered], None],
        unsettled: Callable[[Delivery, Transfer], None],
        settled: Callable[[Sending, Delivery], None],
    ) -> None:
        self._node = node
        self._delivered = delivered
        self._unsettled = unsettled
        self._settled = settled

    def start(self, room: Sending, delivery: Delivery, push: Push) -> None:
        """Send a push to one destination, after those before it."""
        delivery.jobs += 1
        self._node.hold_pushes(1, admitted=True)

        def job() -> Generator[float, None, None] | None:
            delivery.line.append(push)
            # Else it follows when those before it have gone out.
            return self._carry(room, delivery) if len(delivery.line) == 1 else None

        self._submit(delivery, job)

    def wake(self, room: weakref.ref[Sending], peer: str) -> Generator[float, None, None] | None:
        """A strategy need not wait any more: what its room goes on with, in the lane of the destination.

        What a strategy holds does not keep the room: that would be a cycle.
        """
        living = room()
        delivery = living._deliveries.get(peer) if living is not None else None
        return self._carry(living, delivery) if living is not None and delivery is not None else None

    def abort(self, room: Sending, delivery: Delivery) -> None:
        """Let what waits come to its end, since the room was cancelled, and tell the hooks."""
        self._submit(delivery, partial(self._carry, room, delivery))  # what waits would wait for ever
        for name, hook in delivery.hooks.items():
            if type(hook).abort is not SendHook.abort:  # each is a job: one that raises keeps no other from its own
                self._submit(delivery, partial(hook.abort, delivery.contexts[name]))

    def release(self, delivery: Delivery) -> None:
        """Tell the hooks that nothing reads this side's memory for them any more."""
        for name, hook in delivery.hooks.items():
            if type(hook).released is not SendHook.released:
                self._submit(delivery, partial(hook.released, delivery.contexts[name]))

    def note(self, delivery: Delivery, component: str, payload: bytes, failed: Callable[[Reason], None]) -> None:
        """Hand a hook what its counterpart sent; ``failed`` is called on the control thread if it raises."""
        hook, context = delivery.hooks[component], delivery.contexts[component]
        room, peer = delivery.request.room, delivery.destination.name

        def job() -> None:
            try:
                hook.message(context, payload)
            except BaseException as error:
                reason = reason_of(error, room=room, component=component, peer=peer)
                self._node.post(lambda: failed(reason))

        self._node.fences.submit(("hook", room), job)

    def look_after(self, delivery: Delivery, then: Callable[[], None]) -> None:
        """Poll, once, the transfers that a cancelled push left running.

        Args:
            delivery: Its `Delivery.pending` are polled; those that still run afterwards stay there.
            then: Called on the control thread: at once when all have ended, otherwise when it is time to look again.
        """
        node = self._node
        transfers = list(delivery.pending)
        delivery.jobs += 1

        def job() -> None:
            failed = False
            try:
                node.backend.poll([each for each in transfers if each.outcome is None])
            except BaseException:
                log.exception("backend %s failed to poll", node.backend.name)
                failed = True
            node.post(lambda: done(failed))

        def done(failed: bool) -> None:
            delivery.jobs -= 1
            delivery.pending = [each for each in transfers if each.outcome is None]
            for each in set(transfers).difference(delivery.pending):
                self._unsettled(delivery, each)
            if delivery.pending:
                node.after(POLL_BROKEN if failed else POLL_PENDING, then)
            else:
                then()

        node.fences.submit(("pending", delivery.destination.name), job)

    def watch(self, room: Sending, delivery: Delivery) -> None:
        """Poll a delivery's strays until its backend has settled all of them, if it ever does."""
        node = self._node
        transfers = list(delivery.strays)

        def job() -> None:
            try:
                node.backend.poll(transfers)
            except BaseException:
                log.exception("backend %s failed to poll", node.backend.name)
            node.post(done)

        def done() -> None:
            delivery.strays = [each for each in delivery.strays if each.outcome is not None and each.outcome.unsettled]
            if delivery.strays:
                node.after(POLL_STRAYS, lambda: self.watch(room, delivery))
            else:
                self._settled(room, delivery)

        node.fences.submit(("strays", delivery.destination.name), job)

    def _carry(self, room: Sending, delivery: Delivery) -> Generator[float, None, None]:
        """Let the pushes of a delivery go out, up to where a strategy waits. Runs in the lane of the destination."""
        while delivery.line:
            push = delivery.line[0]
            if delivery.under_way is None:
                delivery.under_way = deliver(self._node, delivery, push)
            try:
                pause = next(delivery.under_way)
            except StopIteration as ended:
                delivery.under_way = None
                delivery.line.popleft()
                self._node.post(partial(self._delivered, room, delivery, push, ended.value))
            else:
                if pause is None:
                    return  # its strategy wakes it, or the end of the room does
                yield pause

    def _submit(self, delivery: Delivery, job: Job) -> None:
        self._node.movers.submit(("peer", delivery.destination.name), job)
