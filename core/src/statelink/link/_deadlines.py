"""Rooms by the time at which they must have ended."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from ._room import Room
from ._status import ENDED

if TYPE_CHECKING:
    from ._node import Node

__all__ = ["Deadlines"]

AnyRoom = TypeVar("AnyRoom", bound=Room)


class Deadlines(Generic[AnyRoom]):
    """Calls ``expired`` for each room that has not ended by its deadline. Belongs to the control thread.

    Args:
        node: The link's control thread.
        expired: Called on it, once per room.
    """

    def __init__(self, node: Node, expired: Callable[[AnyRoom], None]) -> None:
        self._node = node
        self._expired = expired
        self._heap: list[tuple[float, int, AnyRoom]] = []
        self._numbers = itertools.count()
        self._compact_at = 1024
        self._armed = math.inf

    def add(self, room: AnyRoom) -> None:
        """Watch a room."""
        heapq.heappush(self._heap, (room._deadline, next(self._numbers), room))
        self._arm()
        if len(self._heap) > self._compact_at:
            # Rooms that ended long before their deadline would otherwise stay in memory until then.
            self._heap = [each for each in self._heap if each[2].status not in ENDED]
            heapq.heapify(self._heap)
            self._compact_at = max(1024, 2 * len(self._heap))

    def _arm(self) -> None:
        """Have one timer for the earliest deadline; one that was set for a later time fires in vain."""
        if self._heap and self._heap[0][0] < self._armed:
            self._armed = self._heap[0][0]
            self._node.after(self._armed - self._node.now(), self._look)

    def _look(self) -> None:
        now = self._node.now()
        if now < self._armed:
            return
        self._armed = math.inf
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].status in ENDED):
            room = heapq.heappop(self._heap)[2]
            if room.status not in ENDED:
                self._expired(room)
        self._arm()
