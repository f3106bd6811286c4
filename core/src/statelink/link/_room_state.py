"""The state of one room on one side: what sending and receiving have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from statelink._logs import logger
from statelink.backend import Moved, RoomReport
from statelink.errors import Reason
from statelink.hints import MORE_THREADS

from ._reasons import PeerInfo, with_standing
from ._room_memory import RoomMemory
from ._status import ENDED, FOLLOWS, Status
from .runtime import Flag

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ._context import Context
    from ._ready import Ready
    from ._room_table import RoomTable

__all__ = ["RoomState", "room_reason"]

log = logger("statelink.link")


def room_reason(
    context: Context, room: int, code: str, what: str, cause: str = "", hint: str = "", **who: object
) -> Reason:
    """A reason that names a room. Any thread."""
    named = {"room": str(room), "backend": context.backend.name}
    named.update({key: str(value) for key, value in who.items() if value is not None})
    return Reason(code, what, named, cause, hint)


class RoomState:
    """What sending and receiving have in common.

    The control thread alone changes it, except for its `RoomMemory`. Every property may be read from any thread.

    Args:
        context: The link's parts.
        table: The rooms of the link; told of every change.
        room: The non-zero 64-bit id that both sides use for the request.
        tokens: N: positions of the request; ``None`` if prefill takes it from decode.
        deadline: Seconds that the room may take; the configured default when not given.

    Attributes:
        tokens: N; ``None`` while this side does not know.
        role: What this link does in the room: ``prefill`` sends, ``decode`` receives.
        prefix: P: positions that decode already holds; ``None`` while this side does not know.
        opened: When the room was opened, on the link's clock.
        deadline: When the room must have ended, on the link's clock.
        status: How far the room is.
        reason: Why the room failed; ``None`` while it has not failed.
        memory: How the memory stands that this side named.
        nbytes: Bytes of the pushes that were moved so far.
        settled: Pushes, counted from the first, that nothing reads any more; see `Sending.settled`. 0 on decode.
        content: The content of the request, as this side's engine states it; empty while it has stated none. Threads
            of the engine set it, before they name memory.
        ended: Set once the room has ended.
    """

    role: ClassVar[str]

    # Every room begins with these values. They are attributes of the class, so that the engine's thread, which opens
    # the room, has nothing to set.
    prefix: int | None = None
    status = Status.BOOTSTRAPPING
    reason: Reason | None = None
    nbytes = 0
    settled = 0
    content = b""
    _met: float | None = None
    """When the room went on from bootstrapping."""
    _over: float | None = None
    """When the room ended."""
    _wanted: tuple[str, str] | None = None
    """Who wants the memory back without proof (``engine`` or ``take_back_after``), and why; ``None`` if nobody does."""
    _told_taken_back = False
    _chunks = 0

    def __init__(
        self,
        context: Context,
        table: RoomTable,
        room: int,
        tokens: int | None,
        deadline: float | None,
    ) -> None:
        self.context = context
        self.room = room
        self.tokens = tokens
        self.opened = opened = context.now()
        self._term = context.config.deadline if deadline is None else deadline
        """Seconds that the engine gave the room last."""
        self.deadline = opened + self._term
        self.ended = Flag()
        self._table = table
        self.memory = RoomMemory()
        self._moved: dict[str, Moved] = {}

    @property
    def over(self) -> bool:
        """Whether the room has ended and quiesced: then its id may be used again."""
        return self.status in ENDED and self.memory.quiesced

    def wait(self, timeout: float | None, *, quiesced: bool) -> Status:
        """Block until the room ended, or ended and quiesced, or the time is over. A thread of the engine."""
        until = None if timeout is None else time.monotonic() + timeout
        if self.ended.wait(timeout) and quiesced:
            self.memory.wait(None if until is None else max(0.0, until - time.monotonic()))
        return self.status

    @property
    def report(self) -> RoomReport:
        """What was measured of the room so far."""
        waited, transferred = self.durations()
        return RoomReport(
            room=self.room,
            role=self.role,
            backend=self.context.backend.name,
            status=self.status.name.lower(),
            reason=self.reason,
            moved=dict(self._moved),
            tokens=self.tokens or 0,
            prefix=self.prefix or 0,
            chunks=self._chunks,
            waited=waited,
            transferred=transferred,
            ended=None if self._over is None else time.time() - (self.context.now() - self._over),
            transports=self.transports(),
            link=self.context.name,
        )

    def durations(self) -> tuple[float, float]:
        """Seconds from the opening until the sides had met, and from then to the end, or until now. Any thread."""
        now = self._over or self.context.now()
        met = self._met or now
        return met - self.opened, now - met

    # What each side defines for itself.

    def peers(self) -> list[PeerInfo]:
        """The ranks of the other side that take part in the room. Any thread."""
        raise NotImplementedError

    def transports(self) -> dict[str, str]:
        """Per peer, the transport that carries the bytes, as far as it is known. Any thread."""
        raise NotImplementedError

    def carried(self) -> Iterable[tuple[str, str, int]]:
        """Component, transport and bytes that moved, for each peer. Control thread."""
        raise NotImplementedError

    def waits_for(self) -> str:
        """What the room still waits for, in words; empty where there is nothing. Any thread."""
        raise NotImplementedError

    def refusal(self) -> str:
        """The refusal that may be why nobody has met the room, in words; empty for none. Any thread."""
        return ""

    def held(self) -> tuple[int, str]:
        """Bytes of this side's memory that were named for the room, and what they wait for. Any thread."""
        raise NotImplementedError

    def fail(self, reason: Reason) -> None:
        """End the room in failure, if it has not ended, and tell the other side. Control thread."""
        raise NotImplementedError

    def expire(self) -> None:
        """The room has passed its deadline. Control thread."""
        raise NotImplementedError

    def abort(self, why: str) -> None:
        """The engine gives the room up. Control thread."""
        raise NotImplementedError

    def link_closes(self) -> None:
        """This side's link is closed, so that this side is lost to the other one. Control thread."""
        link = self.context.name
        self.fail(self.reason_for("peer.lost", f"{self.role} was lost", "its link was closed", link=link))

    def extend(self, seconds: float) -> None:
        """The engine sets a new deadline, ``seconds`` from now. Control thread."""
        self._term = seconds
        self._set_deadline(self.context.now() + seconds)

    def keep(self, seconds: float) -> None:
        """The other side will need the room within ``seconds``. The deadline may become later by it. Control thread."""
        deadline = self.context.now() + min(seconds, self._term)
        if deadline > self.deadline:
            self._set_deadline(deadline)

    def _set_deadline(self, deadline: float) -> None:
        self.deadline = deadline
        if self.status not in ENDED:
            self._table.watch(self)

    def _untouched(self) -> bool:
        """Whether nothing touches the memory that this side named, as far as the control thread has heard of it."""
        raise NotImplementedError

    # Steps.

    def step(self, status: Status) -> bool:
        """Go on to a status, if that may follow the present one. Returns whether it did. Control thread."""
        if status not in FOLLOWS[self.status]:
            return False
        if self._met is None and status > Status.BOOTSTRAPPING:
            self._met = self.context.now()
        if status not in ENDED:
            self.status = status
        else:
            self._over = self.context.now()
            self.status = status
            self.ended.set()
            self._table.ended(self)
        self._table.changed(self)
        return True

    def _end_in_failure(self, reason: Reason) -> Reason | None:
        """End in failure and return the room's reason; ``None`` if the room ended before. The first reason stays."""
        if self.status in ENDED:
            return None
        self.reason = self.explain(reason).clipped()
        self.step(Status.FAILED)
        self.context.events.forget(self)
        return self.reason

    # The memory that this side named.

    def prove_quiesced(self) -> None:
        """Note it if nothing touches the memory any more, and forget the room if it has ended. Control thread."""
        if self._untouched() and self.memory.prove_quiesced():
            self._table.changed(self)
        elif self._wanted is not None:
            self._maybe_take_back()
        if self.status in ENDED:
            self._table.forget(self)

    def take_back(self, why: str) -> None:
        """The engine takes the memory back without proof. A thread of the engine.

        If the room has ended, and this process does not touch the memory, the id may be used again when this returns.
        The control thread does the rest.
        """
        if self.status in ENDED:
            self.memory.take_back(self._touches)
        self.context.post_job(self._take_back_now, why)

    def _take_back_now(self, why: str) -> None:
        if self.status not in ENDED:
            self.abort(why)
        self._want_back("engine", why)

    def _want_back(self, by: str, why: str) -> None:
        """Take the memory back without proof, once this process does not touch it. Control thread; see `_wanted`."""
        self._wanted = self._wanted or (by, why)
        self._maybe_take_back()

    def _maybe_take_back(self) -> None:
        """Take the memory back that somebody wants back, unless this process touches it. Control thread."""
        if self._wanted is None or self._told_taken_back or not self.memory.take_back(self._touches):
            return
        self._told_taken_back = True
        by, why = self._wanted
        waits = self.held()[1]
        log.warning("room %d: memory is taken back without proof, by %s: %s; %s", self.room, by, why, waits)
        self._table.totals.taken_back(self, by)
        self._table.changed(self)
        self._table.forget(self)

    def _touches(self) -> bool:
        """Whether code of this process may still write to the memory. Any thread."""
        return False

    def _count_moved(self, moved: Mapping[str, Moved]) -> None:
        """Add what was moved of each component."""
        counted = self._moved
        for name, each in moved.items():
            counted[name] = counted[name] + each if name in counted else each
            self.nbytes += each.nbytes

    # Reasons.

    def reason_for(self, code: str, what: str, cause: str = "", hint: str = "", **who: object) -> Reason:
        """A reason that names this room. Any thread."""
        return room_reason(self.context, self.room, code, what, cause, hint, **who)

    def fail_late(self, code: str, what: str, cause: str, hint: str) -> None:
        """Fail the room because something did not come in time. Control thread."""
        if lack := self.context.workers.lack:  # what was waited for may be work that no thread of this link does
            cause, hint = f"{cause}; jobs of this link wait for a thread: {lack}", MORE_THREADS
        self.fail(self.reason_for(code, what, cause, hint))

    def explain(self, reason: Reason, others: Sequence[PeerInfo] = ()) -> Reason:
        """Add to a reason how the room stands. A reason from the other side already says how it stood there."""
        if reason.diagnostics:
            return reason
        context = self.context
        stands = {
            "room": str(self.room),
            "backend": context.backend.name,
            "side": f"{self.role} rank {context.inventory.rank}",
            "status": self.status.name.lower(),
        }
        return with_standing(reason, stands, [*self.peers(), *others], self.waits_for(), context.now())

    def bytes_of(self, items: Mapping[str, int]) -> int:
        """Bytes of the given number of items of each component."""
        inventory = self.context.inventory
        return sum(
            count * sum(buffer.layout.held for buffer in inventory.component(name).buffers if buffer.count)
            for name, count in items.items()
        )

    # The engine's event.

    def _is_ready(self, ready: Ready | None, again: Callable[[], None]) -> bool:
        """Whether the engine's event lets memory be touched; if not, ``again`` is called a little later.

        An event that raises fails the room.
        """
        if ready is None:
            return True
        try:
            return self.context.events.happened(ready, self, again)
        except BaseException as error:
            cause = f"its query() raised {type(error).__name__}: {error}".removesuffix(": ")
            self.fail(self.reason_for("room.ready", "the engine's ready event failed", cause))
            return False
