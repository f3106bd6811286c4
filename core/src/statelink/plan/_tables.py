"""Memory for the arrays of blocks. It is used again for other blocks once nobody refers to it.

The kernel clears each fresh page before it is written to. For a room of 65,536 blocks, this takes five times as long as
all other planning (1.04 ms instead of 0.19 ms). For rooms of up to about 8,000 blocks it makes no difference. These are
medians of ``benchmarks.plan``'s cases of random pages and of TP 8 to 4, with and without this memory.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

__all__ = ["PIECE_ELEMENTS", "table"]

U64 = npt.NDArray[np.uint64]

PIECE_ELEMENTS = 1 << 15
"""Elements of one piece of memory that is used again: four for each block of the largest batch."""
SMALLEST = 1 << 14
"""Least elements for which it pays. For less, the allocator has used pages at hand."""
KEPT_PIECES = 8
"""Most pieces of memory that wait to be used again. Each has 256 KiB."""

_free: deque[bytearray] = deque(maxlen=KEPT_PIECES)  # appending and popping are atomic


def table(nelements: int) -> U64:
    """An uninitialised one-dimensional array. It belongs to the caller, and to everybody who has a view of it.

    Thread-safe, never blocks. The thread that drops the last view gives the memory back.

    Args:
        nelements: Elements wanted; uint64.
    """
    if not SMALLEST <= nelements <= PIECE_ELEMENTS:
        return np.empty(nelements, np.uint64)
    try:
        memory = _free.pop()
    except IndexError:
        memory = bytearray(8 * PIECE_ELEMENTS)
    # Every view refers to this array, because its memory belongs to no other array. So it lives as long as the last
    # view.
    owner = np.frombuffer(memory, np.uint64)
    weakref.finalize(owner, _free.append, memory).atexit = False
    return owner[:nelements]
