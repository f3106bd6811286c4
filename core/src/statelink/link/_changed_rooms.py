"""The queue of rooms that changed, which the control thread fills and the engine takes."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._room import Room

__all__ = ["ChangedRooms"]

UNTAKEN_ROOMS = 4096
"""Most changed rooms that are kept until the first call of `ChangedRooms.take`. An engine may never call it, and look
at each of its rooms instead."""


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
