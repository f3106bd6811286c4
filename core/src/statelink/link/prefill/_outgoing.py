"""An outgoing delivery: what one room owes to one decode rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from statelink import wire
from statelink.backend import SendHook
from statelink.errors import MismatchError, Reason, StatelinkError
from statelink.plan import Items, checked_int, required

from ._in_flight import OutgoingInFlight, RequestId
from ._pusher import Pusher

if TYPE_CHECKING:
    from collections.abc import Mapping

    from statelink.backend import Moved
    from statelink.link._context import Context
    from statelink.link.runtime import Job
    from statelink.plan import PairPlan

    from ._decode_ranks import DecodeRank
    from ._line import Line
    from ._push import Push, PushResult, Then

__all__ = ["OutgoingDelivery"]


class OutgoingDelivery:
    """One destination of one room, from its request until nothing is in flight. Belongs to the control thread.

    Its `Pusher` does the work, whenever the `Line` of the decode rank lets it, and posts the results to the control
    thread.

    Args:
        context: The link's parts.
        rank: The decode rank.
        request: Its request.
        tokens: N.
        plan: What this rank writes for it.
        line: Its line.
        targets: Destination items per component.

    Attributes:
        rank: The decode rank.
        request: Its request.
        arrived: Pushes that are visible at the destination while the room goes on. They end in their order.
        finished: Whether `wire.Finished` was made. This may be before the last push has ended.
        ended: Whether the last push has ended.
        received: Whether the destination said that it has everything from every prefill rank.
        drained: Whether `wire.Drained` was made: the destination is told that nothing is in flight to it.
        in_flight: What of it is in flight.
    """

    def __init__(
        self,
        context: Context,
        rank: DecodeRank,
        request: wire.Request,
        tokens: int,
        plan: PairPlan,
        line: Line,
        targets: dict[str, Items],
    ) -> None:
        self.rank = rank
        self.request = request
        self.arrived = 0
        self.finished = False
        self.ended = False
        self.received = False
        self.drained = False
        self.in_flight = OutgoingInFlight(context.loop, context.workers, rank)
        self._context = context
        self._plan = plan
        self._key = "peer", rank.name
        """The key of its jobs."""
        self._tokens = tokens
        self._line = line
        self._pusher = Pusher(context, rank, request, tokens, plan, targets, line)
        self._moved: dict[str, Moved] = {}
        self._released = False

    @classmethod
    def of(cls, context: Context, rank: DecodeRank, request: wire.Request, tokens: int) -> OutgoingDelivery:
        """Check a request, and make its delivery.

        Args:
            context: The link's parts.
            rank: The decode rank that asks.
            request: Its request.
            tokens: Positions of the request, as this side's engine says.

        Raises:
            StatelinkError: The two sides disagree on the request, or it does not name the items that must move.
        """
        plan, line = rank.plan, rank.line
        if plan is None or line is None:
            raise StatelinkError("a request came from a rank that is not attached any more", code="room.unattached")
        least = request.least or request.tokens
        if not least <= tokens <= request.tokens:
            said = f"{least} to {request.tokens} on decode, by the number of its pages"
            raise MismatchError(
                "the two sides disagree on the number of tokens",
                cause=f"{tokens} on prefill, {said if request.least else f'{request.tokens} on decode'}",
                code="room.tokens",
            )
        checked_int(request.prefix, "the prefix of a request", 0, tokens, code="room.prefix")
        targets: dict[str, Items] = {}
        for name, component_plan in plan.components.items():
            given = request.items.get(name)
            if given is None:
                raise MismatchError(f"a request lacks component {name!r}", code="room.items", component=name)
            listed = Items(wire.unpack_items(given), given.first)
            targets[name] = required(component_plan.target, tokens, request.prefix, listed)
        return cls(context, rank, request, tokens, plan, line, targets)

    # Pushes.

    @property
    def moved(self) -> Mapping[str, Moved]:
        """Per component, the bytes and blocks of the pushes so far."""
        return self._moved

    @property
    def hooks(self) -> Mapping[str, SendHook]:
        """Send hook per component."""
        return self._pusher.hooks

    def open_hooks(self) -> None:
        """Make and open the send hooks.

        Raises:
            BaseException: What a strategy raises.
        """
        self._pusher.open_hooks()

    def start_push(self, push: Push, then: Then) -> None:
        """Move a push after those before it. ``then`` is called on the control thread with each `PushResult`."""
        self.in_flight.jobs += 1
        blocks, nbytes = self._most(push)
        self._line.add_push(self._pusher, push, then, blocks, nbytes)

    def _most(self, push: Push) -> tuple[int, int]:
        """Most blocks and bytes that a push becomes."""
        plans = self._plan.components
        blocks = nbytes = 0
        for name, items in push.items.items():
            plan = plans.get(name)
            if plan is not None:
                item_blocks, item_nbytes = plan.most(push.layers)
                blocks += len(items.ids) * item_blocks
                nbytes += len(items.ids) * item_nbytes
        return blocks, nbytes

    def take(self, pushed: PushResult) -> None:
        """Note what became of a push."""
        self._moved = _sum(self._moved, pushed.moved)
        self.in_flight.moved(pushed.moving)

    def note(self, component: str, payload: bytes, failed: Callable[[Reason], None]) -> None:
        """Give a hook the message of its counterpart. ``failed`` is called on the control thread if the hook raises."""
        hook = self.hooks.get(component)
        if hook is None:
            return
        workers = self._context.workers
        call = partial(hook.message, self._pusher.context_of(component), payload)

        def done(_: None, reason: Reason | None) -> None:
            if reason is not None:
                failed(reason)

        who = {"room": self.request.room, "component": component, "peer": self.rank.name}
        workers.run(workers.fences, ("hook", self.request.room), call, done, **who)

    def cancel(self) -> None:
        """The room failed: stop what is under way, and call the hooks' ``abort``."""
        self._pusher.cancelled.set()
        self._submit(partial(self._line.end, self._pusher))
        for name, hook in self.hooks.items():
            if type(hook).abort is not SendHook.abort:  # a job for each hook: if one raises, the others still run
                self._submit(partial(hook.abort, self._pusher.context_of(name)))

    def tell_released(self) -> None:
        """Call the hooks' ``released``, once: nothing is in flight on this side any more."""
        if self._released:
            return
        self._released = True
        for name, hook in self.hooks.items():
            if type(hook).released is not SendHook.released:
                self._submit(partial(hook.released, self._pusher.context_of(name)))

    def _submit(self, job: Job) -> None:
        self._context.workers.moves.submit_job(self._key, job)

    # Messages.

    @property
    def use(self) -> RequestId:
        """The destination's use that this delivery serves."""
        return self.rank.name, self.request.room, self.request.generation

    def _header(self) -> wire.RoomHeader:
        return wire.RoomHeader(
            sender=self._context.name,
            to=self.rank.name,
            room=self.request.room,
            generation=self.request.generation,
        )

    def chunk(self, pushed: PushResult) -> wire.Chunk:
        """The message that a push is visible at the destination."""
        push = pushed.push
        return wire.Chunk(
            **self._header(),
            number=push.number,
            granules=pushed.granules,
            layers=push.layers,
            nbytes=pushed.moving.nbytes,
        )

    def finish(self, pushed: PushResult) -> wire.Finished:
        """The message that the last push and all before it are visible, or that it is landing."""
        self.finished = True
        return wire.Finished(
            **self._header(),
            digest=self._plan.digest,
            moved=_sum(self._moved, pushed.moved) if pushed.landing else self._moved,
            chunks=pushed.push.number + 1,
            granules=pushed.granules,
            layers=pushed.push.layers,
            digests=pushed.digests,
            transport=self.rank.transport(),
            tokens=self._tokens if self.request.least else 0,
            landing=pushed.landing,
        )

    def say_failed(self, reason: Reason) -> wire.Failed:
        """The message that the room has failed."""
        return wire.Failed(**self._header(), reason=reason, met=self.request.generation)

    def say_drained(self) -> wire.Drained:
        """The message that nothing is in flight to the destination, and that nothing will be."""
        self.drained = True
        return wire.Drained(**self._header(), met=self.request.generation)

    def waits_for(self) -> str:
        """What the room still waits for from this destination; empty where there is nothing. Any thread."""
        rank = self.rank.handshake.inventory.rank
        if not self.ended:
            return f"the transfer to rank {rank}"
        return "" if self.received else f"the acknowledgement of rank {rank}"


def _sum(before: Mapping[str, Moved], more: Mapping[str, Moved]) -> dict[str, Moved]:
    """What was moved of each component, with what one more push moved."""
    total = dict(before)
    for name, moved in more.items():
        known = total.get(name)
        total[name] = moved if known is None else known + moved
    return total
