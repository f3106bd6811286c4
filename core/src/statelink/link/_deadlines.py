"""Rooms by the time at which they must have ended."""

from __future__ import annotations

import heapq
import itertools
import math
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

from ._room import Room
from ._status import ENDED

if TYPE_CHECKING:
    from statelink.backend import ReceiveHook, SendHook

    from ._node import Node

__all__ = ["Deadlines", "waits_of"]

MOST_NAMED = 4
"""Hooks that an error names."""

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
        # Not held by this: a room that ended long before its deadline would stay in memory until then.
        self._heap: list[tuple[float, int, weakref.ref[AnyRoom]]] = []
        self._numbers = itertools.count()
        self._compact_at = 1024
        self._armed = math.inf

    def add(self, room: AnyRoom) -> None:
        """Watch a room."""
        heapq.heappush(self._heap, (room._deadline, next(self._numbers), weakref.ref(room)))
        self._arm()
        if len(self._heap) > self._compact_at:
            self._heap = [each for each in self._heap if _open(each[2]()) is not None]
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
        while self._heap and (self._heap[0][0] <= now or _open(self._heap[0][2]()) is None):
            room = _open(heapq.heappop(self._heap)[2]())
            if room is not None:
                self._expired(room)
        self._arm()


def waits_of(hooks: Iterable[tuple[str, SendHook | ReceiveHook]]) -> str:
    """What the hooks of a room wait for, as an addition to why it passed its deadline.

    Args:
        hooks: Under the names of their peer and component.
    """
    said = []
    for name, hook in hooks:
        try:
            what = hook.waits()
        except BaseException as error:  # somebody else's strategy: the room fails for the reason that is there
            what = f"what its hook cannot say: {type(error).__name__}: {error}"[:200]
        if what:
            said.append(f"; {name} waits for {what}")
    return "".join(said[:MOST_NAMED]) + (f"; and {len(said) - MOST_NAMED} more" if len(said) > MOST_NAMED else "")


def _open(room: AnyRoom | None) -> AnyRoom | None:
    """The room, if it is there and has not ended."""
    return room if room is not None and room.status not in ENDED else None
