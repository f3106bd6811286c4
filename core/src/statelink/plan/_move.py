"""A part of one component that one push moves from one rank to another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from statelink.errors import RoomError

from ._blocks import PIECE_ELEMENTS, Blocks, table
from ._items import Items
from ._pack import Places, Tile, mark, parcels, places
from ._positions import Due, Pairs, pair
from ._state_bytes import StateBytes, state_bytes

if TYPE_CHECKING:
    from ._component_plan import ComponentPlan, Group

__all__ = ["MAX_BATCH", "Move", "arrived_bytes", "expected_move", "plan_move"]

MAX_BATCH = PIECE_ELEMENTS // 4
"""Most blocks in one batch of `Move.blocks`. It bounds memory, not the size of a move. It also keeps each operation of
numpy short: while a long one runs, the engine's thread takes the interpreter, and gives it back 5 ms later."""
MAX_OFFSETS = 1 << 18
"""Most offsets that are computed at once. Neighbouring blocks are merged among these."""

SMALLEST_BUFFER = 16
"""The smallest buffer, in elements, that numpy takes."""
LONG_ROW = 128
"""Least number of offsets for which adding row by row is faster than through numpy's buffer."""

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


class Move:
    """What one push moves of one component to one peer. Immutable.

    Attributes:
        component: Name of the component.
        layers: ``[first, last)`` model layers, or ``None`` for all buffers.
        nbytes: Payload bytes.
    """

    __slots__ = ("_pairs", "_plan", "component", "layers", "nbytes")

    def __init__(self, plan: ComponentPlan, pairs: Pairs, layers: tuple[int, int] | None) -> None:
        self._plan = plan
        self._pairs = pairs
        self.component = plan.target.name
        self.layers = layers
        if layers is None:
            per_granule = plan.granule_nbytes
        else:
            per_granule = sum(n for layer, n in plan.layer_nbytes.items() if layers[0] <= layer < layers[1])
        self.nbytes = per_granule * len(pairs)

    @property
    def granules(self) -> tuple[int, int]:
        """``[first, last)`` granules of the sequence. Everything that moves is between them."""
        return self._pairs.granules

    @property
    def due(self) -> slice | I64:
        """The places of the granules that move, among all granules that are due for the request."""
        return self._pairs.due

    def blocks(self, max_blocks: int = MAX_BATCH) -> Iterator[Blocks]:
        """Yield the blocks of this move, in batches of at most ``max_blocks``.

        Ranges that are contiguous on both sides are one block. No batch is empty.
        """
        if not self.nbytes:
            return
        groups = self._plan.fused if self.layers is None else self._plan.layered
        for group in groups:
            yield from self._group_blocks(_of_layers(group, self.layers), max_blocks)

    def state_bytes(self) -> Iterator[StateBytes]:
        """Yield the bytes of this move at the source; for digests."""
        return state_bytes(self._chosen() if self.nbytes else (), self._plan.parts, self._pairs, "source")

    @property
    def block_nbytes(self) -> float:
        """Mean bytes of its blocks, if no neighbouring items are merged."""
        return self._plan.block_nbytes

    def only(self, layers: tuple[int, int] | None) -> Move:
        """A move of the same granules in other buffers: those of ``layers``, or all buffers if it is ``None``."""
        return self if layers == self.layers else Move(self._plan, self._pairs, layers)

    def parcels(self, limit: int) -> Iterator[tuple[Tile, ...]]:
        """Yield the whole move, cut into parcels of at most ``limit`` bytes.

        Raises:
            RoomError: A piece that cannot be divided is larger than that (``room.staging``).
        """
        return parcels(self._chosen(), self._pairs, limit) if self.nbytes else iter(())

    def places(self, tile: Tile, side: Literal["source", "target"]) -> Places:
        """Where the bytes of a tile are on one side, in the order in which they are packed.

        Raises:
            RoomError: The tile, which a peer may have sent, names something that does not move.
        """
        return places(self._group(tile), self._pairs, tile, side)

    def tile_nbytes(self, tile: Tile) -> int:
        """Number of bytes of a tile, computed only from its numbers. The tile may name more than there is.

        Raises:
            RoomError: The tile, which a peer may have sent, names a geometry that does not exist.
        """
        buffers, granules = (last - first for first, last in (tile.buffers, tile.granules))
        return max(0, buffers) * max(0, granules) * self._group(tile).runs.total

    def marks(self) -> npt.NDArray[np.bool_]:
        """An array for `mark`: a row for each buffer of the component, a column for each granule that moves."""
        buffers = max(int(group.numbers.max()) + 1 for group in self._plan.groups)
        return np.zeros((buffers, len(self._pairs)), np.bool_)

    def mark(self, tile: Tile, marks: npt.NDArray[np.bool_]) -> None:
        """Record in ``marks`` that a tile has come. `marks` of a move with the same granules made them.

        Raises:
            RoomError: The tile, which a peer may have sent, names something that does not move or has come before.
        """
        mark(self._group(tile), self._pairs, tile, marks)

    def _group(self, tile: Tile) -> Group:
        groups = self._chosen()
        if not 0 <= tile.group < len(groups):
            raise RoomError("a tile names what is not due", cause=str(tile), code="room.staging")
        return groups[tile.group]

    def _chosen(self) -> tuple[Group, ...]:
        return tuple(_of_layers(group, self.layers) for group in self._plan.groups)

    def _group_blocks(self, group: Group, max_blocks: int) -> Iterator[Blocks]:
        buffers = len(group.source)
        if not buffers:
            return
        total, runs = len(self._pairs), len(group.runs.nbytes)
        if total == runs == 1 and buffers <= max_blocks:
            yield _single(group, self._pairs)
            return
        granules = max(1, MAX_OFFSETS // runs)
        for begin in range(0, total, granules):
            offsets = _offsets(group, self._pairs, slice(begin, begin + granules))
            count = len(offsets[0])
            if buffers * count <= max_blocks:
                yield _spread(group, offsets)
                continue
            width = max(1, max_blocks // count)
            for low in range(0, buffers, width):
                chosen = _of_buffers(group, slice(low, low + width))
                for first in range(0, count, max_blocks):
                    source, target, nbytes = (column[first : first + max_blocks] for column in offsets)
                    yield _spread(chosen, (source, target, nbytes))


def plan_move(
    plan: ComponentPlan, source: Items, target: Items, owed: Due, layers: tuple[int, int] | None = None
) -> Move:
    """Pair two lists of items, and return what moves between them.

    Args:
        plan: Compiled for this pair of ranks.
        source: The source's items.
        target: The destination's items.
        owed: What is `due` for the request.
        layers: ``[first, last)`` model layers; all buffers when not given.
    """
    return Move(plan, pair(plan.source, plan.target, plan.granule, source, target, owed), layers)


def arrived_bytes(plan: ComponentPlan, target: Items, owed: Due) -> Iterator[StateBytes]:
    """Yield the bytes at the destination that all moves of a request together have brought.

    Args:
        plan: Compiled for this pair of ranks.
        target: The destination's items.
        owed: What is `due` for the request.
    """
    return state_bytes(plan.groups, plan.parts, _all_pairs(plan, target, owed), "target")


def expected_move(plan: ComponentPlan, target: Items, owed: Due) -> Move:
    """All moves of a request as one move, as the destination knows it. Only its target side is meaningful.

    Args:
        plan: Compiled for this pair of ranks.
        target: The destination's items.
        owed: What is `due` for the request.
    """
    return Move(plan, _all_pairs(plan, target, owed), None)


def _all_pairs(plan: ComponentPlan, target: Items, owed: Due) -> Pairs:
    # The destination does not know the source's items. It pairs with made-up ones, so that every granule has a pair.
    page = plan.source.page
    anywhere = Items(np.zeros(owed.last * plan.granule // page + 1 if page else 1, np.int64), 0)
    return pair(plan.source, plan.target, plan.granule, anywhere, target, owed)


def _of_layers(group: Group, layers: tuple[int, int] | None) -> Group:
    if layers is None:
        return group
    chosen = (group.layers >= layers[0]) & (group.layers < layers[1])
    if chosen.all():
        return group
    return _of_buffers(group, chosen)


def _of_buffers(group: Group, chosen: slice | npt.NDArray[np.bool_]) -> Group:
    return group._replace(
        source=group.source[chosen],
        target=group.target[chosen],
        source_region=group.source_region[chosen],
        target_region=group.target_region[chosen],
        layers=group.layers[chosen],
        numbers=group.numbers[chosen],
    )


def _offsets(group: Group, pairs: Pairs, part: slice) -> tuple[U64, U64, U64]:
    """Merged blocks as byte offsets from item 0. The buffers of a group differ only in where item 0 is."""
    runs = group.runs
    if len(runs.nbytes) == 1 and pairs.source_part is None and pairs.target_part is None:
        return _offsets_of_items(group, pairs.source[part], pairs.target[part])
    source = _side(pairs.source[part], pairs.source_part, part, group.source_stride, runs.source, runs.source_step)
    target = _side(pairs.target[part], pairs.target_part, part, group.target_stride, runs.target, runs.target_step)
    nbytes = runs.nbytes
    if len(source) > len(nbytes):
        table = np.empty((len(source) // len(nbytes), len(nbytes)), np.int64)
        table[:] = nbytes
        nbytes = table.reshape(-1)
        # Compare byte offsets, never ids, because strides differ between the sides.
        ends = nbytes[:-1]
        apart = (source[1:] - source[:-1] != ends) | (target[1:] - target[:-1] != ends)
        first = _begins(apart)
        if first is not None:
            source, target, nbytes = source[first], target[first], np.add.reduceat(nbytes, first)
    # uint64 from here on, because int64 + uint64 would become float64. None of these numbers is negative.
    return source.view(np.uint64), target.view(np.uint64), nbytes.view(np.uint64)


def _offsets_of_items(group: Group, source: I64, target: I64) -> tuple[U64, U64, U64]:
    """The same as `_offsets`, if one run is all that moves of an item. Finds neighbours by their item numbers."""
    runs = group.runs
    count, nbytes = len(source), int(runs.nbytes[0])
    first = None
    one, other = group.source_stride, group.target_stride
    # Two runs can only touch if their length is a multiple of both strides. A single item may have a stride of 0.
    if count > 1 and one and other and not nbytes % one and not nbytes % other:
        there, here = nbytes // one, nbytes // other
        first = _begins((source[1:] - source[:-1] != there) | (target[1:] - target[:-1] != here))
    if first is None:
        lengths = np.empty(count, np.uint64)
        lengths.fill(nbytes)
    else:
        source, target = source[first], target[first]
        ends = np.empty(len(first), np.int64)
        ends[:-1], ends[-1] = first[1:], count
        lengths = ((ends - first) * nbytes).view(np.uint64)
    source, target = source * one + runs.source, target * other + runs.target
    return source.view(np.uint64), target.view(np.uint64), lengths


def _begins(apart: npt.NDArray[np.bool_]) -> I64 | None:
    """Indices of the blocks that are not contiguous with the one before; ``None`` for all blocks."""
    if np.logical_and.reduce(apart):
        return None
    (before,) = apart.nonzero()
    first = np.empty(len(before) + 1, np.int64)
    first[0] = 0
    np.add(before, 1, out=first[1:])
    return first


def _side(items: I64, parts: I64 | None, part: slice, stride: int, runs: I64, steps: I64) -> I64:
    offsets = (items * stride)[:, None] + runs
    if parts is not None:
        offsets += parts[part, None] * steps
    return offsets.ravel()


def _single(group: Group, pairs: Pairs) -> Blocks:
    """One offset in every buffer, computed without arrays, because these take too long for requests of one item."""
    runs = group.runs
    source = int(pairs.source[0]) * group.source_stride + int(runs.source[0])
    target = int(pairs.target[0]) * group.target_stride + int(runs.target[0])
    if pairs.source_part is not None:
        source += int(pairs.source_part[0]) * int(runs.source_step[0])
    if pairs.target_part is not None:
        target += int(pairs.target_part[0]) * int(runs.target_step[0])
    lengths = np.empty(len(group.source), np.uint64)
    lengths.fill(runs.nbytes[0])
    return Blocks(
        group.source + np.uint64(source),
        group.target + np.uint64(target),
        lengths,
        group.source_region.copy(),
        group.target_region.copy(),
    )


def _spread(group: Group, offsets: tuple[U64, U64, U64]) -> Blocks:
    """Add the same offsets to every buffer of a group."""
    source, target, nbytes = offsets
    buffers, count = len(group.source), len(nbytes)
    if count == 1:  # one block for each buffer, as when long runs of items were merged
        return Blocks(
            group.source + source,
            group.target + target,
            nbytes.repeat(buffers),
            group.source_region.copy(),
            group.target_region.copy(),
        )
    wide = table(4 * buffers * count).reshape(4, buffers, count)
    narrow = wide[3].view(np.uint32).reshape(2, buffers, count)
    # numpy copies rows that are shorter than its buffer. For all but the shortest rows, the copy takes longer than
    # adding.
    nbuffer = np.setbufsize(SMALLEST_BUFFER) if count >= LONG_ROW else None
    try:
        np.add(group.source[:, None], source, out=wide[0])
        np.add(group.target[:, None], target, out=wide[1])
    finally:
        if nbuffer is not None:
            np.setbufsize(nbuffer)
    wide[2] = nbytes
    narrow[0] = group.source_region[:, None]
    narrow[1] = group.target_region[:, None]
    source, target, nbytes = wide[:3].reshape(3, -1)
    return Blocks(source, target, nbytes, *narrow.reshape(2, -1))
