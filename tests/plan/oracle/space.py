"""One rank's memory: allocations at made-up addresses, half of them above 2^63, with guard bytes around everything.

Nothing here is real memory to the planner: blocks are carried out by looking their addresses up, so that one which
leaves its region is an assertion and not a crash.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from statelink.state import Memory, Region

if TYPE_CHECKING:
    from statelink.state import Inventory

__all__ = ["Array", "Bytes", "Holder", "Placed", "Space", "Wanted"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class Wanted(NamedTuple):
    """An array that some engine would allocate: items first."""

    items: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Placed(NamedTuple):
    """Where an array was put: bytes from the start of the space, and of which allocation it is."""

    allocation: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class _Allocation(NamedTuple):
    address: int
    start: int
    nbytes: int


class Space:
    """Reserve first, `seal`, then describe and look at what was reserved."""

    def __init__(self, rng: np.random.Generator, *, one_region: bool) -> None:
        self._rng = rng
        self._one = one_region
        self._top = 0
        self._starts: list[int] = []
        self._allocations: list[_Allocation] = []
        self.data: Bytes = np.empty(0, np.uint8)

    def place(self, wanted: Sequence[Wanted], style: str, *, padded: bool) -> list[Placed]:
        """Lay arrays out: ``separate``, ``stacked`` in one allocation, or in one ``envelope`` per item."""
        if style == "envelope" and len({each.items for each in wanted}) == 1:
            return self._envelope(wanted, padded)
        if style != "separate":
            self._begin()
        placed = []
        for each in wanted:
            if style == "separate":
                self._begin()
            self._gap()
            pad = int(self._rng.integers(1, 9)) if padded else 0
            placed.append(self._put(each, self._top, each.nbytes + pad))
            self._top += each.items * (each.nbytes + pad)
            self._gap()
        return placed

    def _envelope(self, wanted: Sequence[Wanted], padded: bool) -> list[Placed]:
        self._begin()
        self._gap()
        inside, at = {}, 0
        for number in self._rng.permutation(len(wanted)):
            at += int(self._rng.integers(0, 5)) if padded else 0
            inside[int(number)] = at
            at += wanted[number].nbytes
        at += int(self._rng.integers(0, 5)) if padded else 0
        placed = [self._put(each, self._top + inside[number], at) for number, each in enumerate(wanted)]
        self._top += at * wanted[0].items
        self._gap()
        return placed

    def _put(self, wanted: Wanted, offset: int, stride: int) -> Placed:
        item = np.dtype(wanted.dtype).itemsize
        inner = tuple(item * math.prod(wanted.shape[axis + 1 :]) for axis in range(len(wanted.shape)))
        shape, strides = (wanted.items, *wanted.shape), (stride, *inner)
        return Placed(len(self._starts) - 1, offset, shape, strides, wanted.dtype)

    def _begin(self) -> None:
        if not self._starts or not self._one:
            self._starts.append(self._top)

    def _gap(self) -> None:
        self._top += int(self._rng.integers(1, 40))

    def seal(self) -> None:
        """Give every allocation an address, and fill it with noise."""
        self.data = self._rng.integers(0, 256, self._top, np.uint8)
        high = self._rng.choice(1 << 12, len(self._starts), replace=False)
        ends = [*self._starts, self._top][1:]
        for number, start, end in zip(high, self._starts, ends, strict=True):
            address = (int(number) << 52) + int(self._rng.integers(1, 1 << 51))
            self._allocations.append(_Allocation(address, start, end - start))

    def memory(self, placed: Placed) -> Memory:
        """What an engine with raw pointers would say of the array."""
        allocation = self._allocations[placed.allocation]
        return Memory.pointer(
            allocation.address + placed.offset - allocation.start,
            placed.shape,
            placed.dtype,
            np.dtype(placed.dtype).itemsize,
            strides=placed.strides,
            region=Region(allocation.address, allocation.nbytes),
        )

    def view(self, placed: Placed, data: Bytes | None = None) -> Array:
        """The array itself, in this space's bytes or in a copy of them."""
        raw = self.data if data is None else data
        made: Array = np.ndarray(placed.shape, placed.dtype, raw, placed.offset, placed.strides)
        return made

    def start(self, region: Region) -> int:
        """Where a region's first byte stands in the data."""
        for allocation in self._allocations:
            if allocation.address == region.address and allocation.nbytes == region.nbytes:
                return allocation.start
        raise AssertionError(f"no allocation is {region}")


class Holder(Protocol):
    """A rank: its memory, what it says of it, and what another process gets of that."""

    space: Space
    inventory: Inventory
    seen: Inventory
