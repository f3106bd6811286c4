"""Blocks: the only part of a plan that a backend sees."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Blocks", "Cutter"]

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]

LEAST_PIECE_BYTES = 1 << 20
"""Bytes up to which `Blocks.pieces` never cuts a block, even if a limit is lower."""


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
