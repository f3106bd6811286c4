"""The bytes that moved, in an order that does not depend on where items lie or on how they were pushed.

Both sides get the same bytes in the same order, so that they can compare digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from statelink.state import Buffer, Component

    from ._boxes import Box
    from ._component_plan import Group
    from ._positions import Pairs

__all__ = ["StateBytes", "StateParts", "state_bytes"]

MAX_SCRATCH = 1 << 20
"""Bytes of one buffer that are handled together, so that they stay in the cache. One granule may have more."""

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


class StateBytes(NamedTuple):
    """Some granules of some buffers of one geometry, as they lie on one side.

    The bytes of one granule of one buffer are its pieces in order. Seeds and granules say which part of the model's
    state they are. Each side computes them from its own description. Addresses and offsets say where the bytes are on
    this side.

    Attributes:
        seeds: For each buffer, a number for the part of the model's state that it moves; see `StateParts`. Below 2^63;
            uint64.
        addresses: For each buffer, the address of item 0; uint64.
        granules: For each granule, its number in the sequence; int64.
        offsets: ``[granules, pieces]`` bytes from item 0; int64.
        piece: Bytes of each piece.
    """

    seeds: U64
    addresses: U64
    granules: I64
    offsets: I64
    piece: int


class StateParts:
    """Which part of the model's state each buffer of a plan moves, as either side describes it. Thread-safe.

    Args:
        source: The source's component.
        target: The destination's component.
        buffers: For each buffer, in the order of the assignment: its description on both sides, and the boxes that
            move.
    """

    __slots__ = ("_buffers", "_seeds", "_source", "_target")

    def __init__(
        self, source: Component, target: Component, buffers: Sequence[tuple[Buffer, Buffer, tuple[Box, ...]]]
    ) -> None:
        self._source = source
        self._target = target
        self._buffers = buffers
        self._seeds: dict[str, U64] = {}

    def seeds(self, side: Literal["source", "target"]) -> U64:
        """For each buffer, a hash of its names, layer, element type and boxes, as one side describes them."""
        known = self._seeds.get(side)
        if known is None:
            component = self._source if side == "source" else self._target
            found = []
            for source, target, boxes in self._buffers:
                buffer = source if side == "source" else target
                layout = buffer.layout
                said = (component.name, component.kind.name, component.format, buffer.name, buffer.layer, buffer.scale)
                raw = msgspec.msgpack.encode((said, layout.dtype, layout.axes, layout.blocks, boxes))
                found.append(int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 1)
            known = self._seeds[side] = np.array(found, np.uint64)
        return known


def state_bytes(
    groups: tuple[Group, ...], parts: StateParts, pairs: Pairs, side: Literal["source", "target"]
) -> Iterator[StateBytes]:
    """Yield every byte that ``pairs`` move once, in batches of bounded size.

    Args:
        groups: Buffers as they are in the assignment, not joined.
        parts: The parts of the model's state that these buffers move.
        pairs: Granules of both sides. Only the items of ``side`` are used.
        side: The side whose memory is meant.
    """
    granules = np.arange(*pairs.granules) if pairs.numbers is None else pairs.numbers
    seeds = parts.seeds(side)
    items, within_item = (pairs.source, pairs.source_part) if side == "source" else (pairs.target, pairs.target_part)
    for group in groups:
        if not len(group.numbers):
            continue
        runs = group.runs
        here, steps = (runs.source, runs.source_step) if side == "source" else (runs.target, runs.target_step)
        stride = group.source_stride if side == "source" else group.target_stride
        # Runs of several lengths are cut into pieces of equal length, so that one call gathers them.
        piece = int(np.gcd.reduce(runs.nbytes))
        each = runs.nbytes // piece
        within = np.arange(int(each.sum())) - np.repeat(np.cumsum(each) - each, each)
        starts, steps = np.repeat(here, each) + within * piece, np.repeat(steps, each)
        width = max(1, MAX_SCRATCH // runs.total)
        for first in range(0, len(items), width):
            chosen = slice(first, first + width)
            offsets = (items[chosen] * stride)[:, None] + starts
            if within_item is not None:
                offsets += within_item[chosen, None] * steps
            addresses = group.source if side == "source" else group.target
            yield StateBytes(seeds[group.numbers], addresses, granules[chosen], offsets, piece)
