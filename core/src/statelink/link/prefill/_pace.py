"""How much to one peer is under way in the library at once, from how much it was seen to take."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Pace"]

QUEUE_SECONDS = 3e-3
"""For so long, what comes later may wait in the library for what is under way."""
ALONE = 3
"""So many times as long a batch takes where only one transfer is under way at a time, since it ends before the next one
begins."""
LEAST_BYTES = 256 << 10
"""Least bytes of a batch."""
FIRST_BYTES = 2 << 20
"""Bytes of a batch as long as nothing is known of the peer."""
MOST_BYTES = 256 << 20
"""Most bytes that are under way: 300 ms of 7 Gbit/s."""
BATCHES = 2
"""Batches that are under way at least: while one moves, the next one waits in the library."""
MOST_BATCHES = 16
"""Batches that are under way at most, where threads are late."""
FORGIVEN = 63 / 64
"""How much of the additional batches is left after one that was not late."""
JITTER = 1 / 8
"""By so much of a peer's least latency, the latency changes without a queue."""
MEMORY = 7 / 8
"""How much the rate so far counts beside one more batch."""
LATENCY_SECONDS = 5.0
"""For so long, the least latency counts."""


class Pace:
    """Says how large the next batch to a peer may be, and whether it may go. Belongs to the jobs with the peer's key.

    A batch is what the peer takes in `QUEUE_SECONDS`, or in half of that where a second one may be under way meanwhile.
    More batches are under way after the library had nothing left to do while more waited here: then a thread of this
    process or of the peer's is late now and then, as beside an engine that computes.

    On a long line, far more must be under way. If a transfer took little longer than the fastest of the last seconds,
    nothing waits in the line, and more may be under way, until the line is full. If it took longer, less may be.

    A transfer that ends inside ``submit`` was never under way.

    Args:
        most: Most bytes of a batch.
        transfers: Most transfers that are under way.

    Attributes:
        batch_bytes: Bytes of the next batch.
    """

    def __init__(self, most: int, transfers: int) -> None:
        self._most = most
        self._transfers = transfers
        self._reserved = 1 if transfers > BATCHES else 0
        """Transfers that are kept free for small pushes."""
        self.batch_bytes = min(FIRST_BYTES, most)
        self._batches = float(BATCHES)
        self._window = self._long = 0
        """Bytes that may be under way, and those of a long line."""
        self._set_window()
        self._flying = 0
        self._flights = 0
        self._bytes = self._seconds = 0.0
        """Bytes that were moved, and how long that took. Earlier ones count less."""
        self._last = 0.0
        """When a transfer last ended."""
        self._least = math.inf
        """The least latency since about `LATENCY_SECONDS`, in seconds."""
        self._coming = math.inf
        """The least latency since `_turned`, which is the next `_least`."""
        self._turned = 0.0

    def piece(self, left: int) -> int:
        """How many of the bytes that are left of something the next batch may have. A small rest is not cut off."""
        return left if left <= min(2 * self.batch_bytes, self._most) else self.batch_bytes

    def admits(self) -> bool:
        """Whether the next batch of a large push may go."""
        return not self._flights or (self._flying < self._window and self._flights < self._transfers - self._reserved)

    def admits_small(self) -> bool:
        """Whether a small push may go, beside what others have under way."""
        return self._flights < self._transfers and self._flying < 2 * self._window

    def began(self, nbytes: int) -> None:
        """A transfer is under way."""
        self._flying += nbytes
        self._flights += 1

    def forgotten(self, nbytes: int) -> None:
        """Nobody looks at a transfer any more that was under way."""
        self._flying -= nbytes
        self._flights -= 1

    def ended_at_once(self, nbytes: int, since: float, now: float) -> None:
        """A transfer has ended inside ``submit``."""
        self._measure(nbytes, now - max(since, self._last))
        self._last = now
        self._cut()

    def ended(self, flights: Sequence[tuple[int, float]], now: float, *, waited: bool) -> None:
        """Transfers have ended that were under way.

        Args:
            flights: The bytes of each, and when it was submitted.
            now: When that was seen.
            waited: Whether more could have been under way.
        """
        total = sum(nbytes for nbytes, _ in flights)
        self._measure(total, now - max(min(since for _, since in flights), self._last))
        self._last = now
        for nbytes, since in flights:
            self._flying -= nbytes
            self._flights -= 1
            self._note(now - since, now)
            self._batches = max(self._batches * FORGIVEN, BATCHES)
            if waited and self._least > QUEUE_SECONDS:
                self._grow(nbytes, now - since)
        self._cut()

    def _grow(self, nbytes: int, latency: float) -> None:
        """Let more be under way, or less, after a transfer that took so long."""
        full = self._least * (1 + JITTER) + QUEUE_SECONDS
        if latency <= full:
            self._long = min(max(self._long, self._window) + nbytes, MOST_BYTES)
        else:
            self._long -= int(nbytes * min(1.0, latency / full - 1) / 2)

    def ran_dry(self) -> None:
        """Nothing is under way any more, although more could have been."""
        self._batches = min(2 * self._batches, MOST_BATCHES)
        self._set_window()

    def _measure(self, nbytes: int, took: float) -> None:
        """Note how fast bytes were moved. A small batch shows no more than the least rate."""
        if nbytes >= self.batch_bytes or nbytes * self._seconds > self._bytes * took:
            self._bytes = MEMORY * self._bytes + nbytes
            self._seconds = MEMORY * self._seconds + took

    def _note(self, latency: float, now: float) -> None:
        if now - self._turned > LATENCY_SECONDS / 2:
            self._least, self._coming, self._turned = self._coming, math.inf, now
        self._coming = min(self._coming, latency)
        self._least = min(self._least, latency)

    def _cut(self) -> None:
        """Set the bytes of a batch to those of `QUEUE_SECONDS`."""
        seconds = QUEUE_SECONDS if self._transfers > 1 else ALONE * QUEUE_SECONDS
        nbytes = int(self._bytes / self._seconds * seconds) if self._seconds > 0 else FIRST_BYTES
        self.batch_bytes = min(max(nbytes, LEAST_BYTES, self._long // MOST_BATCHES), self._most)
        self._set_window()

    def _set_window(self) -> None:
        self._window = max(int(self._batches * self.batch_bytes), self._long)
