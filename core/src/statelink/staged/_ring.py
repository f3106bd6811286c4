"""Space in registered memory. Those who ask get it in the order in which they asked."""

from __future__ import annotations

import threading
from bisect import insort
from collections import Counter, deque
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
    peer: str


class _Taken(NamedTuple):
    owner: object
    nbytes: int
    peer: str


class Ring:
    """Memory of one kind that all rooms of a link share. Thread-safe, never blocks.

    Space may be given back in any order, so that space in long quarantine does not block the rest. A peer may die, and
    its space is then quarantined. So one peer never gets more than half of the space that is not quarantined, unless
    this is its only parcel.

    Args:
        memory: The memory.
        region: Its number in the rank's region table.
    """

    def __init__(self, memory: StagingMemory, region: int) -> None:
        self.memory = memory
        self.region = region
        self._lock = threading.Lock()
        self._waiting: deque[_Asked] = deque()
        self._waiting_of: Counter[str] = Counter()
        self._taken: dict[int, _Taken] = {}
        self._order: list[int] = []
        self._quarantined: set[object] = set()

    def ask(self, owner: object, nbytes: int, then: Callable[[int], None], *, peer: str) -> None:
        """Ask for space. ``then`` is called with its offset, at once, or later by the thread that gives space back.

        Args:
            owner: The object that asks; see `drop`.
            nbytes: Number of bytes.
            then: Takes the space over.
            peer: The peer whose bytes go through it.

        Raises:
            RoomError: The ring is too small for it.
        """
        if not 0 < nbytes <= self.memory.nbytes:
            raise RoomError(
                "a parcel can never fit into the staging memory",
                cause=f"it has {nbytes} bytes, and the ring {self.memory.nbytes}",
                hint="make the staging memory larger, or leave the component out of staging",
                code="room.staging",
            )
        with self._lock:
            self._waiting.append(_Asked(owner, nbytes, then, peer))
            self._waiting_of[peer] += 1
        self._serve()

    def give(self, at: int) -> None:
        """Give space back. Nothing may write to it or read from it."""
        with self._lock:
            owner = self._taken.pop(at).owner
            self._order.remove(at)
            if all(each.owner is not owner for each in self._taken.values()):
                self._quarantined.discard(owner)
        self._serve()

    def drop(self, owner: object) -> None:
        """An owner has failed. It no longer waits, and its space counts as quarantined until it is given back."""
        with self._lock:
            self._waiting = deque(each for each in self._waiting if each.owner is not owner)
            self._waiting_of = Counter(each.peer for each in self._waiting)
            if any(each.owner is owner for each in self._taken.values()):
                self._quarantined.add(owner)
        self._serve()

    def waits(self, owner: object) -> str:
        """What an owner waits for, in words; empty for nothing."""
        with self._lock:
            wanted = sum(each.nbytes for each in self._waiting if each.owner is owner)
            taken = sum(each.nbytes for each in self._taken.values())
            situation = f"{taken} of its {self.memory.nbytes} bytes are in use, {self._kept()} of those are quarantined"
        return f"{wanted} bytes of this side's staging ring ({situation})" if wanted else ""

    def snapshot(self) -> dict[str, int]:
        """Bytes of the ring, bytes in use, quarantined bytes among these, and how many owners wait."""
        with self._lock:
            return {
                "bytes": self.memory.nbytes,
                "in_use": sum(each.nbytes for each in self._taken.values()),
                "quarantined": self._kept(),
                "waiting": len(self._waiting),
            }

    def _serve(self) -> None:
        """Give space to those who wait, in the order in which they asked, until one of them needs more than is free.

        Those whose own peer already holds its share of the ring are passed over. They keep their places.
        """
        served: list[tuple[Callable[[int], None], int]] = []
        with self._lock:
            passed: deque[_Asked] = deque()
            full: set[str] = set()
            while len(full) < len(self._waiting_of):  # otherwise all peers that wait have their share
                asked = self._waiting[0]
                if asked.peer in full or self._has_its_share(asked):
                    full.add(asked.peer)
                    passed.append(self._waiting.popleft())
                    continue
                at = self._find(asked.nbytes)
                if at is None:
                    break
                self._waiting.popleft()
                self._waiting_of[asked.peer] -= 1
                if not self._waiting_of[asked.peer]:
                    del self._waiting_of[asked.peer]
                self._taken[at] = _Taken(asked.owner, asked.nbytes, asked.peer)
                insort(self._order, at)
                served.append((asked.then, at))
            self._waiting.extendleft(reversed(passed))
        for then, at in served:
            then(at)

    def _kept(self) -> int:
        """Number of bytes in quarantine."""
        return sum(each.nbytes for each in self._taken.values() if each.owner in self._quarantined)

    def _has_its_share(self, asked: _Asked) -> bool:
        """Whether a peer holds so much space that it has to wait until it gives some back."""
        held = sum(
            each.nbytes
            for each in self._taken.values()
            if each.peer == asked.peer and each.owner not in self._quarantined
        )
        return held > 0 and 2 * (held + asked.nbytes) > self.memory.nbytes - self._kept()

    def _find(self, nbytes: int) -> int | None:
        free = 0
        for at in self._order:
            if at - free >= nbytes:
                return free
            free = -(-(at + self._taken[at].nbytes) // ALIGN) * ALIGN
        return free if self.memory.nbytes - free >= nbytes else None
