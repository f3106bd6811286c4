"""How fast each connection of a long line sends, so that all of them together do not overflow it."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from statelink.backend import Transfer

__all__ = ["Share"]

MORE: Final = 1.5
"""So many times what was seen of the line may leave this host. If less were allowed, nobody would see that the line has
become faster, and the others could not send more while one sends again what was lost. More fills the line's queue, and
what does not fit there is lost."""
REMEMBERED: Final = 32
"""Of so many times the best counts. At the beginning of a large push, TCP itself lets little go."""
KNOWN: Final = 3
"""After so many times, something is known of the line. TCP sends twice as much in each round trip at first."""
LEAST_SECONDS: Final = 20e-3
"""Least seconds in which bytes are counted."""


class Share:
    """Says how fast a connection may send, from what a line was seen to move.

    TCP cannot find out what a connection may send that carries a piece now and then: it never has enough to send. So it
    lets each of them send as fast as in a slow start, at almost three times what was seen, and it counts only what that
    connection moved while the others waited. Several together overflow the line's queue at the beginning of a request.

    Bytes are counted only while the line is full, and has been for a round trip: otherwise they show how fast the
    engine is, and not the line. A rate becomes lower only after it was not reached for `REMEMBERED` times. Thread-safe.

    Args:
        round_trip: Seconds of a round trip.
    """

    def __init__(self, round_trip: float) -> None:
        self._round_trip = round_trip
        self._lock = threading.Lock()
        self._flying: list[tuple[Transfer, int]] = []
        self._moved = 0
        """Bytes of batches that have ended, also of those that failed: too high a rate limits nobody."""
        self._began = 0.0
        """When bytes are counted from."""
        self._before: int | None = None
        """What had been moved then; ``None`` if that is still to come."""
        self._rates: deque[float] = deque(maxlen=REMEMBERED)
        self._best = 0.0

    def begins(self, batch: Transfer, nbytes: int, now: float, *, full: bool) -> None:
        """A batch is under way from now on.

        Args:
            batch: The batch.
            nbytes: Its bytes.
            now: In seconds.
            full: Whether batches wait on each connection behind those that it sends.
        """
        with self._lock:
            flying = [each for each in self._flying if each[0].outcome is None]
            self._moved += sum(size for _, size in self._flying) - sum(size for _, size in flying)
            self._flying = [*flying, (batch, nbytes)]
            if not full:
                self._began, self._before = now + self._round_trip, None
            elif self._before is None:
                if now >= self._began:
                    self._began, self._before = now, self._moved
            elif now - self._began >= max(self._round_trip, LEAST_SECONDS):
                self._rates.append((self._moved - self._before) / (now - self._began))
                self._best = max(self._rates)
                self._began, self._before = now, self._moved

    def of(self, number: int) -> float:
        """Bytes in a second for each of so many connections that send; 0 if nothing is known of the line."""
        return MORE * self._best / number if len(self._rates) >= KNOWN else 0.0
