"""Memory for blocks, taken again once nobody holds it: fresh pages cost more than all that is written to them."""

from __future__ import annotations

import sys
import threading

import numpy as np
import numpy.typing as npt

__all__ = ["KEPT", "table"]

U64 = npt.NDArray[np.uint64]

KEPT = 3
"""Tables kept a thread: one that is filled, one that is submitted, one that is on its way."""
SMALLEST = 1 << 13
"""Elements below which the allocator has pages at hand anyway."""


class _Kept(threading.local):
    def __init__(self) -> None:
        self.tables: list[U64] = []


_kept = _Kept()


def table(nelements: int, most: int) -> U64:
    """An uninitialised one-dimensional array. It is the caller's, and that of everybody who has a view of it.

    Thread-safe, never blocks. A thread keeps up to `KEPT` tables of ``most`` elements.

    Args:
        nelements: Elements wanted; uint64.
        most: Elements of the tables that are kept; more than that are allocated anew.
    """
    if not SMALLEST <= nelements <= most:
        return np.empty(nelements, np.uint64)
    tables = _kept.tables
    for place in range(len(tables)):
        # Every view holds a reference to the array that owns the memory, and new ones come only from old ones.
        if len(tables[place]) == most and sys.getrefcount(tables[place]) == ALONE:
            return tables[place][:nelements]
    fresh = np.empty(most, np.uint64)
    if len(tables) < KEPT:
        tables.append(fresh)
    return fresh[:nelements]


def _alone() -> int:
    # Interpreters differ in whether the argument counts.
    held: list[U64] = [np.empty(0, np.uint64)]
    return sys.getrefcount(held[0])


ALONE = _alone()
