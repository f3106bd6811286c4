"""Space in registered memory, lent in the order in which it was asked for."""

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


class _Lent(NamedTuple):
    owner: object
    nbytes: int
    peer: str


class Ring:
    """Memory of one kind, shared by all rooms of a link. Thread-safe; nothing here blocks.

    Space is not given back in order: what is quarantined for long must not stand in the way of the rest. And what one
    peer holds, which may die with it, is never more than half of what is left, unless that is its only parcel.

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
        self._lent: dict[int, _Lent] = {}
        self._order: list[int] = []
        self._quarantined: set[object] = set()

    def ask(self, owner: object, nbytes: int, then: Callable[[int], None], *, peer: str) -> None:
        """Ask for space; ``then`` is called with its offset, at once or by whoever gives space back.

        Args:
            owner: Who asks; see `drop`.
            nbytes: Bytes.
            then: Takes it over.
            peer: Whose bytes go through it.

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
            self._waiting.append(_Asked(owner, nbytes, then, peer))
            self._waiting_of[peer] += 1
        self._serve()

    def give(self, at: int) -> None:
        """Give space back: nothing is written to it or read from it any more."""
        with self._lock:
            owner = self._lent.pop(at).owner
            self._order.remove(at)
            if all(each.owner is not owner for each in self._lent.values()):
                self._quarantined.discard(owner)
        self._serve()

    def drop(self, owner: object) -> None:
        """Its owner has failed: it waits for nothing any more, and what it holds counts as quarantined."""
        with self._lock:
            self._waiting = deque(each for each in self._waiting if each.owner is not owner)
            self._waiting_of = Counter(each.peer for each in self._waiting)
            if any(each.owner is owner for each in self._lent.values()):
                self._quarantined.add(owner)
        self._serve()

    def waits(self, owner: object) -> str:
        """What an owner waits for, in words; empty if it waits for nothing."""
        with self._lock:
            wanted = sum(each.nbytes for each in self._waiting if each.owner is owner)
            lent = sum(each.nbytes for each in self._lent.values())
            standing = f"{lent} of its {self.memory.nbytes} bytes are lent, {self._kept()} of those are quarantined"
        return f"{wanted} bytes of this side's staging ring ({standing})" if wanted else ""

    def snapshot(self) -> dict[str, int]:
        """Bytes there are, lent, and quarantined among those; and how many wait."""
        with self._lock:
            return {
                "bytes": self.memory.nbytes,
                "lent": sum(each.nbytes for each in self._lent.values()),
                "quarantined": self._kept(),
                "waiting": len(self._waiting),
            }

    def _serve(self) -> None:
        """Lend to who has waited for longest, and so on; whoever does not fit lets nobody past.

        Only who has to wait for what its own peer holds does.
        """
        served: list[tuple[Callable[[int], None], int]] = []
        with self._lock:
            passed: deque[_Asked] = deque()
            full: set[str] = set()
            while len(full) < len(self._waiting_of):  # else nobody is left who might get some
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
                self._lent[at] = _Lent(asked.owner, asked.nbytes, asked.peer)
                insort(self._order, at)
                served.append((asked.then, at))
            self._waiting.extendleft(reversed(passed))
        for then, at in served:
            then(at)

    def _kept(self) -> int:
        """Bytes in quarantine."""
        return sum(each.nbytes for each in self._lent.values() if each.owner in self._quarantined)

    def _has_its_share(self, asked: _Asked) -> bool:
        """Whether a peer holds so much that it has to wait for itself."""
        held = sum(
            each.nbytes
            for each in self._lent.values()
            if each.peer == asked.peer and each.owner not in self._quarantined
        )
        return held > 0 and 2 * (held + asked.nbytes) > self.memory.nbytes - self._kept()

    def _find(self, nbytes: int) -> int | None:
        free = 0
        for at in self._order:
            if at - free >= nbytes:
                return free
            free = -(-(at + self._lent[at].nbytes) // ALIGN) * ALIGN
        return free if self.memory.nbytes - free >= nbytes else None
