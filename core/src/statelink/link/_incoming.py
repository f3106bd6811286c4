"""The receive hooks of decode's rooms, on data threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from statelink.backend import MAX_PREPARED, ReceiveHook
from statelink.errors import StatelinkError

from ._awaiting import await_transfer
from ._hook_room import ReceiveRoom
from ._mover import reason_of
from ._receiving import Writer

if TYPE_CHECKING:
    from statelink.backend import Arrival, Fencing, Transfer
    from statelink.errors import Reason

    from ._instance import Source
    from ._node import Node
    from ._receiving import Receiving

__all__ = ["Incoming"]


class Incoming:
    """Runs hooks, counts what they owe, and reports to the control thread.

    Methods are for the control thread unless they say otherwise; none blocks. A hook that a strategy did not override
    is not run.

    Args:
        node: The link's control thread.
        fencing: What lends memory to writers, if the backend has such a fence.
        fail: Called on the control thread when a hook failed.
        settled: Called there when a hook has ended, well or not.
    """

    def __init__(
        self,
        node: Node,
        fencing: Fencing | None,
        fail: Callable[[Receiving, Reason], None],
        settled: Callable[[Receiving], None],
    ) -> None:
        self._node = node
        self._fencing = fencing
        self._fail = fail
        self._settled = settled

    def writer(self, room: Receiving, source: Source) -> Writer:
        """A room's view of one rank, with new hooks."""
        assert source.plan is not None
        hooks = {name: self._node.strategies[name].receiver() for name in source.plan.components}
        writer = Writer(source, source.plan, hooks, room._expect(source.plan))
        writer.contexts = {name: self._context(room, writer, name) for name in hooks}
        return writer

    def prepare(self, writer: Writer) -> None:
        """Let the hooks say what their counterparts need. May block; data threads only.

        Raises:
            StatelinkError: A hook says too much, or refuses.
        """
        for name, hook in writer.hooks.items():
            prepared = hook.prepare(writer.contexts[name])
            if len(prepared) > MAX_PREPARED:
                raise StatelinkError(
                    f"the receive hook of component {name!r} prepared {len(prepared)} bytes",
                    cause=f"at most {MAX_PREPARED} travel with a request",
                    strategy=self._node.strategies[name].name,
                )
            if prepared:
                writer.prepared[name] = prepared
        writer.elsewhere = [name for name, hook in writer.hooks.items() if not hook.in_place]

    def message(self, room: Receiving, writer: Writer, component: str, payload: bytes) -> None:
        """A counterpart sent something."""
        hook = writer.hooks.get(component)
        if hook is not None:
            self._run(room, writer, component, partial(hook.message, writer.contexts[component], payload))

    def arrived(self, room: Receiving, writer: Writer, component: str, arrival: Arrival) -> None:
        """A chunk of a component has arrived."""
        hook = writer.hooks.get(component)
        if hook is not None and type(hook).arrived is not ReceiveHook.arrived:
            self._run(room, writer, component, partial(hook.arrived, writer.contexts[component], arrival))

    def finish(self, room: Receiving, writer: Writer) -> None:
        """A writer said its last word; success waits for what the hooks start now."""
        for name, hook in writer.hooks.items():
            if type(hook).finish is not ReceiveHook.finish:
                self._run(room, writer, name, partial(hook.finish, writer.contexts[name]))

    def abort(self, room: Receiving, writer: Writer) -> None:
        """The room failed."""
        for name, hook in writer.hooks.items():
            if type(hook).abort is not ReceiveHook.abort:
                self._run(room, writer, name, partial(hook.abort, writer.contexts[name]))

    def release(self, room: Receiving) -> None:
        """Tell the hooks of those writers of a room that ended of which nothing can land any more."""
        for writer in room._writers.values():
            if writer.released or writer.owes or not writer.closed:
                continue
            writer.released = True
            for name, hook in writer.hooks.items():
                if type(hook).released is not ReceiveHook.released:
                    call = partial(hook.released, writer.contexts[name])
                    if writer.asked:
                        self._node.movers.submit(("hook", room.room), call)
                    else:  # it may be in preparation
                        self._submit(room, call)

    def _run(self, room: Receiving, writer: Writer, component: str, call: Callable[[], Transfer | None]) -> None:
        what = f"the receive hook of component {component!r}"
        writer.begin(what)
        who = {"component": component, "peer": writer.source.name}

        def done(ok: bool, reason: Reason | None = None) -> None:
            writer.end(what)
            if not ok:
                failed = f"a receive hook of component {component!r} failed"
                self._fail(room, reason or room._reason_for("room.hook", failed, **who))
            self._settled(room)

        def job() -> None:
            try:
                transfer = call()
            except BaseException as error:
                reason = reason_of(error, room=room.room, **who, strategy=self._node.strategies[component].name)
                self._node.post(lambda: done(False, reason))
            else:
                if transfer is None:
                    self._node.post(lambda: done(True))
                else:
                    await_transfer(self._node, transfer, done)

        self._submit(room, job)

    def _submit(self, room: Receiving, job: Callable[[], None]) -> None:
        # Behind what is under way for the room (preparing its request), and not in the way of fences.
        movers = partial(self._node.movers.submit, ("hook", room.room), job)
        self._node.fences.submit(("room", room.room), movers)

    def _context(self, room: Receiving, writer: Writer, component: str) -> ReceiveRoom:
        def fail(error: BaseException) -> None:
            reason = reason_of(error, room=room.room, component=component, peer=writer.source.name)
            self._node.post(lambda: self._fail(room, reason))

        return ReceiveRoom(self._node, room, writer, component, self._fencing, fail)
