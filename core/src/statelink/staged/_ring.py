"""Space in registered memory, lent in the order in which it was asked for."""

from __future__ import annotations

import threading
from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from statelink.errors import RoomError

if TYPE_CHECKING:
    from ._memory import StagingMemory

__all__ = ["Ring"]

ALIGN = 256


class _Asked(NamedTuple):
    owner: object
    nbytes: int
    then: Callable[[int], None]


class Ring:
    """Memory of one kind, shared by all rooms of a link. Thread-safe; nothing here blocks.

    Space is not given back in order: what is quarantined for long must not stand in the way of the rest.

    Args:
        memory: The memory.
        region: Its number in the rank's region table.
    """

    def __init__(self, memory: StagingMemory, region: int) -> None:
        self.memory = memory
        self.region = region
        self._lock = threading.Lock()
        self._waiting: deque[_Asked] = deque()
        self._lent: dict[int, tuple[int, object]] = {}
        self._order: list[int] = []
        self._quarantined: set[object] = set()

    def ask(self, owner: object, nbytes: int, then: Callable[[int], None]) -> None:
        """Ask for space; ``then`` is called with its offset, at once or by whoever gives space back.

        Raises:
            RoomError: It can never be had.
        """
        if not 0 < nbytes <= self.memory.nbytes:
            raise RoomError(
                "a parcel can never fit into the staging memory",
                cause=f"it has {nbytes} bytes, and the ring {self.memory.nbytes}",
                hint="make the staging memory larger, or leave the component out of staging",
                code="room.staging",
            )
        with self._lock:
            self._waiting.append(_Asked(owner, nbytes, then))
        self._serve()

    def give(self, at: int) -> None:
        """Give space back: nothing is written to it or read from it any more."""
        with self._lock:
            _, owner = self._lent.pop(at)
            self._order.remove(at)
            if all(other is not owner for _, other in self._lent.values()):
                self._quarantined.discard(owner)
        self._serve()

    def drop(self, owner: object) -> None:
        """Its owner has failed: it waits for nothing any more, and what it holds counts as quarantined."""
        with self._lock:
            self._waiting = deque(each for each in self._waiting if each.owner is not owner)
            if any(other is owner for _, other in self._lent.values()):
                self._quarantined.add(owner)
        self._serve()

    def snapshot(self) -> dict[str, int]:
        """Bytes there are, lent, and quarantined among those; and how many wait."""
        with self._lock:
            return {
                "bytes": self.memory.nbytes,
                "lent": sum(nbytes for nbytes, _ in self._lent.values()),
                "quarantined": sum(nbytes for nbytes, owner in self._lent.values() if owner in self._quarantined),
                "waiting": len(self._waiting),
            }

    def _serve(self) -> None:
        """Lend to who has waited for longest, and so on; whoever does not fit lets nobody past."""
        served: list[tuple[Callable[[int], None], int]] = []
        with self._lock:
            while self._waiting:
                asked = self._waiting[0]
                at = self._find(asked.nbytes)
                if at is None:
                    break
                self._waiting.popleft()
                self._lent[at] = asked.nbytes, asked.owner
                insort(self._order, at)
                served.append((asked.then, at))
        for then, at in served:
            then(at)

    def _find(self, nbytes: int) -> int | None:
        free = 0
        for at in self._order:
            if at - free >= nbytes:
                return free
            free = -(-(at + self._lent[at][0]) // ALIGN) * ALIGN
        return free if self.memory.nbytes - free >= nbytes else None
