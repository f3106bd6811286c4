"""A batch in the form that libraries for one-sided transfers take: local blocks and remote blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from statelink.errors import TransferError

if TYPE_CHECKING:
    from statelink.plan import RegionTable

    from ._interface import Batch

__all__ = ["Ends"]

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


class Ends(NamedTuple):
    """The columns of a batch, one entry for each block.

    Attributes:
        here: Address of each block in this process; uint64.
        here_region: Its region in the local table; uint32.
        there: Address of each block at the peer; uint64.
        there_region: Its region in the peer's table; uint32.
        nbytes: Length of each block; uint64.
    """

    here: U64
    here_region: U32
    there: U64
    there_region: U32
    nbytes: U64

    @classmethod
    def of(cls, batch: Batch, local: RegionTable, remote: RegionTable) -> Ends:
        """Check that each block of a batch is inside its regions, and return the batch's ends. Copies nothing.

        A batch that the core has checked against tables of the same regions is not checked once more.

        Raises:
            TransferError: A block is outside its region, the batch is empty, or its columns differ in length.
        """
        blocks = batch.blocks
        counts = {len(getattr(blocks, name)) for name in blocks.__slots__}
        if len(counts) != 1 or counts == {0}:
            cause = f"columns of {sorted(counts)} blocks"
            raise TransferError("a batch is empty, or its columns differ in length", cause=cause)
        source, target = (blocks.source, blocks.source_region), (blocks.target, blocks.target_region)
        if batch.checked != (local.key, remote.key):
            local.check("here", source[0], blocks.nbytes, source[1])
            remote.check("by the peer", target[0], blocks.nbytes, target[1])
        return cls(*source, *target, blocks.nbytes)
