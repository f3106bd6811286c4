"""Checks that blocks are inside registered memory. Most libraries do not check this, or check it too late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from statelink.errors import TransferError

if TYPE_CHECKING:
    from statelink.state import Region

__all__ = ["RegionTable"]

U64 = npt.NDArray[np.uint64]

MANY = 2048
"""Least number of blocks for which it pays to look for runs of blocks in one region."""
MANY_A_RUN = 8
"""Least average number of blocks in such a run for which it pays."""
NO_WRAP = 1 << 62
"""Addresses and lengths up to this can be added without wrapping around."""


class RegionTable:
    """A rank's region table as columns. Immutable, thread-safe, never blocks.

    Args:
        regions: The region table that `Blocks` refer to.
        backend: Name of the backend, for messages.

    Attributes:
        starts: First byte of each region; uint64.
        sizes: Its length in bytes; uint64.
    """

    __slots__ = ("_backend", "sizes", "starts")

    def __init__(self, regions: Sequence[Region], backend: str) -> None:
        self._backend = backend
        self.starts: U64 = np.array([region.address for region in regions], np.uint64)
        self.sizes: U64 = np.array([region.nbytes for region in regions], np.uint64)

    def check(self, whose: str, addresses: U64, nbytes: U64, regions: npt.NDArray[np.uint32]) -> None:
        """Refuse blocks that are not inside the region that they name, empty ones among them.

        Args:
            whose: Whose memory it is, for the message: ``here`` or ``by the peer``.
            addresses: First byte of each block; uint64.
            nbytes: Its length; uint64.
            regions: Its region's place in the table; uint32.

        Raises:
            TransferError: One is not.
        """
        if len(regions) >= MANY and self._hold(addresses, nbytes, regions):
            return
        highest = int(regions.max(initial=0))
        if len(regions) and highest >= len(self.sizes):
            cause = f"region {highest} of {len(self.sizes)}"
        else:
            # With an index of its own type, numpy keeps the interpreter; with any other, it lets go of it.
            places = regions.astype(np.intp)
            sizes = self.sizes[places]
            # An address below its region gives an offset that wraps around and is huge.
            inside = (nbytes > 0) & (nbytes <= sizes) & (addresses - self.starts[places] <= sizes - nbytes)
            if inside.all():
                return
            worst = int(inside.argmin())
            cause = (
                f"{nbytes[worst]} bytes at {addresses[worst]:#x} in region {regions[worst]}, which has "
                f"{sizes[worst]} at {self.starts[regions[worst]]:#x}"
            )
        raise TransferError(f"a block is outside the memory registered {whose}", cause=cause, backend=self._backend)

    def _hold(self, addresses: U64, nbytes: U64, regions: npt.NDArray[np.uint32]) -> bool:
        """Whether all blocks are inside, judged by the first and last byte of each run of blocks in one region.

        A plan's blocks come buffer by buffer. For these, this takes a sixth of the time of a look-up for each block.
        A ``False`` is not certain.
        """
        changes = np.flatnonzero(regions[1:] != regions[:-1])
        if len(changes) > len(regions) // MANY_A_RUN:
            return False
        begins = np.concatenate((np.zeros(1, np.intp), changes + 1))
        named = regions[begins]
        if int(named.max()) >= len(self.sizes):
            return False
        starts = self.starts[named]
        ends = starts + self.sizes[named]
        if not nbytes.min() or max(nbytes.max(), addresses.max(), ends.max()) > NO_WRAP:
            return False
        lowest, highest = np.minimum.reduceat(addresses, begins), np.maximum.reduceat(addresses + nbytes, begins)
        return bool(((lowest >= starts) & (highest <= ends)).all())
