"""What one rank writes of one component for another, as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from statelink.state import Component

    from ._boxes import Runs
    from ._state_bytes import StateParts

__all__ = ["NO_LAYER", "ComponentPlan", "Group"]

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


class ComponentPlan(NamedTuple):
    """What one source rank writes of one component for one destination rank.

    Attributes:
        source: The source's component.
        target: The destination's component.
        granule: Number of positions that move together; 1 if items do not stand for positions.
        groups: All buffer pairs, by geometry and layer.
        layered: The same bytes, with buffers of one layer joined that lie in one item. Used for pushes of some layers.
        fused: The same, with buffers of all layers joined that lie in one item. Used for pushes of all layers.
        granule_nbytes: Bytes of one granule in all buffers together.
        layer_nbytes: The same for each model layer, with `NO_LAYER` for buffers without one.
        parts: Which part of the model's state each buffer is, for digests.
        item_blocks: Most blocks that one item of the source becomes.
        item_nbytes: Most bytes that move of one item of the source.
    """

    source: Component
    target: Component
    granule: int
    groups: tuple[Group, ...]
    layered: tuple[Group, ...]
    fused: tuple[Group, ...]
    granule_nbytes: int
    layer_nbytes: dict[int, int]
    parts: StateParts
    item_blocks: int
    item_nbytes: int

    @property
    def block_nbytes(self) -> float:
        """Mean bytes of the blocks of a granule. Items that are neighbours on both sides make blocks longer."""
        blocks = sum(len(group.source) * len(group.runs.nbytes) for group in self.fused)
        return self.granule_nbytes / blocks if blocks else 0.0

    def most(self, layers: tuple[int, int] | None) -> tuple[int, int]:
        """Most blocks and bytes that one item of the source becomes, in ``[first, last)`` model layers or in all."""
        if layers is None or not self.granule_nbytes:
            return self.item_blocks, self.item_nbytes
        granules = self.item_nbytes // self.granule_nbytes
        chosen = [np.count_nonzero((each.layers >= layers[0]) & (each.layers < layers[1])) for each in self.layered]
        blocks = sum(count * len(each.runs.nbytes) for count, each in zip(chosen, self.layered, strict=True))
        nbytes = sum(each for layer, each in self.layer_nbytes.items() if layers[0] <= layer < layers[1])
        return granules * blocks, granules * nbytes

    @property
    def layers(self) -> list[int]:
        """The model layers that are moved, in order; first `NO_LAYER` if there are buffers without a layer."""
        return sorted(self.layer_nbytes)
