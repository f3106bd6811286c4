"""Watches the deadlines of rooms."""

from __future__ import annotations

import heapq
import itertools
import math
import weakref
from typing import TYPE_CHECKING

from ._status import ENDED

if TYPE_CHECKING:
    from ._context import Context
    from ._room_state import RoomState

__all__ = ["Deadlines"]

Entry = tuple[float, int, "weakref.ref[RoomState]"]
"""A deadline on the link's clock, a number that makes entries different, and the room."""


class Deadlines:
    """Calls `RoomState.expire` of each room that has not ended by its deadline. Belongs to the control thread.

    Args:
        context: The link's parts.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
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
            self._context.after(self._armed - self._context.now(), self._look)

    def _look(self) -> None:
        now = self._context.now()
        if now < self._armed:
            return
        self._armed = math.inf
        while self._heap and (self._heap[0][0] <= now or _due(self._heap[0]) is None):
            room = _due(heapq.heappop(self._heap))
            if room is not None:
                self._context.loop.guard(room.expire)  # one that raises must not keep the others from their end
        self._arm()


def _due(entry: Entry) -> RoomState | None:
    """The room of an entry; ``None`` if it has ended, does not exist any more, or has another deadline."""
    room = entry[2]()
    return room if room is not None and room.status not in ENDED and room.deadline == entry[0] else None
