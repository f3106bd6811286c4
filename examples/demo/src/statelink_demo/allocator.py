"""Ids handed out the way a busy engine does: scattered and out of order."""

from __future__ import annotations

import random

__all__ = ["OutOfItemsError", "ScatteredAllocator"]


class OutOfItemsError(RuntimeError):
    """A pool has fewer free items than a request needs."""


class ScatteredAllocator:
    """Hands out ids of one index space in random order; the order depends on the seed alone.

    Args:
        what: The word for one item in error messages.
        count: Number of items.
        seed: Determines the order.
    """

    def __init__(self, what: str, count: int, seed: int = 0) -> None:
        self._what = what
        self._count = count
        self._free = list(range(count))
        self._rng = random.Random(seed)

    @property
    def free(self) -> int:
        """Number of items that nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` ids.

        Raises:
            OutOfItemsError: Fewer are free; none is taken.
        """
        if count > len(self._free):
            raise OutOfItemsError(f"{count} {self._what}s needed, {len(self._free)} of {self._count} free")
        self._rng.shuffle(self._free)
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return tuple(taken)

    def release(self, ids: tuple[int, ...]) -> None:
        """Give ids back.

        Raises:
            ValueError: An id is not one that is held; nothing is given back.
        """
        held = set(range(self._count)).difference(self._free)
        if len(set(ids)) != len(ids) or not held.issuperset(ids):
            raise ValueError(f"{self._what}s {ids} are not all held")
        self._free.extend(ids)
