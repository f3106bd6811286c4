"""Joins buffers that lie in one item on both sides, so that what is adjacent there moves as one block.

A page may hold the keys and values of a layer in turns, or all layers one after the other. Its buffers are described
one by one, as if they were arrays of their own. If both sides have them in one item, one index brings all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ._boxes import Box, Runs

if TYPE_CHECKING:
    from statelink.state import Buffer

__all__ = ["BufferPair", "join"]


class BufferPair(NamedTuple):
    """A buffer on both sides, and what moves of one granule of it.

    Attributes:
        source: The source's buffer.
        target: The destination's buffer.
        runs: The runs of a granule. Pairs of one geometry share one object.
        boxes: What the source writes.
    """

    source: Buffer
    target: Buffer
    runs: Runs
    boxes: tuple[Box, ...]


def join(pairs: Sequence[BufferPair], most: int, *, by_layer: bool = False) -> list[BufferPair]:
    """Join the buffers that lie in one item of one region on both sides.

    A joined pair has the runs of all its members, and no boxes. It has a layer if all members have the same one. Where
    nothing can be joined, the pairs stay as they were.

    Args:
        pairs: All buffers of a component.
        most: Most runs in all tables that are made. Buffers that would need more are not joined.
        by_layer: Whether only buffers of one layer are joined.
    """
    places: dict[tuple[int | None, ...], list[BufferPair]] = {}
    for pair in pairs:
        layer = (pair.target.layer,) if by_layer else ()
        key = (pair.source.region, pair.source.stride, pair.target.region, pair.target.stride, *layer)
        places.setdefault(key, []).append(pair)
    shared: dict[tuple[tuple[int, int, int], ...], Runs] = {}
    joined = []
    for members in (nest for alike in places.values() for nest in (_nests(alike) if len(alike) > 1 else [alike])):
        if len(members) == 1:
            joined += members
            continue
        (source, target), shifts = _corners(members)
        # Most layers are alike, so that they share the table that was made for the first of them.
        key = tuple((id(pair.runs), *shift) for pair, shift in zip(members, shifts, strict=True))
        if key not in shared:
            count = sum(len(pair.runs.nbytes) for pair in members)
            if count > most:
                joined += members
                continue
            most -= count
            shared[key] = Runs.union([pair.runs.shifted(*shift) for pair, shift in zip(members, shifts, strict=True)])
        joined.append(BufferPair(source, target, shared[key], ()))
    return joined


def _nests(pairs: list[BufferPair]) -> Iterator[list[BufferPair]]:
    """Split buffers of one region and stride on each side into those that lie in one item on both sides."""
    nest: list[BufferPair] = []
    source = target = (0, 0)
    for pair in sorted(pairs, key=lambda pair: (pair.source.offset, pair.target.offset)):
        wider = _around(source, pair.source, not nest), _around(target, pair.target, not nest)
        if nest and (_length(wider[0]) > pair.source.stride or _length(wider[1]) > pair.target.stride):
            yield nest
            nest = []
            wider = _around(source, pair.source, True), _around(target, pair.target, True)
        source, target = wider
        nest.append(pair)
    yield nest


def _around(range_: tuple[int, int], buffer: Buffer, first: bool) -> tuple[int, int]:
    """The range of bytes around a range and the first item of a buffer."""
    low, high = buffer.offset, buffer.offset + buffer.layout.nbytes
    return (low, high) if first else (min(low, range_[0]), max(high, range_[1]))


def _length(range_: tuple[int, int]) -> int:
    return range_[1] - range_[0]


def _corners(members: list[BufferPair]) -> tuple[tuple[Buffer, Buffer], list[tuple[int, int]]]:
    """The first buffer of each side, with the layer that all have in common, and how far the others are behind it."""
    layers = {pair.target.layer for pair in members}
    layer = layers.pop() if len(layers) == 1 else None
    source, target = (
        msgspec.structs.replace(min(buffers, key=lambda buffer: buffer.offset), layer=layer)
        for buffers in ([pair.source for pair in members], [pair.target for pair in members])
    )
    shifts = [(pair.source.offset - source.offset, pair.target.offset - target.offset) for pair in members]
    return (source, target), shifts
