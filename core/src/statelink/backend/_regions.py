"""Where registered memory begins and ends: a check that most libraries do not make, or not in time."""

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
        highest = int(regions.max(initial=0))
        if len(regions) and highest >= len(self.sizes):
            cause = f"region {highest} of {len(self.sizes)}"
        else:
            sizes = self.sizes[regions]
            # Below its region, an address gives an offset that wraps to a huge one.
            inside = (nbytes > 0) & (nbytes <= sizes) & (addresses - self.starts[regions] <= sizes - nbytes)
            if inside.all():
                return
            worst = int(inside.argmin())
            cause = (
                f"{nbytes[worst]} bytes at {addresses[worst]:#x} in region {regions[worst]}, which has "
                f"{sizes[worst]} at {self.starts[regions[worst]]:#x}"
            )
        raise TransferError(f"a block is outside the memory registered {whose}", cause=cause, backend=self._backend)
