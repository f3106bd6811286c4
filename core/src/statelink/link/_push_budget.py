"""How many pushes a link may have at once."""

from __future__ import annotations

import threading

__all__ = ["PushBudget"]


class PushBudget:
    """Counts the pushes of a link. Thread-safe.

    A push that waits for decode counts once. A push that is under way counts for each destination.

    Args:
        most: Most pushes that are admitted: the option ``max_pushes``.

    Attributes:
        pushes: How many are counted.
    """

    def __init__(self, most: int) -> None:
        self.pushes = 0
        self._most = most
        self._lock = threading.RLock()  # a signal handler or a `__del__` may push meanwhile

    def admit(self) -> bool:
        """Count a new push, and return true; false if so many are counted already. A thread of the engine."""
        with self._lock:
            if self.pushes >= self._most:
                return False
            self.pushes += 1
            return True

    def count(self, pushes: int) -> None:
        """Add ``pushes``, which may be negative. No limit applies here. Control thread."""
        with self._lock:
            self.pushes += pushes
