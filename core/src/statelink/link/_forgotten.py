"""Remembers, in bounded memory, for which rooms a tombstone had to be dropped.

It may say so of a room whose tombstone was not dropped. It never fails to say so of a room whose tombstone was.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

__all__ = ["REMEMBERED_SECONDS", "Forgotten"]

BITS, PROBES = 1 << 22, 4
"""Bits of one half, and how many of them stand for an id. With 250,000 ids in it, 1 of 400 other ids seems known."""
REMEMBERED_SECONDS = 3600.0
"""Seconds for which a half takes ids; an id is remembered for at least as long, and at most twice as long."""


class Forgotten:
    """Ids of rooms, as a Bloom filter in two halves that take turns. Belongs to the control thread.

    It takes no memory before the first id, and half a megabyte for each half after that, however many ids there are.
    If an id wrongly seems known, a room fails without need. If a known id were missed, a room could meet a request of
    another use of its id.

    Args:
        now: The link's clock.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._salt = secrets.randbits(64)
        self._halves: list[tuple[float, bytearray]] = []

    def add(self, room: int) -> None:
        """Remember a room."""
        now = self._now()
        if not self._halves or now - self._halves[-1][0] > REMEMBERED_SECONDS:
            self._halves = [*self._halves[-1:], (now, bytearray(BITS // 8))]
        bits = self._halves[-1][1]
        for place in self._places(room):
            bits[place >> 3] |= 1 << (place & 7)

    def __contains__(self, room: int) -> bool:
        if not self._halves:
            return False
        now = self._now()
        self._halves = [half for half in self._halves if now - half[0] <= 2 * REMEMBERED_SECONDS]
        places = self._places(room)
        return any(all(bits[place >> 3] >> (place & 7) & 1 for place in places) for _, bits in self._halves)

    def _places(self, room: int) -> list[int]:
        mixed = hash((self._salt, room)) & ((1 << 64) - 1)
        first, step = mixed & 0xFFFFFFFF, mixed >> 32 | 1
        return [(first + number * step) % BITS for number in range(PROBES)]
