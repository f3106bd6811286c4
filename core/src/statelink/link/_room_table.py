"""The rooms of a link, by their ids, their deadlines, and the queue of those that changed."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from statelink._logs import logger
from statelink.errors import ClosedError, RoomError

from ._status import ENDED
from ._totals import Totals

if TYPE_CHECKING:
    from ._context import Context
    from ._room import Room
    from ._room_state import RoomState
    from .runtime import Loop

__all__ = ["ChangedRooms", "Deadlines", "RoomTable", "Rooms", "closed", "suspended", "unfinished"]

UNTAKEN_ROOMS = 4096
"""Most changed rooms that are kept until the first call of `ChangedRooms.take`. An engine may never call it, and look
at each of its rooms instead."""

log = logger("statelink.link")

MOST_NAMED_ROOMS = 8
"""Most rooms that an error names."""

AnyState = TypeVar("AnyState", bound="RoomState")


class ChangedRooms:
    """Rooms that changed since the engine took them last, each of them once, in order. No lock is held.

    Args:
        most_rooms: Most rooms that a link may have. Twice as many changes are kept once the engine takes them.

    Attributes:
        dropped: Changes that were dropped, the oldest ones first, because nobody took them.
    """

    def __init__(self, most_rooms: int) -> None:
        self.dropped = 0
        self._most_rooms = most_rooms
        self._rooms: dict[Room, None] = {}
        """In order. The control thread adds to them, and a thread of the engine takes from them; each single operation
        is atomic."""
        self._most = UNTAKEN_ROOMS
        self._any = threading.Event()
        self._told = False
        """Whether `_any` is set, or about to be. See `take` for the order of the two."""

    def __len__(self) -> int:
        return len(self._rooms)

    def add(self, room: Room) -> None:
        """Put a room at the end, unless it is there. Control thread."""
        if room in self._rooms:
            return
        self._rooms[room] = None
        if not self._told:
            self._told = True
            self._any.set()
        if len(self._rooms) > self._most:
            with contextlib.suppress(StopIteration, RuntimeError, KeyError):  # the engine takes them meanwhile
                del self._rooms[next(iter(self._rooms))]
                self.dropped += 1

    def take(self, timeout: float | None) -> list[Room]:
        """Rooms that changed since the last call. Waits up to ``timeout`` seconds for the first one. Any thread."""
        self._most = max(UNTAKEN_ROOMS, 2 * self._most_rooms)
        until = None if timeout is None else time.monotonic() + timeout
        while not self._rooms and timeout != 0:
            if not self._any.wait(None if until is None else until - time.monotonic()):
                break
            # The event may be that of a change that an earlier call took: then the queue is empty, and this waits on.
            self._any.clear()
            self._told = False
        if self._told:
            # In this order, and before the queue is read. The control thread adds to the queue, then looks at `_told`,
            # and sets the event last. So after a later change, the event is set, or is about to be.
            self._any.clear()
            self._told = False
        found = []
        with contextlib.suppress(KeyError):  # another thread took the last one
            while self._rooms:
                # A change before this line is not queued again: the engine reads the status after this method returns.
                found.append(self._rooms.popitem()[0])
        found.reverse()
        return found


class RoomTable:
    """All rooms of a link by role and id. They share their deadlines and the queue of changes.

    Thread-safe; nothing blocks.

    Args:
        context: The link's parts.

    Attributes:
        watch: Watches a room's deadline, which is new, or has changed. Control thread.
        changes: Rooms that changed since the engine took them last.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.watch = Deadlines(context.loop).add
        self.totals = Totals()
        self._lock = threading.RLock()  # a signal handler or a `__del__` may call the link meanwhile
        """Guards the ids."""
        self._rooms: dict[str, dict[int, tuple[RoomState, Room]]] = {"prefill": {}, "decode": {}}
        """By the role that this link plays in the room, and by id."""
        self._unproven: dict[RoomState, None] = {}
        """Rooms whose memory was taken back, and whose transfers may still be in flight, in order."""
        self._shut = False
        """Whether no room may be opened, since the link is suspended."""
        self._ended = False
        """Whether no room may be opened any more, since the link is closed."""
        self.changes = ChangedRooms(context.config.max_rooms)
        self._end_hook = context.hooks.hook.statelink_room_ended

    def all(self) -> list[tuple[RoomState, Room]]:
        """Every room that is open or holds memory, with the engine's handle of it. Any thread."""
        with self._lock:
            return [entry for rooms in self._rooms.values() for entry in rooms.values()]

    def unproven(self) -> list[RoomState]:
        """Rooms whose memory was taken back, and whose transfers may still be in flight. Any thread."""
        if not self._unproven:  # read without the lock, because every message of an unknown use leads here
            return []
        with self._lock:
            return list(self._unproven)

    def by_id(self, role: str) -> Mapping[int, tuple[RoomState, Room]]:
        """The rooms in which this link plays this role, as they are at any time. Any thread."""
        return self._rooms[role]

    def enter(self, state: RoomState, handle: Room) -> None:
        """Open a room. Called on a thread of the engine.

        Raises:
            RoomError: Its id is in use, or too many rooms are open.
            ClosedError: The link is closed or suspended.
        """
        rooms = self._rooms[state.role]
        with self._lock:
            if self._ended:
                raise closed(self._context)
            if self._shut:
                raise suspended(self._context)
            known, _ = rooms.get(state.room, (None, None))
            if known is not None and not known.over:
                holds = "" if known.memory.quiesced else "; memory that it named may still be written or read"
                raise RoomError(
                    f"room {state.room} is in use",
                    cause=f"it is {known.status.name.lower()}{holds}",
                    hint="an id may be used again on this link once its room has ended and quiesced; take another id",
                    code="room.in_use",
                    **self._who(),
                )
            count = len(self._rooms["prefill"]) + len(self._rooms["decode"])
            if known is None and count >= self._context.config.max_rooms:
                raise RoomError(
                    f"room {state.room} is one too many",
                    cause=f"{count} rooms are open or hold memory, as many as 'max_rooms' allows",
                    hint="wait until others have ended and quiesced",
                    code="room.many",
                    **self._who(),
                )
            if known is not None and not known.memory.proven:  # the engine took it back just now, and uses the id again
                self._unproven[known] = None
            rooms[state.room] = state, handle

    def _who(self) -> dict[str, str]:
        return {"backend": self._context.backend.name, "link": self._context.name}

    @property
    def is_shut(self) -> bool:
        """Whether the link is suspended, or about to be. Any thread."""
        return self._shut

    def shut(self) -> None:
        """Let no room be opened, until `unshut`. A thread of the engine.

        Raises:
            RoomError: A room has not ended; then nothing has changed.
        """
        with self._lock:
            rooms = [state for entries in self._rooms.values() for state, _ in entries.values()]
            open_ = sorted(state.room for state in rooms if state.status not in ENDED)
            if open_:
                raise unfinished(self._context, open_, "have not ended", "wait for their end, or abort them")
            self._shut = True

    def unshut(self) -> None:
        """Let rooms be opened again. A thread of the engine."""
        self._shut = False

    def end(self) -> None:
        """Let no room be opened any more: what `all` returns after this is complete. A thread of the engine."""
        with self._lock:
            self._ended = True

    # What rooms report. Control thread.

    def changed(self, state: RoomState) -> None:
        """Put a room into the queue of changes, unless it is there."""
        try:
            current, handle = self._rooms[state.role][state.room]
        except KeyError:
            return
        if current is state:
            self.changes.add(handle)

    def ended(self, state: RoomState) -> None:
        """Count a room that has ended, and tell the observers."""
        self.totals.add(state)
        if not self._end_hook.get_hookimpls():
            return
        try:
            self._end_hook(report=state.report)
        except BaseException:
            log.exception("an observer of rooms failed")

    def forget(self, state: RoomState) -> None:
        """Free the id of a room that has ended and quiesced, and forget the room if that is proven."""
        if state.status not in ENDED:
            return
        rooms = self._rooms[state.role]
        with self._lock:
            if not state.memory.quiesced:
                return
            entry = rooms.get(state.room)
            if entry is not None and entry[0] is state:
                del rooms[state.room]
            if not state.memory.proven:
                self._unproven[state] = None
            elif self._unproven:
                self._unproven.pop(state, None)

    def load(self) -> dict[str, int]:
        """Numbers of changed rooms, and of rooms whose memory was taken back. Any thread."""
        return {
            "changes": len(self.changes),
            "changes_dropped": self.changes.dropped,
            "taken_back": len(self._unproven),
        }


