"""An incoming delivery: what one prefill rank owes to one room."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import msgspec

from statelink import wire
from statelink.backend import MAX_PREPARED, UNKNOWN, Arrival, Moved, ReceiveHook, Transfer
from statelink.errors import Reason, StatelinkError
from statelink.link._reasons import BackendDefect
from statelink.link._room_state import room_reason
from statelink.link._verify import differing

from ._in_flight import IncomingInFlight, Proof
from ._receive_context import ReceiveHookContext

if TYPE_CHECKING:
    from statelink.backend import Landing
    from statelink.link._context import Context
    from statelink.link.runtime import Flag

    from ._instance import PrefillRank
    from ._receiving import Accepted

__all__ = ["IncomingDelivery"]

MOST_DEADLINE_SECONDS = 1e9
"""Most seconds that a request states for its room. An engine's deadline may be infinite."""

MOST_PROMPT_RANGES = 4096
"""Most ranges that the control thread itself grants, where that never blocks: a millisecond of work."""
Done = Callable[[Reason | None], None]
"""Called on the control thread when a hook or a comparison has ended: with the reason if it failed, else ``None``."""


class IncomingDelivery:
    """One prefill rank's part of one room: its receive hooks, its grant, and what of it is in flight.

    Belongs to the control thread, except for `prepare`, which may run on a data thread. Methods of a hook that a
    strategy did not override are not called.

    Args:
        context: The link's parts.
        rank: The prefill rank; it has a part.
        accepted: What the engine accepted.
        ended: Set by the control thread once the room has ended.
        fail: Called on a data thread with a component and what its hook's context raised. It must not keep the room
            alive.

    Attributes:
        rank: The prefill rank.
        finished: Whether it has written everything.
        in_flight: What of it may still touch the room's memory.
        met: Whether it has said that it has a room for this use.
        moved: Bytes and blocks per component, as it reported them when it finished.
        hooks: Receive hook per component.
        prompt: Whether `prepare` never blocks and takes little time. The control thread may then run it.
    """

    def __init__(
        self,
        context: Context,
        rank: PrefillRank,
        accepted: Accepted,
        ended: Flag,
        fail: Callable[[str, str, BaseException], None],
    ) -> None:
        part = rank.part
        assert part is not None
        self.rank = rank
        self.finished = False
        self.in_flight = IncomingInFlight()
        self.met = False
        self.moved: Mapping[str, Moved] = {}
        self.hooks: dict[str, ReceiveHook] = {}
        self._context = context
        self._accepted = accepted
        self._ended = ended
        self._fail = fail
        self._plan = part.plan
        self._part = part
        self._acting: dict[str, ReceiveHook] = {}
        """The hooks that do more than prepare."""
        self._contexts: dict[str, ReceiveHookContext] = {}
        self._expected = part.owed(accepted.tokens, accepted.prefix)
        """Bytes per component, where there are any: computed here, never taken from the writer."""
        prompt = context.fencing is None or (
            context.backend.capabilities.prompt_fences and part.grantable.count(accepted.items) <= MOST_PROMPT_RANGES
        )
        for name in part.plan.components:
            hook = self.hooks[name] = context.strategies[name].receiver()
            prompt = prompt and hook.prompt
            if _acts(type(hook)):
                self._acting[name] = hook
        self.prompt = prompt
        self._came: set[str] = set()
        """Components of which a chunk has arrived."""
        # `prepare` writes these two, maybe on a data thread; the control thread reads them after that job.
        self._prepared: dict[str, bytes] = {}
        self._elsewhere: list[str] = []
        self._digests: Mapping[str, bytes] = {}
        self._verified = False
        self._released = False
        self._landing: Landing | None = None
        """What sees when its bytes have landed, if the request says that this side looks itself."""
        self._finishing = False
        """Whether its last message came, and its bytes are landing."""

    # The request.

    def prepare(self) -> None:
        """Ask the hooks what their counterparts need, and grant the memory to the writer. Blocks; a data thread's job.

        Raises:
            BaseException: What a hook or the backend raises; a `StatelinkError` if a hook returns too many bytes.
        """
        for name, hook in self.hooks.items():
            overridden = type(hook).prepare is not ReceiveHook.prepare
            prepared = hook.prepare(self._context_of(name)) if overridden else b""
            if len(prepared) > MAX_PREPARED:
                raise StatelinkError(
                    f"the receive hook of component {name!r} prepared {len(prepared)} bytes",
                    cause=f"at most {MAX_PREPARED} travel with a request",
                    strategy=self._context.strategies[name].name,
                )
            if prepared:
                self._prepared[name] = prepared
            if not hook.in_place:
                self._elsewhere.append(name)
        if self._context.fencing is not None:
            accepted = self._accepted
            ranges = self._part.grantable.ranges(accepted.items, self._elsewhere)
            self._context.fencing.grant(self.rank.name, accepted.room, accepted.generation, *ranges)

    def ask(self, lasts: float, unmet: tuple[wire.Unmet, ...]) -> bool:
        """Send the request. Returns whether that was possible.

        Args:
            lasts: Seconds that the room may take.
            unmet: Earlier uses of the id that ended, and for which the rank may not have had a room.
        """
        accepted = self._accepted
        named = accepted.items
        items = {
            name: wire.ItemList(named[name].first, named[name].ids.astype(wire.INDEX, copy=False).tobytes())
            for name in self.hooks
        }
        self.in_flight.asked = True
        if not (self._acting or self._elsewhere or not self._expected) and self._context.config.verify == "off":
            self._landing = self._context.landing
        request = wire.Request(
            **self._header(),
            tokens=accepted.tokens,
            least=accepted.least if accepted.least != accepted.tokens else 0,
            prefix=accepted.prefix,
            items=items,
            prepared=self._prepared,
            elsewhere=self._elsewhere,
            lifetime_ms=int(1000 * min(lasts, MOST_DEADLINE_SECONDS)) + 1,
            unmet=unmet,
            content=accepted.content,
            landing=self._landing is not None,
        )
        return self._context.channel.send(request, self.rank.address)

    # The writer's messages.

    def chunk(
        self,
        number: int,
        granules: Mapping[str, tuple[int, int]],
        layers: tuple[int, int] | None,
        then: Done,
    ) -> None:
        """A push is visible here: call the hooks' ``arrived``."""
        self._came.update(granules.keys() & self._expected.keys())
        if self._ended.raised or not self._acting:
            return
        for name, moved in granules.items():
            hook = self._acting.get(name)
            if hook is not None and type(hook).arrived is not ReceiveHook.arrived:
                arrival = Arrival(number, moved, layers)
                self._run(name, partial(hook.arrived, self._context_of(name), arrival), then)

    def note(self, component: str, payload: bytes, then: Done) -> None:
        """Give a receive hook the message of its counterpart."""
        hook = self.hooks.get(component)
        if hook is not None:
            self._run(component, partial(hook.message, self._context_of(component), payload), then)

    def finish(self, message: wire.Finished, landed: Callable[[IncomingDelivery], None]) -> Reason | None:
        """Take its last message.

        Args:
            message: The message.
            landed: Called on the control thread once all bytes have landed, if the message came before them. The writer
                has finished only then.

        Returns:
            Why the room fails, if the message's numbers are not those that this side computed.
        """
        if not message.landing:
            self.land()
        elif self._finishing or self._ended.raised:  # it came before, or the room failed, and its grant is gone
            return None
        reason = self._differs(message)
        if reason is None and message.landing:
            landing, accepted = self._landing, self._accepted
            if landing is None:
                what = "a writer's last message came before its bytes, and this side does not see these land"
                return self._reason("room.bytes", what)
            self._finishing = True
            # A thread of the backend calls this, or this thread.
            then = partial(self._context.post_job, partial(landed, self))
            use = self.rank.name, accepted.room, accepted.generation
            nbytes = sum(self._expected.values())
            if nbytes:
                landing.when_landed(*use, nbytes, then)
            else:  # decode did not know how many tokens there are, and holds them all
                self.land()
        return reason

    def land(self) -> None:
        """All that it had to write has landed, and it writes nothing more."""
        self.finished = True
        self.in_flight.prove(Proof.FINISHED)

    def _differs(self, message: wire.Finished) -> Reason | None:
        """Why the room fails, if the numbers of the last message are not those that this side computed."""
        if self._accepted.least != self._accepted.tokens:
            self._know(message.tokens)
        self.moved, self._digests = message.moved, message.digests
        self.rank.transport = message.transport or UNKNOWN
        if message.digest != self._plan.digest:
            cause = f"{self._plan.digest.hex()} on decode, {message.digest.hex()} on prefill"
            return self._reason("room.digest", "a writer followed another plan", cause)
        reported = {name: moved.nbytes for name, moved in message.moved.items() if moved.nbytes}
        expected = self._expected
        if reported == expected:
            return None
        names = sorted(name for name in reported.keys() | expected.keys() if reported.get(name) != expected.get(name))
        cause = "; ".join(f"{n}: {expected.get(n, 0)} bytes promised, {reported.get(n, 0)} moved" for n in names)
        what = "a writer did not move what the plan promised"
        return self._reason("room.bytes", what, cause, component=", ".join(names))

    def _know(self, tokens: int) -> None:
        """Note N, which prefill has said, and which fits the number of pages."""
        self._accepted = msgspec.structs.replace(self._accepted, tokens=tokens, least=tokens)
        self._expected = self._part.owed(tokens, self._accepted.prefix)
        for context in self._contexts.values():
            context.know(self._accepted)

    def finish_hooks(self, then: Done) -> None:
        """Call the hooks' ``finish``, since everything is written. The room ends once they and their transfers have."""
        for name, hook in self._acting.items():
            if type(hook).finish is not ReceiveHook.finish:
                self._run(name, partial(hook.finish, self._context_of(name)), then)

    # The end.

    @property
    def complete(self) -> bool:
        """Whether it has written everything, and no hook or comparison is under way."""
        return self.finished and not self.in_flight.working

    def verify(self, then: Done) -> None:
        """Compare digests, once, with what lies in memory. The room ends after that."""
        if self._verified or not self.complete:
            return
        self._verified = True
        what = "the comparison of digests"
        self.in_flight.begin(what)
        workers, accepted = self._context.workers, self._accepted

        # `job` runs on a data thread, `done` on the control thread.
        def job() -> Mapping[str, str]:
            return differing(self._plan, accepted, self._digests, self._ended, self._context.reader_of)

        def done(found: Mapping[str, str] | None, defect: Reason | None) -> None:
            self.in_flight.end(what)
            then(self._not_as_sent(found) if found else defect)

        who = {"room": accepted.room, "peer": self.rank.name}
        workers.run(workers.checks, ("room", accepted.room, self.rank.name), job, done, **who)

    def _not_as_sent(self, found: Mapping[str, str]) -> Reason:
        return self._reason(
            "room.verify",
            "what arrived is not what was sent",
            "; ".join(found.values()),
            "the transport or the memory is at fault, or an engine wrote to pages of the request; use nothing of it",
            component=", ".join(found),
            rank=self.rank.rank,
        )

    def say_received(self) -> None:
        """Send Received: the room has everything from every rank."""
        self._context.channel.send(wire.Received(**self._header()), self.rank.address)

    def tell_failed(self, reason: Reason) -> None:
        """Send Failed. Also to a rank that got no request, since its engine may have a room open that waits for one."""
        self._context.channel.send(wire.Failed(**self._header(), reason=reason), self.rank.address)

    def abort(self, then: Done) -> None:
        """The room failed: call the hooks' ``abort``, and count a writer without a request as drained."""
        if not self.in_flight.asked and self._context.fencing is None:
            # Without a fence, only a request lets it write. With a fence, a data thread may be about to grant memory to
            # it. `revoke` runs after that. Only then it has drained.
            self.in_flight.prove(Proof.UNASKED)
        for name, hook in self._acting.items():
            if type(hook).abort is not ReceiveHook.abort:
                self._run(name, partial(hook.abort, self._context_of(name)), then)

    def revoke(self, closed: Callable[[str, Proof], None]) -> None:
        """Revoke the writer's grant. Does nothing if this side's backend cannot revoke.

        Args:
            closed: Called on the control thread with the rank's name and the proof, once no write of it can land,
                unless it had drained before.
        """
        fencing, accepted, name = self._context.fencing, self._accepted, self.rank.name
        if fencing is None:
            return
        workers = self._context.workers

        # Runs after the job that grants, since the two have the same key: on a data thread, or here if it never blocks.
        def job() -> None:
            transfer: object = fencing.revoke(name, accepted.room, accepted.generation)
            if not isinstance(transfer, Transfer):
                raise BackendDefect.returned(self._context.backend, "`revoke` returned", transfer, "a Transfer")
            if transfer.outcome is None or not self.in_flight.drained:
                workers.watch(transfer, lambda ok, _: closed(name, Proof.REVOKED) if ok else None)

        key = "room", accepted.room
        if not (self._context.backend.capabilities.prompt_fences and workers.fence_here(key, job)):
            workers.fences.submit_job(key, job)

    def tell_released(self) -> None:
        """Call the hooks' ``released``, once, if nothing of this writer is in flight on this side."""
        if self._released or self.in_flight:
            return
        self._released = True
        workers, room = self._context.workers, self._accepted.room
        for name, hook in self._acting.items():
            if type(hook).released is not ReceiveHook.released:
                call = partial(hook.released, self._context_of(name))
                if self.in_flight.asked:
                    workers.moves.submit_job(("hook", room), call)
                else:  # a data thread may still be in `prepare`
                    self._submit(call)

    # The hooks.

    def _context_of(self, component: str) -> ReceiveHookContext:
        """What a hook sees of the room. Made when the hook is called first, maybe on a data thread, by `prepare`."""
        found = self._contexts.get(component)
        if found is None:
            part = self._plan.components[component]
            made = ReceiveHookContext(
                self._context, self._accepted, self.rank, component, part, self._ended, self._fail
            )
            found = self._contexts.setdefault(component, made)
        return found

    def _run(self, component: str, call: Callable[[], Transfer | None], then: Done) -> None:
        """Call a hook on a data thread, and follow the transfer that it returns. ``then`` runs after both."""
        what = f"the receive hook of component {component!r}"
        self.in_flight.begin(what)
        workers, strategy = self._context.workers, self._context.strategies[component].name
        who = {"room": self._accepted.room, "component": component, "peer": self.rank.name, "strategy": strategy}

        def done(ok: bool, reason: Reason | None) -> None:
            self.in_flight.end(what)
            if not ok and reason is None:
                reason = self._reason(
                    "room.hook", f"a receive hook of component {component!r} failed", component=component
                )
            then(reason)

        flush = self._context.flush

        # A data thread. The hook may read what peers wrote.
        def visible() -> Transfer | None:
            if flush is not None:
                flush()
            return call()

        self._submit(lambda: workers.run_transfer(visible, done, **who))

    def _submit(self, job: Callable[[], object]) -> None:
        # First to `fences` with the room's key, so that this follows `prepare`. Then on to `moves`, so that a hook that
        # takes long does not delay fences.
        workers, room = self._context.workers, self._accepted.room
        workers.fences.submit_job(("room", room), partial(workers.moves.submit_job, ("hook", room), job))

    # Words.

    def _reason(
        self, code: str, what: str, cause: str = "", hint: str = "", *, component: str | None = None, **who: object
    ) -> Reason:
        room, peer = self._accepted.room, self.rank.name
        return room_reason(self._context, room, code, what, cause, hint, component=component, peer=peer, **who)

    def _header(self) -> wire.RoomHeader:
        return wire.RoomHeader(
            sender=self._context.handshake.link,
            to=self.rank.name,
            room=self._accepted.room,
            generation=self._accepted.generation,
        )

    def waits_for(self) -> str:
        """What the room still waits for from this rank; empty where there is nothing. Any thread."""
        rank = "?" if self.rank.rank is None else self.rank.rank
        if self.finished:
            under_way = self.in_flight.words
            return f"{under_way} for what came from rank {rank}" if under_way else ""
        begun = [name for name in self._expected if name in self._came]
        parts = [", ".join(name for name in self._expected if name not in self._came)]
        parts += [f"the rest of {', '.join(begun)}"] if begun else []
        return f"{' and '.join(filter(None, parts)) or 'its last message'} from rank {rank}"


@lru_cache(maxsize=64)
def _acts(kind: type[ReceiveHook]) -> bool:
    """Whether hooks of a class do more than prepare and take messages."""
    names = "arrived", "finish", "abort", "released"
    return any(getattr(kind, name) is not getattr(ReceiveHook, name) for name in names)
