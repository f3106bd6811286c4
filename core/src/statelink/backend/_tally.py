"""Counts what peers do wrong, so that a flood of it does not fill the log."""

from __future__ import annotations

from collections import Counter

__all__ = ["Tally"]


class Tally(Counter[str]):
    """How often something has happened, by kind. Belongs to one thread; any thread may read it."""

    def note(self, kind: str) -> bool:
        """Count one more of a kind. Returns whether to log it: the 1st, 2nd, 4th, 8th, and so on."""
        self[kind] += 1
        return self[kind].bit_count() == 1