class Rooms(Generic[AnyState]):
    """The rooms in which this link plays one role, by id.

    Args:
        table: All rooms of the link.
        kind: The class of the rooms of this role.
    """

    def __init__(self, table: RoomTable, kind: type[AnyState]) -> None:
        self._table = table
        self._kind = kind
        self._by_id: Mapping[int, tuple[Any, Room]] = table.by_id(kind.role)

    def get(self, room: int) -> AnyState | None:
        """The room with this id, if there is one. Any thread."""
        entry = self._by_id.get(room)
        return None if entry is None else entry[0]

    def all(self) -> list[AnyState]:
        """Every room of this role that is open or holds memory. Any thread.

        Rooms whose memory was taken back are among them, as long as one of their transfers may be in flight.
        """
        found = [*(state for state, _ in self._table.all()), *self._table.unproven()]
        return [state for state in found if isinstance(state, self._kind)]

    def unproven(self) -> list[AnyState]:
        """Rooms of this role that have ended, and for which there is no proof that they have quiesced. Any thread."""
        return [room for room in self.all() if room.status in ENDED and not room.memory.proven]

    def with_id(self, room: int) -> Sequence[AnyState]:
        """The room with this id, and those that had it and whose memory was taken back without proof. Any thread."""
        entry = self._by_id.get(room)
        found: list[AnyState] = [] if entry is None else [entry[0]]
        for state in self._table.unproven():
            if state.room == room and state not in found and isinstance(state, self._kind):
                found.append(state)
        return found


