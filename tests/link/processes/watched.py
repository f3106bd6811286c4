"""Looking into a link of this process, and taking out the checks whose worth is to be proven."""

from __future__ import annotations

import importlib
import mmap
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from statelink import Status
from statelink.backend import Transfer
from statelink.staged._receive import StagedReceive
from statelink.tcp._grants import Grant, Grants

if TYPE_CHECKING:
    from tests.quiescence.plan import Plan

    import statelink

__all__ = ["Watch", "holds", "open_the_gates", "shared"]

PHASES = (
    "before metadata",
    "before send",
    "mid-chunk",
    "between chunks",
    "after the last write",
    "during completion",
)


def shared(descriptor: int) -> mmap.mmap:
    """A page that both sides write to."""
    return mmap.mmap(descriptor, 4096)


class Watch:
    """Notes in which phase each room of a prefill link failed, and aborts where only a hook gets a foot in.

    Attributes:
        phases: ``"<who aborted>: <phase>"`` to rooms.
        left: Rooms that failed while a transfer of theirs was in flight.
    """

    def __init__(self) -> None:
        self.phases: Counter[str] = Counter()
        self.left = 0
        self._plans: dict[int, Plan] = {}
        self._written: set[int] = set()

    def reset(self) -> None:
        self.phases.clear()
        self.left = 0

    def expect(self, plan: Plan) -> None:
        """A room is about to be opened."""
        self._plans[plan.room] = plan

    def attach(self, link: statelink.Link) -> None:
        """Watch a prefill link, the only one of this process."""
        role: Any = link._prefill
        outgoing, asking = role._outgoing, role._asking
        fail, end, delivered, deliver = role.fail, asking._fail, outgoing._delivered, _deliver

        def note(room: Any, reason: Any) -> None:
            if room.status > Status.FAILED and room.status is not Status.SUCCEEDED:
                by = "decode" if reason.what.startswith("decode") else "prefill"
                by = by if reason.code == "room.aborted" else reason.code
                self.phases[f"{by}: {self._phase(room)}"] += 1
                self.left += any(each.moving for each in room._deliveries.values())

        def watched_fail(room: Any, reason: Any) -> None:
            note(room, reason)
            fail(room, reason)

        def watched_end(room: Any, reason: Any, *named: Any) -> None:
            note(room, reason)
            end(room, reason, *named)

        def watched_deliver(node: Any, delivery: Any, push: Any) -> Any:
            result = yield from deliver(node, delivery, push)
            if push.last and result.moving.reason is None and not result.moving.pending:
                self._written.add(id(delivery))
                if self._due(delivery.request.room, "written"):
                    node.rooms[delivery.request.room].abort("as planned")
            return result

        def watched_delivered(room: Any, delivery: Any, push: Any, result: Any) -> None:
            delivered(room, delivery, push, result)
            self._written.discard(id(delivery))
            if delivery.finished and self._due(room.room, "ending"):
                room._abort("as planned")

        role.fail, asking._fail, outgoing._delivered = watched_fail, watched_end, watched_delivered
        _module.deliver = watched_deliver
        self._break_batches(link._node.backend)

    def _due(self, room: int, trigger: str) -> bool:
        plan = self._plans.get(room)
        return plan is not None and plan.aborter == "prefill" and plan.trigger == trigger

    def _phase(self, room: Any) -> str:
        if room.status < Status.TRANSFERRING:
            return PHASES[0 if room.status is Status.BOOTSTRAPPING else 1]
        deliveries = room._deliveries.values()
        if any(each.finished for each in deliveries):
            return "during completion"
        if any(id(each) in self._written for each in deliveries):
            return "after the last write"
        return "mid-chunk" if any(each.moving for each in deliveries) else "between chunks"

    def _break_batches(self, backend: Any) -> None:
        """Let batches of some rooms fail in the library, over Mooncake: one of their entries goes nowhere."""
        if backend.name != "mooncake":
            return
        local = threading.local()
        submit, engine = backend.submit, backend._engine

        class Broken:
            def __getattr__(self, name: str) -> Any:
                return getattr(engine, name)

            def batch_transfer_sync_write(self, session: str, near: list[int], far: list[int], sizes: list[int]) -> int:
                if getattr(local, "broken", False):
                    near, far, sizes = [near[0], *near], [8, *far], [8, *sizes]
                return int(engine.batch_transfer_sync_write(session, near, far, sizes))

        def watched_submit(peer: str, batch: Any) -> Transfer:
            plan = self._plans.get(batch.room)
            local.broken = plan is not None and plan.broken
            made: Transfer = submit(peer, batch)
            return made

        backend._engine, backend.submit = Broken(), watched_submit


_module: Any = importlib.import_module("statelink.link._outgoing")
_deliver = _module.deliver


def open_the_gates() -> None:
    """Take decode's checks out: everything is admitted, a revoke stops nothing, staging space is lent again at once."""

    def admit(self: Grants, peer: str, room: int, generation: int, targets: Any, nbytes: Any) -> Grant:
        return Grant(self, (peer, room, generation), None)  # type: ignore[arg-type]

    def revoke(self: Grants, peer: str, room: int, generation: int) -> Transfer:
        done = Transfer()
        done.succeed()
        return done

    def abort(self: StagedReceive, context: Any) -> None:
        self.released(context)

    Grants.admit, Grants.revoke = admit, revoke  # type: ignore[method-assign]
    StagedReceive.abort = abort  # type: ignore[method-assign]


def holds(link: statelink.Link) -> int:
    """Handles, grants and the like that a link's backend holds for rooms."""
    backend: Any = link._node.backend
    if backend.name == "tcp":
        return len(backend._grants._grants)
    return len(backend._ledger.posted) if backend.name == "nixl" else 0
