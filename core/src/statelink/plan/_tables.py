"""Memory for blocks. It is used again for other blocks once nobody holds any of it.

The kernel clears each fresh page before it is written to. For a room of 65,536 blocks that takes five times as long as
all other planning (1.04 ms instead of 0.19 ms); rooms of up to about 8,000 blocks cost the same either way. These are
medians of ``benchmarks.plan``'s cases of random pages and of TP 8 to 4, with and without this memory.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

__all__ = ["LARGEST", "table"]

U64 = npt.NDArray[np.uint64]

LARGEST = 1 << 17
"""Elements of the memory that is used again: four of each of the blocks of the largest batch."""
SMALLEST = 1 << 15
"""Elements below which the allocator has used pages at hand anyway."""
KEPT = 8
"""Most pieces of memory that wait to be used again, of a mebibyte each."""

_free: deque[bytearray] = deque(maxlen=KEPT)  # appending and popping are atomic


def table(nelements: int) -> U64:
    """An uninitialised one-dimensional array. It is the caller's, and that of everybody who has a view of it.

    Thread-safe, never blocks. Whichever thread drops the last view gives the memory back.

    Args:
        nelements: Elements wanted; uint64.
    """
    if not SMALLEST <= nelements <= LARGEST:
        return np.empty(nelements, np.uint64)
    try:
        memory = _free.pop()
    except IndexError:
        memory = bytearray(8 * LARGEST)
    # Every view refers to this array, since its memory is not another array's: it ends with the last of them.
    owner = np.frombuffer(memory, np.uint64)
    weakref.finalize(owner, _free.append, memory).atexit = False
    return owner[:nelements]