Entry = tuple[float, int, "weakref.ref[RoomState]"]
"""A deadline on the link's clock, a number that makes entries different, and the room."""


class Deadlines:
    """Calls `RoomState.expire` of each room that has not ended by its deadline. Belongs to the control thread.

    Args:
        loop: The control thread's loop.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        # Weak references: otherwise a room that ended long before its deadline would stay in memory until then.
        self._heap: list[Entry] = []
        self._numbers = itertools.count()
        self._compact_at = 1024
        self._armed = math.inf

    def add(self, room: RoomState) -> None:
        """Watch a room. Called again when its deadline has changed."""
        heapq.heappush(self._heap, (room.deadline, next(self._numbers), weakref.ref(room)))
        if room.deadline < self._armed:
            self._arm()
        if len(self._heap) > self._compact_at:
            self._heap = [each for each in self._heap if _due(each) is not None]
            heapq.heapify(self._heap)
            self._compact_at = max(1024, 2 * len(self._heap))

    def _arm(self) -> None:
        """Set a timer for the earliest deadline. Timers that were set for later times stay, and do no harm."""
        if self._heap and self._heap[0][0] < self._armed:
            self._armed = self._heap[0][0]
            self._loop.after(self._armed - self._loop.now(), self._look)

    def _look(self) -> None:
        now = self._loop.now()
        if now < self._armed:
            return
        self._armed = math.inf
        while self._heap and (self._heap[0][0] <= now or _due(self._heap[0]) is None):
            room = _due(heapq.heappop(self._heap))
            if room is not None:
                self._loop.guard(room.expire)  # one that raises must not keep the others from their end
        self._arm()


def _due(entry: Entry) -> RoomState | None:
    """The room of an entry; ``None`` if it has ended, does not exist any more, or has another deadline."""
    room = entry[2]()
    return room if room is not None and room.status not in ENDED and room.deadline == entry[0] else None


def closed(context: Context) -> ClosedError:
    """The error of a call that a closed link does not take."""
    return ClosedError("the link is closed", link=context.name)


def suspended(context: Context) -> ClosedError:
    """The error of a call that a suspended link does not take."""
    hint = "call resume() once the memory is back"
    return ClosedError("the link is suspended", hint=hint, code="closed.suspended", link=context.name)


def unfinished(context: Context, rooms: list[int], how: str, hint: str) -> RoomError:
    """The error of a link that cannot be suspended, because of ``rooms``, or because its control thread is late."""
    named = ", ".join(str(room) for room in rooms[:MOST_NAMED_ROOMS])
    more = f" and {len(rooms) - MOST_NAMED_ROOMS} more" if len(rooms) > MOST_NAMED_ROOMS else ""
    who = {"backend": context.backend.name, "link": context.name}
    cause = f"rooms {named}{more} {how}"
    if not rooms:
        cause = "transfers have not ended, or its control thread has not come to it in time, or failed"
        hint = "try again; the log says whether a job of that thread failed"
    return RoomError("the link cannot be suspended", cause=cause, hint=hint, code="room.unfinished", **who)
