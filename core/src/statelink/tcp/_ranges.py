"""Arithmetic on ranges of memory: vectorised, unsigned, and safe if an address plus a length wraps around."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["U64", "Ranges", "all_of", "merge"]

U64 = npt.NDArray[np.uint64]

ONE = np.uint64(1)
all_of = np.logical_and.reduce
"""Whether every element of an array is true. `numpy.ndarray.all` is this behind a function of Python."""
FEW = 500
"""Most comparisons for which numpy keeps the interpreter. Each of its searches lets go of it."""


def merge(addresses: U64, nbytes: U64) -> tuple[U64, U64]:
    """Join each range with the next ones in the list, if they continue it in memory."""
    if len(addresses) < 2:
        return addresses, nbytes
    apart = addresses[1:] != addresses[:-1] + nbytes[:-1]
    if all_of(apart):
        return addresses, nbytes
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return addresses[first], np.add.reduceat(nbytes, first)


class Ranges:
    """A set of ranges of memory. It can tell whether blocks are inside.

    It stores first and *last* bytes, because the end of a range may be 2^64, which no uint64 can hold.

    Args:
        addresses: Address of each range; sorted, and no range overlaps the next.
        nbytes: Length of each range, at least 1.

    Raises:
        ValueError: The ranges are not like this.
    """

    __slots__ = ("_first", "_last")

    def __init__(self, addresses: U64, nbytes: U64) -> None:
        if addresses.dtype != np.uint64 or nbytes.dtype != np.uint64 or addresses.shape != nbytes.shape:
            raise ValueError("ranges are two uint64 arrays of one length")
        last = addresses + (nbytes - ONE)
        if not (all_of(nbytes) and all_of(last >= addresses) and all_of(addresses[1:] > last[:-1])):
            raise ValueError("ranges are at least one byte long, sorted and disjoint")
        self._first, joined = merge(addresses, nbytes)
        self._last: U64 = self._first + (joined - ONE)

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]]) -> Ranges:
        """A set from pairs of address and length, in any order."""
        table = np.array(sorted(pairs), np.uint64).reshape(-1, 2)
        return cls(table[:, 0].copy(), table[:, 1].copy())

    def union(self, other: Ranges) -> Ranges:
        """Every byte of either."""
        first = np.concatenate((self._first, other._first))
        order = np.argsort(first, kind="stable")
        first, last = first[order], np.concatenate((self._last, other._last))[order]
        reach = np.maximum.accumulate(last)
        starts = np.flatnonzero(np.concatenate(([True], first[1:] > reach[:-1])))
        first, last = first[starts], reach[np.append(starts[1:], len(reach)) - 1]
        return Ranges(first, last - first + ONE)

    def outside(self, addresses: U64, nbytes: U64) -> int | None:
        """Index of the first block that is not inside this set, if there is one."""
        if not len(self._first):
            return 0 if len(addresses) else None
        after = _begun(self._first, addresses)
        last = self._last[after - 1]
        # What a block before the first range gets here, and a difference that wraps around, is masked by the comparison
        # before it.
        inside = (after > 0) & (addresses <= last) & (nbytes > 0) & (nbytes - ONE <= last - addresses)
        return _first_false(inside)


def _begun(first: U64, addresses: U64) -> npt.NDArray[np.int64]:
    """For each address, how many of the ascending ``first`` are not above it."""
    if len(first) * len(addresses) <= FEW:
        begun: npt.NDArray[np.int64] = np.add.reduce(first <= addresses[:, None], axis=1, dtype=np.int64)
        return begun
    return first.searchsorted(addresses, side="right")


def _first_false(flags: npt.NDArray[np.bool_]) -> int | None:
    return None if all_of(flags) else int(np.argmin(flags))
