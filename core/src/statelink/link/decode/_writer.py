"""What one prefill rank owes to one room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from statelink import wire
from statelink.backend import MAX_PREPARED, UNKNOWN, Arrival, Moved, ReceiveHook
from statelink.errors import Reason, StatelinkError
from statelink.link._header import RoomHeader
from statelink.link._room import room_reason
from statelink.link._verify import differing
from statelink.plan import due

from ._grant import granted_ranges
from ._receive_context import ReceiveHookContext

if TYPE_CHECKING:
    import threading

    from statelink.backend import Transfer
    from statelink.link._context import Context

    from ._prefill_rank import PrefillRank
    from ._request import Accepted

__all__ = ["Writer"]

Done = Callable[[Reason | None], None]
"""Called on the control thread when something has ended, with why it failed."""


class Writer:
    """One prefill rank's part of one room: its receive hooks, its grant, and what of it is in flight.

    Belongs to the control thread, except for `prepare`, which is a data thread's job. A hook that a strategy did not
    override is not run.

    Args:
        context: The link's parts.
        rank: The prefill rank; it has a part.
        accepted: What the engine accepted.
        ended: Set once the room has ended.
        fail: Called on a data thread with a component and what its hook's context raised. It must not keep the room
            alive.

    Attributes:
        rank: The prefill rank.
        finished: Whether it said that it has written everything.
        drained: Whether no write of it can land any more: it said so, its process has ended, or the fence shut it out.
        asked: Whether it was, or may have been, asked.
        met: Whether it has said that it has a room for this use.
    """

    def __init__(
        self,
        context: Context,
        rank: PrefillRank,
        accepted: Accepted,
        ended: threading.Event,
        fail: Callable[[str, str, BaseException], None],
    ) -> None:
        assert rank.plan is not None
        self.rank = rank
        self.finished = False
        self.drained = False
        self.asked = False
        self.met = False
        self._context = context
        self._accepted = accepted
        self._ended = ended
        self._plan = rank.plan
        parts = self._plan.components
        self.hooks: dict[str, ReceiveHook] = {name: context.strategies[name].receiver() for name in parts}
        self._contexts = {
            name: ReceiveHookContext(context, accepted, rank, name, part, ended, partial(fail, rank.name, name))
            for name, part in parts.items()
        }
        # Bytes per component: computed here, never taken from the writer.
        self._expected = {
            name: part.granule_nbytes * len(due(part.source, part.target, accepted.tokens, accepted.prefix))
            for name, part in parts.items()
        }
        self._working = 0
        """Hooks, their transfers, and comparisons of digests that have not ended."""
        self._under_way: Counter[str] = Counter()
        """What these are, in words, and how many of each."""
        self._came: set[str] = set()
        """Components of which something has come."""
        self._prepared: dict[str, bytes] = {}
        self._elsewhere: list[str] = []
        self._moved: Mapping[str, Moved] = {}
        self._digests: Mapping[str, bytes] = {}
        self._verified = False
        self._released = False

    # Asking it.

    def prepare(self) -> None:
        """Let the hooks say what their counterparts need, and let the writer into the memory. For a data thread.

        Raises:
            StatelinkError: A hook says too much, or refuses; or the backend does not grant.
        """
        for name, hook in self.hooks.items():
            prepared = hook.prepare(self._contexts[name])
            if len(prepared) > MAX_PREPARED:
                raise StatelinkError(
                    f"the receive hook of component {name!r} prepared {len(prepared)} bytes",
                    cause=f"at most {MAX_PREPARED} travel with a request",
                    strategy=self._context.strategies[name].name,
                )
            if prepared:
                self._prepared[name] = prepared
        self._elsewhere = [name for name, hook in self.hooks.items() if not hook.in_place]
        if self._context.fencing is not None:
            accepted = self._accepted
            ranges = granted_ranges(self._context.inventory, self._plan, accepted.items, self._elsewhere)
            self._context.fencing.grant(self.rank.name, accepted.room, accepted.generation, *ranges)

    def ask(self, lasts: float, unmet: tuple[wire.Unmet, ...]) -> bool:
        """Ask the rank for the room; whether that was possible.

        Args:
            lasts: Seconds that the room may take.
            unmet: Earlier uses of the id that ended, and that the rank may not have met.
        """
        accepted = self._accepted
        items = {name: wire.pack_items(accepted.items[name].ids, accepted.items[name].first) for name in self.hooks}
        self.asked = True
        request = wire.Request(
            **self._header(),
            tokens=accepted.tokens,
            prefix=accepted.prefix,
            items=items,
            prepared=self._prepared,
            elsewhere=self._elsewhere,
            attempt=accepted.attempt,
            lifetime_ms=int(1000 * lasts) + 1,
            unmet=unmet,
        )
        return self._context.send(request, self.rank.address)

    # What it says.

    def meet(self) -> None:
        """It said that it has a room for this use."""
        self.met = True

    def chunk(self, message: wire.Chunk, then: Done) -> None:
        """A push is visible here."""
        self._came.update(message.granules.keys() & self._expected.keys())
        if self._ended.is_set():
            return
        for name, granules in message.granules.items():
            hook = self.hooks.get(name)
            if hook is not None and type(hook).arrived is not ReceiveHook.arrived:
                arrival = Arrival(message.number, granules, message.layers)
                self._run(name, partial(hook.arrived, self._contexts[name], arrival), then)

    def note(self, component: str, payload: bytes, then: Done) -> None:
        """A send hook sends something to its counterpart."""
        hook = self.hooks.get(component)
        if hook is not None:
            self._run(component, partial(hook.message, self._contexts[component], payload), then)

    def finish(self, message: wire.Finished) -> Reason | None:
        """Its last word; why the room fails, if what it says is not what this side computed itself."""
        self.finished = self.drained = True
        self._moved, self._digests = message.moved, message.digests
        self.rank.carry_by(message.transport or UNKNOWN)
        if message.digest != self._plan.digest:
            cause = f"{self._plan.digest.hex()} here, {message.digest.hex()} there"
            return self._reason("room.digest", "a writer followed another plan", cause)
        said = {name: moved.nbytes for name, moved in message.moved.items() if moved.nbytes}
        wanted = {name: nbytes for name, nbytes in self._expected.items() if nbytes}
        if said == wanted:
            return None
        names = sorted(name for name in said.keys() | wanted.keys() if said.get(name) != wanted.get(name))
        cause = "; ".join(f"{n}: {wanted.get(n, 0)} bytes promised, {said.get(n, 0)} moved" for n in names)
        what = "a writer did not move what the plan promised"
        return self._reason("room.bytes", what, cause, component=", ".join(names))

    def finish_hooks(self, then: Done) -> None:
        """It has written everything; the room's end waits for what the hooks start now."""
        for name, hook in self.hooks.items():
            if type(hook).finish is not ReceiveHook.finish:
                self._run(name, partial(hook.finish, self._contexts[name]), then)

    def drain(self) -> None:
        """No write of it can land any more."""
        self.drained = True

    # The end.

    @property
    def in_flight(self) -> bool:
        """Whether a write of it, or something on this side that it led to, may still touch the room's memory."""
        return not self.drained or self.working

    @property
    def working(self) -> bool:
        """Whether hooks, their transfers or comparisons of digests have not ended."""
        return self._working > 0

    def _begin(self, what: str) -> None:
        self._working += 1
        self._under_way[what] += 1

    def _end(self, what: str) -> None:
        self._working -= 1
        self._under_way[what] -= 1

    @property
    def complete(self) -> bool:
        """Whether all of it is here, and compared where both sides verify."""
        return self.finished and not self.working

    @property
    def moved(self) -> Mapping[str, Moved]:
        """What it said it moved, once it finished."""
        return self._moved

    def verify(self, then: Done) -> None:
        """Compare, once, what it says it sent with what lies in memory; the room's end waits for it."""
        if self._verified or not self.complete:
            return
        self._verified = True
        what = "the comparison of digests"
        self._begin(what)
        workers, accepted = self._context.workers, self._accepted

        def job() -> Mapping[str, str]:
            return differing(self._plan, accepted, self._digests, self._ended)

        def done(found: Mapping[str, str] | None, defect: Reason | None) -> None:
            self._end(what)
            then(self._not_as_sent(found) if found else defect)

        who = {"room": accepted.room, "peer": self.rank.name}
        workers.run(workers.checks, ("room", accepted.room, self.rank.name), job, done, **who)

    def _not_as_sent(self, found: Mapping[str, str]) -> Reason:
        return self._reason(
            "room.content",
            "what arrived is not what was sent",
            "; ".join(found.values()),
            "the transport or the memory is at fault, or an engine wrote to pages of the request; use nothing of it",
            component=", ".join(found),
            rank=self.rank.rank,
        )

    def accept(self) -> None:
        """Tell it that the room has everything from every rank."""
        self._context.send(wire.Accepted(**self._header()), self.rank.address)

    def tell_failed(self, reason: Reason) -> None:
        """Tell it that the room has failed. Also a rank that was not asked: its engine may wait for a request."""
        failed = wire.Failed(**self._header(), reason=reason, attempt=self._accepted.attempt)
        self._context.send(failed, self.rank.address)

    def abort(self, then: Done) -> None:
        """The room failed: shut the writer out, and tell the hooks."""
        if not self.asked:
            # Nothing was granted to it without a fence. With one, a data thread may be about to: `revoke` follows that.
            self.drained = self.drained or self._context.fencing is None
        for name, hook in self.hooks.items():
            if type(hook).abort is not ReceiveHook.abort:
                self._run(name, partial(hook.abort, self._contexts[name]), then)

    def revoke(self, closed: Callable[[str], None]) -> None:
        """Shut the writer out, behind what is under way for the room; without an owner's fence, nothing can.

        Args:
            closed: Called on the control thread with the rank's name, once no write of it can land.
        """
        fencing, accepted, name = self._context.fencing, self._accepted, self.rank.name
        if fencing is None:
            return

        def job() -> None:
            transfer = fencing.revoke(name, accepted.room, accepted.generation)
            self._context.workers.watch(transfer, lambda ok: closed(name) if ok else None)

        self._context.workers.fences.submit(("room", accepted.room), job)

    def release(self) -> None:
        """Tell the hooks, once, that nothing touches this side's memory for them any more, when that is so."""
        if self._released or self.in_flight:
            return
        self._released = True
        workers, room = self._context.workers, self._accepted.room
        for name, hook in self.hooks.items():
            if type(hook).released is not ReceiveHook.released:
                call = partial(hook.released, self._contexts[name])
                if self.asked:
                    workers.moves.submit(("hook", room), call)
                else:  # it may be in preparation
                    self._submit(call)

    # The hooks.

    def _run(self, component: str, call: Callable[[], Transfer | None], then: Done) -> None:
        """Run a hook on a data thread, and wait for the transfer that it returns."""
        what = f"the receive hook of component {component!r}"
        self._begin(what)
        workers, strategy = self._context.workers, self._context.strategies[component].name
        who = {"room": self._accepted.room, "component": component, "peer": self.rank.name, "strategy": strategy}

        def done(ok: bool, reason: Reason | None) -> None:
            self._end(what)
            if not ok and reason is None:
                reason = self._reason(
                    "room.hook", f"a receive hook of component {component!r} failed", component=component
                )
            then(reason)

        self._submit(lambda: workers.run_transfer(call, done, **who))

    def _submit(self, job: Callable[[], object]) -> None:
        # Behind what is under way for the room (preparing its request), and not in the way of fences.
        workers, room = self._context.workers, self._accepted.room
        workers.fences.submit(("room", room), partial(workers.moves.submit, ("hook", room), job))

    # Words.

    def _reason(
        self, code: str, what: str, cause: str = "", hint: str = "", *, component: str | None = None, **who: object
    ) -> Reason:
        room, attempt, peer = self._accepted.room, self._accepted.attempt, self.rank.name
        return room_reason(self._context, room, attempt, code, what, cause, hint, component=component, peer=peer, **who)

    def _header(self) -> RoomHeader:
        return RoomHeader(
            sender=self._context.name,
            to=self.rank.name,
            room=self._accepted.room,
            generation=self._accepted.generation,
        )

    def waits_for(self) -> str:
        """What the room still waits for from this rank; empty where there is nothing. Any thread."""
        rank = "?" if self.rank.rank is None else self.rank.rank
        if self.finished:
            under_way = " and ".join(what for what, count in list(self._under_way.items()) if count)
            return f"{under_way} for what came from rank {rank}" if under_way else ""
        names = [name for name, nbytes in self._expected.items() if nbytes]
        begun = [name for name in names if name in self._came]
        parts = [", ".join(name for name in names if name not in self._came)]
        parts += [f"the rest of {', '.join(begun)}"] if begun else []
        return f"{' and '.join(filter(None, parts)) or 'the last word'} from rank {rank}"
