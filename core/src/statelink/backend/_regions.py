"""Checks that blocks are inside registered memory. Most libraries do not check this, or check it too late."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from statelink.errors import TransferError

if TYPE_CHECKING:
    from statelink.state import Region

__all__ = ["RegionTable"]

U64 = npt.NDArray[np.uint64]

ONE = np.uint64(1)
MOST_BLOCKS_TOGETHER = 500
"""Most blocks that are looked at together. For more, numpy lets go of the interpreter, and an engine that computes
keeps it for milliseconds."""


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
