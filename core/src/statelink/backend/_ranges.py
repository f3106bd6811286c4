"""Arithmetic on ranges of memory: vectorised, unsigned, and safe if an address plus a length wraps around."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

__all__ = ["Ranges"]

U64 = npt.NDArray[np.uint64]

ONE = np.uint64(1)
SPACE = 1 << 64
UNFIT = "ranges are at least one byte long, sorted and disjoint"
all_of = np.logical_and.reduce
"""Whether every element of an array is true. `ndarray.all` calls it through a function in Python, and is slower."""
BLOCKS_ONE_BY_ONE = 32
"""Most blocks that are looked at one by one, because numpy's calls then take longer."""
MOST_LISTED_RANGES = 1024
"""Most ranges of a set that is kept as lists of Python's, too, for that."""
MOST_COMPARISONS = 500
"""Most comparisons for which numpy keeps the interpreter. Each of its searches lets go of it."""


class Ranges:
    """A set of ranges of memory, of which those side by side are one. It can tell whether blocks are inside.

    A backend with an owner's fence may keep all of its registered memory in one set, and each grant in another. A set
    never changes, so any thread may use it.

    It stores first and *last* bytes, because the end of a range may be 2^64, which no uint64 can hold.

    Args:
        addresses: Address of each range; sorted, and no range overlaps the next.
        nbytes: Length of each range, at least 1.

    Raises:
        ValueError: The ranges are not like this.
    """

    __slots__ = ("_few", "_many")

    def __init__(self, addresses: U64, nbytes: U64) -> None:
        if addresses.dtype != np.uint64 or nbytes.dtype != np.uint64 or addresses.shape != nbytes.shape:
            raise ValueError("ranges are two uint64 arrays of one length")
        # First and last bytes, as lists, as arrays, or as both. Two threads may both make what is missing.
        self._few: tuple[list[int], list[int]] | None = None
        self._many: tuple[U64, U64] | None = None
        if len(addresses) <= BLOCKS_ONE_BY_ONE:
            self._few = _joined(addresses.tolist(), nbytes.tolist())
            return
        last = addresses + (nbytes - ONE)
        if not (all_of(nbytes) and all_of(last >= addresses) and all_of(addresses[1:] > last[:-1])):
            raise ValueError(UNFIT)
        begins = np.ones(len(addresses), np.bool_)
        begins[1:] = addresses[1:] - last[:-1] > ONE
        self._many = addresses[begins], last[np.append(begins[1:], True)[: len(last)]]

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> Ranges:
        """A set from pairs of address and length, in any order.

        Raises:
            ValueError: Ranges overlap, are empty, or end beyond the address space.
        """
        table = np.array(sorted(pairs), np.uint64).reshape(-1, 2)
        return cls(table[:, 0].copy(), table[:, 1].copy())

    def _arrays(self) -> tuple[U64, U64]:
        if self._many is None:
            assert self._few is not None
            self._many = np.array(self._few[0], np.uint64), np.array(self._few[1], np.uint64)
        return self._many

    def _lists(self) -> tuple[list[int], list[int]] | None:
        """The set as lists; ``None`` if it is too large for that."""
        if self._few is None:
            assert self._many is not None
            if len(self._many[0]) > MOST_LISTED_RANGES:
                return None
            self._few = self._many[0].tolist(), self._many[1].tolist()
        return self._few

    def union(self, other: Ranges) -> Ranges:
        """Every byte of either."""
        (ours, ours_last), (theirs, theirs_last) = self._arrays(), other._arrays()
        if not len(ours) or not len(theirs):
            return self if len(ours) else other
        first = np.concatenate((ours, theirs))
        order = np.argsort(first, kind="stable")
        first, last = first[order], np.concatenate((ours_last, theirs_last))[order]
        reach = np.maximum.accumulate(last)
        starts = np.flatnonzero(np.concatenate(([True], first[1:] > reach[:-1])))
        first, last = first[starts], reach[np.append(starts[1:], len(reach)) - 1]
        return Ranges(first, last - first + ONE)

    def outside(self, addresses: U64, nbytes: U64) -> int | None:
        """Index of the first block that is not inside this set; ``None`` if all are inside. An empty block never is.

        Args:
            addresses: First byte of each block, in any order; uint64.
            nbytes: Its length; uint64.
        """
        if len(addresses) <= BLOCKS_ONE_BY_ONE and (few := self._lists()) is not None:
            first_bytes, last_bytes = few
            for at, (address, length) in enumerate(zip(addresses.tolist(), nbytes.tolist(), strict=True)):
                before = bisect_right(first_bytes, address)
                if not before or not length or address + length - 1 > last_bytes[before - 1]:
                    return at
            return None
        first, last = self._arrays()
        if not len(first):
            return 0 if len(addresses) else None
        after = _begun(first, addresses)
        last = last[after - 1]
        # What a block before the first range gets here, and a difference that wraps around, is masked by the comparison
        # before it.
        inside = (after > 0) & (addresses <= last) & (nbytes > 0) & (nbytes - ONE <= last - addresses)
        return None if all_of(inside) else int(np.argmin(inside))


def _joined(addresses: list[int], lengths: list[int]) -> tuple[list[int], list[int]]:
    """First and last bytes of a few ranges, of which those that continue each other are joined.

    Raises:
        ValueError: They are not as `Ranges` says.
    """
    first, last = addresses.copy(), addresses.copy()
    count = end = 0
    for address, length in zip(addresses, lengths, strict=True):
        if length < 1 or address < end or address + length > SPACE:
            raise ValueError(UNFIT)
        if address != end or not count:
            first[count] = address
            count += 1
        end = address + length
        last[count - 1] = end - 1
    return first[:count], last[:count]


def _begun(first: U64, addresses: U64) -> npt.NDArray[np.int64]:
    """For each address, how many of the ascending ``first`` are not above it."""
    if len(first) * len(addresses) <= MOST_COMPARISONS:
        begun: npt.NDArray[np.int64] = np.add.reduce(first <= addresses[:, None], axis=1, dtype=np.int64)
        return begun
    return first.searchsorted(addresses, side="right")
