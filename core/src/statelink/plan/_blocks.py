"""Blocks: the only part of a plan that a backend sees. The memory for their arrays, and the check of their regions.

Most libraries do not check that blocks are inside registered memory, or check it too late.

The memory for arrays is used again for other blocks once nobody refers to it. The kernel clears each fresh page before
it is written to. For a room of 65,536 blocks, this takes five times as long as all other planning (1.04 ms instead of
0.19 ms). For rooms of up to about 8,000 blocks it makes no difference. These are medians of ``benchmarks.plan``'s cases
of random pages and of TP 8 to 4, with and without this memory.
"""

from __future__ import annotations

import hashlib
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from statelink.errors import TransferError

if TYPE_CHECKING:
    from statelink.state import Region

__all__ = ["PIECE_ELEMENTS", "Blocks", "Cutter", "RegionTable", "table"]

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]

ONE = np.uint64(1)
MOST_BLOCKS_TOGETHER = 500
"""Most blocks that are looked at together. For more, numpy lets go of the interpreter, and an engine that computes
keeps it for milliseconds."""
LEAST_PIECE_BYTES = 1 << 20
"""Bytes up to which `Blocks.pieces` never cuts a block, even if a limit is lower."""
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


@dataclass(frozen=True, slots=True)
class Blocks:
    """Byte ranges to move, as five parallel arrays of one length.

    Source and destination are the two ends of the *data flow*: in a WRITE the source is local, in a READ remote.
    The arrays are contiguous and belong to whoever receives the object. A backend that passes their addresses to a
    library must keep the arrays until the library is done, because their memory is used again for other blocks. No two
    blocks overlap at the destination.

    Attributes:
        source: First byte of each block at its source; uint64.
        target: First byte of each block at its destination; uint64.
        nbytes: Length of each block, at least 1; uint64.
        source_region: Index of the source's region in its owner's region table; uint32.
        target_region: Index of the destination's region in its owner's region table; uint32.
    """

    source: U64
    target: U64
    nbytes: U64
    source_region: U32
    target_region: U32

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.nbytes)

    @property
    def total(self) -> int:
        """Number of bytes of all blocks together."""
        return int(np.add.reduce(self.nbytes))  # without the functions of Python behind ``sum``

    @classmethod
    def concatenate(cls, parts: Sequence[Blocks]) -> Blocks:
        """All blocks of ``parts``, in order; an empty object if there are none."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            wide, narrow = np.empty(0, np.uint64), np.empty(0, np.uint32)
            return cls(wide, wide, wide, narrow, narrow)
        return cls(
            np.concatenate([part.source for part in parts]),
            np.concatenate([part.target for part in parts]),
            np.concatenate([part.nbytes for part in parts]),
            np.concatenate([part.source_region for part in parts]),
            np.concatenate([part.target_region for part in parts]),
        )

    def __getitem__(self, part: slice) -> Blocks:
        """Views of a range of the blocks."""
        return Blocks(
            self.source[part],
            self.target[part],
            self.nbytes[part],
            self.source_region[part],
            self.target_region[part],
        )

    def slices(self, max_blocks: int, max_bytes: int) -> Iterator[Blocks]:
        """Cut into views of at most ``max_blocks`` blocks and ``max_bytes`` bytes.

        Blocks are not split. A block that is larger than ``max_bytes`` becomes a slice of its own.
        """
        cutter = Cutter(self, max_blocks)
        while (piece := cutter.take(max_bytes)).count:
            yield piece

    def pieces(self, max_blocks: int, max_bytes: int) -> Iterator[Blocks]:
        """Cut into batches for a backend that takes at most ``max_blocks`` blocks and ``max_bytes`` bytes at once.

        Unlike `slices`, it also cuts blocks: into parts of at most ``max_bytes``, but never below 1 MiB. So a block of
        up to 1 MiB may be more than ``max_bytes``. It is then a batch of its own.
        """
        return self.narrow(max_bytes).slices(max_blocks, max_bytes)

    def narrow(self, most: int) -> Blocks:
        """The same bytes in blocks of at most ``most`` bytes, or 1 MiB if that is more.

        Pages that lie side by side make one block, however many they are. A library may refuse a block that large, and
        an abort would have to wait for all of it.
        """
        most = max(most, LEAST_PIECE_BYTES)
        if int(self.nbytes.max(initial=0)) <= most:
            return self
        wide = np.uint64(most)
        counts = (self.nbytes - np.uint64(1)) // wide + np.uint64(1)
        which = np.repeat(np.arange(self.count), counts.astype(np.int64))
        offsets = (np.arange(len(which), dtype=np.uint64) - (np.cumsum(counts) - counts)[which]) * wide
        return Blocks(
            self.source[which] + offsets,
            self.target[which] + offsets,
            np.minimum(self.nbytes[which] - offsets, wide),
            self.source_region[which],
            self.target_region[which],
        )


class Cutter:
    """Cuts blocks into views, each as large as the caller says when it takes it. Not thread-safe.

    Args:
        blocks: What is cut; no block of it is split.
        max_blocks: Most blocks of a view.
    """

    def __init__(self, blocks: Blocks, max_blocks: int) -> None:
        self._blocks = blocks
        self._max_blocks = max_blocks
        self._first = 0
        self._ends: npt.NDArray[np.uint64] | None = None
        """Bytes up to the end of each block; counted once the first view is not all of them."""

    def take(self, max_bytes: int) -> Blocks:
        """The next view of at most ``max_bytes`` bytes, or of one block that is larger; an empty one at the end."""
        blocks, first = self._blocks, self._first
        count = blocks.count
        if first >= count:
            return blocks[count:]
        if self._ends is None:
            if count <= self._max_blocks and blocks.total <= max_bytes:
                self._first = count
                return blocks
            self._ends = np.cumsum(blocks.nbytes)
        before = int(self._ends[first - 1]) if first else 0
        stop = bisect_right(self._ends, before + max_bytes)  # unlike numpy's search, it keeps the interpreter
        self._first = min(max(stop, first + 1), first + self._max_blocks, count)
        return blocks[first : self._first]


class RegionTable:
    """A rank's region table as columns. Immutable, thread-safe, never blocks.

    Args:
        regions: The region table that `Blocks` refer to.
        backend: Name of the backend, for messages.

    Attributes:
        starts: First byte of each region; uint64.
        sizes: Its length in bytes; uint64.
        key: The same for every table of the same regions: blocks that fit one fit all of them.
    """

    __slots__ = ("_backend", "key", "sizes", "starts")

    def __init__(self, regions: Sequence[Region], backend: str) -> None:
        self._backend = backend
        self.starts: U64 = np.array([region.address for region in regions], np.uint64)
        self.sizes: U64 = np.array([region.nbytes for region in regions], np.uint64)
        self.key = hashlib.blake2b(self.starts.tobytes() + self.sizes.tobytes(), digest_size=16).digest()

    def check(self, whose: str, addresses: U64, nbytes: U64, regions: npt.NDArray[np.uint32]) -> None:
        """Refuse blocks that are not inside the region that they name, empty ones among them.

        Args:
            whose: Whose memory it is, for the message: ``here`` or ``by the peer``.
            addresses: First byte of each block; uint64.
            nbytes: Its length; uint64.
            regions: Its region's place in the table; uint32.

        Raises:
            TransferError: A block is not inside its region, or is empty.
        """
        count = len(regions)
        if count <= MOST_BLOCKS_TOGETHER:
            self._check(whose, addresses, nbytes, regions)
            return
        for first in range(0, count, MOST_BLOCKS_TOGETHER):
            part = slice(first, first + MOST_BLOCKS_TOGETHER)
            self._check(whose, addresses[part], nbytes[part], regions[part])

    def _check(self, whose: str, addresses: U64, nbytes: U64, regions: npt.NDArray[np.uint32]) -> None:
        # With an index of its own type, numpy keeps the interpreter; with any other, it lets go of it.
        places = regions.astype(np.intp)
        try:
            sizes, starts = self.sizes[places], self.starts[places]
        except IndexError:
            cause = f"region {int(regions.max())} of {len(self.sizes)}"
        else:
            # A length of 0, or an address below its region, gives a number that wraps around and is huge.
            inside = (nbytes - ONE < sizes) & (addresses - starts <= sizes - nbytes)
            if np.logical_and.reduce(inside):
                return
            worst = int(inside.argmin())
            cause = (
                f"{nbytes[worst]} bytes at {addresses[worst]:#x} in region {regions[worst]}, which has "
                f"{sizes[worst]} at {starts[worst]:#x}"
            )
        raise TransferError(f"a block is outside the memory registered {whose}", cause=cause, backend=self._backend)
