"""Buffers of one geometry, which move by one table of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ._boxes import Runs

__all__ = ["NO_LAYER", "Group"]

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]

NO_LAYER = -1
"""The layer of a buffer that has none."""


class Group(NamedTuple):
    """Buffer pairs that share one run table and one pair of item strides.

    Attributes:
        runs: The shared run table.
        source_stride: Bytes between items at the source.
        target_stride: Bytes between items at the destination.
        source: For each buffer, the address of item 0 at the source; uint64.
        target: The same at the destination.
        source_region: For each buffer, its region at the source; uint32.
        target_region: The same at the destination.
        layers: For each buffer, its model layer, or `NO_LAYER`; int64.
        numbers: For each buffer, its number among all buffers of the component; int64.
    """

    runs: Runs
    source_stride: int
    target_stride: int
    source: U64
    target: U64
    source_region: U32
    target_region: U32
    layers: I64
    numbers: I64
