"""Lists the blocks of a small request that one push brings, in one expression.

Requests differ in their indices. How the items of both sides meet is their *shape*, and most small requests between two
ranks have one of a few shapes. All that follows from a shape is worked out once: which item each block belongs to on
either side, where it is in item 0, its length and its regions. A request then adds its indices.

The blocks are those of `Move.blocks` of each component, in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ._blocks import Blocks
from ._positions import due, overlap

if TYPE_CHECKING:
    from ._component_plan import ComponentPlan, Group
    from ._items import Items

__all__ = ["Shapes", "Whole"]

MOST_SHAPE_BLOCKS = 250
"""Most blocks of a shape. With twice as many numbers, numpy still keeps the interpreter."""
OFTEN = 3
"""How often a shape comes before it is worked out, which takes as long as pairing the components of four requests."""
KNOWN = 32
"""Most shapes that a pair of ranks remembers. A block takes 73 bytes."""

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]


class Whole(NamedTuple):
    """What one push moves, if it brings the whole request.

    Attributes:
        blocks: All blocks, component by component.
        granules: Component to ``[first, last)`` granules of the sequence. Those of which nothing is due are absent.
        nbytes: Bytes of each of these components.
        counts: Blocks of each of them.
    """

    blocks: Blocks
    granules: dict[str, tuple[int, int]]
    nbytes: tuple[int, ...]
    counts: list[int]


APART, IN_ORDER, MIXED = range(3)
"""How the items of a component follow each other: no two of them as neighbours on both sides, all of them, or some. In
the last case, who adds the indices has to find the neighbours."""

_Key = tuple[tuple[str, int, int, int, int, int, int], ...]
"""A shape: the fields of a `_Part` for each component. A plain tuple is made in a tenth of the time."""


class _Part(NamedTuple):
    """How one component is part of a shape.

    Attributes:
        name: Its name.
        source: The source's first granule, counted from the start of the source's list of items.
        target: The same at the destination.
        granules: How many granules move.
        sources: Items in the source's list.
        targets: Items in the destination's list.
        order: How the items follow each other.
    """

    name: str
    source: int
    target: int
    granules: int
    sources: int
    targets: int
    order: int


class Shapes:
    """The shapes of the small requests between two ranks, as far as they are known. Not thread-safe."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[_Key, _Shape | int] = {}
        """Those that came last are at the end; how often it came, for one that is not worked out."""

    def whole(
        self,
        plans: Mapping[str, ComponentPlan],
        sources: Mapping[str, Items],
        targets: Mapping[str, Items],
        tokens: int,
        prefix: int,
    ) -> Whole | None:
        """What the only push of a request moves.

        ``None`` if the push lacks something that is due, if it becomes many blocks, if positions are dealt out over
        ranks, or if its shape has not come often. Then pair each component.

        Args:
            plans: What the source writes for the destination.
            sources: The source's items.
            targets: The destination's items.
            tokens: N.
            prefix: P.
        """
        parts: list[tuple[str, int, int, int, int, int, int]] = []
        granules: dict[str, tuple[int, int]] = {}
        theirs: list[I64] = []
        ours: list[I64] = []
        blocks = written = 0
        for name, items in sources.items():
            plan = plans.get(name)
            if plan is None:
                continue  # another rank writes this component for this destination
            written += 1
            there, here = items.ids, targets[name].ids
            blocks += there.size * plan.item_blocks
            if blocks > MOST_SHAPE_BLOCKS:
                return None
            if plan.source.page:
                owed = due(plan.source, plan.target, tokens, prefix)
                if owed.granules is not None:
                    return None
                if owed.first == owed.last:
                    continue
                per_source, per_target = plan.source.page // plan.granule, plan.target.page // plan.granule
                low, high = overlap(per_source, per_target, items, targets[name], owed)
                if low != owed.first or high != owed.last:
                    return None
                at = low - items.first * per_source, low - targets[name].first * per_target
                order = APART
                if there.size > 1 or here.size > 1:
                    order = _order(there, here, *at, high - low) if per_source == per_target == 1 else MIXED
            else:
                low, high, at, order = 0, 1, (0, 0), APART
            parts.append((name, *at, high - low, there.size, here.size, order))
            granules[name] = low, high
            theirs.append(there)
            ours.append(here)
        shape = self._shape(tuple(parts), plans) if parts and written == len(plans) else None
        if shape is None:
            return None
        made, counts = shape.blocks(np.concatenate(theirs + ours))
        return Whole(made, granules, shape.nbytes, counts)

    def _shape(self, key: _Key, plans: Mapping[str, ComponentPlan]) -> _Shape | None:
        known = self._known
        found = known.pop(key, 0)
        if isinstance(found, int):
            if len(known) >= KNOWN:
                del known[next(iter(known))]
            found = found + 1 if found + 1 < OFTEN else _Shape([_Part(*fields) for fields in key], plans)
        known[key] = found
        return None if isinstance(found, int) else found


def _order(there: I64, here: I64, at_source: int, at_target: int, count: int) -> int:
    """How so many items of both sides follow each other, from a place in each list."""
    theirs = there[at_source : at_source + count].tolist()
    ours = here[at_target : at_target + count].tolist()
    pairs = zip(theirs, theirs[1:], ours, ours[1:], strict=False)
    neighbours = len([None for a, b, c, d in pairs if b - a == 1 == d - c])
    return APART if not neighbours else IN_ORDER if neighbours == count - 1 else MIXED


class _Shape:
    """A shape, worked out. Its arrays have an element for each block before neighbours of mixed lists are merged.

    Attributes:
        nbytes: Bytes of each component.
    """

    __slots__ = (
        "_bases",
        "_before",
        "_counts",
        "_items",
        "_lasts",
        "_lengths",
        "_regions",
        "_strides",
        "_within",
        "nbytes",
    )

    def __init__(self, parts: Sequence[_Part], plans: Mapping[str, ComponentPlan]) -> None:
        columns: list[_Columns] = []
        counts: list[int] = []
        theirs, ours = 0, sum(part.sources for part in parts)
        for part in parts:
            made = list(_columns(part, plans[part.name], theirs, ours))
            columns += made
            counts.append(sum(len(each.lengths) for each in made))
            theirs += part.sources
            ours += part.targets
        arrays = (np.concatenate(each, axis=-1) for each in zip(*columns, strict=True))
        joined = _Columns(*map(np.ascontiguousarray, arrays))
        self._items = joined.items
        self._strides = joined.strides
        self._bases = joined.bases
        self._lengths = joined.lengths
        self._regions = joined.regions
        self._within = joined.within[1:] if joined.within.any() else None
        """For each block but the first, whether it may continue the one before; ``None`` if none may."""
        self._before: U64 = np.cumsum(joined.lengths) - joined.lengths
        """For each block, the bytes of those before it."""
        self._counts = counts
        self._lasts = np.cumsum(counts).astype(np.intp) - 1
        """For each component, the place of its last block."""
        self.nbytes = tuple(plans[part.name].granule_nbytes * part.granules for part in parts)
        ends = np.cumsum([0, *counts]).tolist()
        found = tuple(int(joined.lengths[a:b].sum()) for a, b in itertools.pairwise(ends))
        assert found == self.nbytes, "a component's blocks have the bytes that its plan says"

    def blocks(self, ids: I64) -> tuple[Blocks, list[int]]:
        """The blocks of a request, and how many each component has.

        Args:
            ids: The source's items of all components, then the destination's.
        """
        places = ids.view(np.uint64)[self._items]
        places *= self._strides
        places += self._bases
        source, target = places
        lengths, within = self._lengths, self._within
        if within is not None:
            steps = places[:, 1:] - places[:, :-1] == lengths[:-1]
            steps = steps[0] & steps[1] & within
            if np.logical_or.reduce(steps):
                return self._merged(source, target, steps)
        return Blocks(source, target, lengths.copy(), *self._regions.copy()), self._counts

    def _merged(self, source: U64, target: U64, continues: npt.NDArray[np.bool_]) -> tuple[Blocks, list[int]]:
        """The blocks, where some continue the one before them."""
        begins = np.empty(len(source), np.bool_)
        begins[0] = True
        np.logical_not(continues, out=begins[1:])
        (first,) = begins.nonzero()
        before = self._before[first]
        lengths = np.empty(len(first), np.uint64)
        np.subtract(before[1:], before[:-1], out=lengths[:-1])
        lengths[-1] = self._before[-1] + self._lengths[-1] - before[-1]
        theirs, ours = self._regions
        ends = begins.cumsum()[self._lasts].tolist()
        counts = [end - start for start, end in itertools.pairwise((0, *ends))]
        return Blocks(source[first], target[first], lengths, theirs[first], ours[first]), counts


class _Columns(NamedTuple):
    """Blocks of one group of buffers. The first row of a pair of rows is the source's, the second the destination's.

    Attributes:
        items: The place of each block's item among all items; a pair of rows.
        strides: Bytes between two items; a pair of rows.
        bases: The address of the block in item 0; a pair of rows.
        lengths: Bytes of each block.
        regions: Its region; a pair of rows.
        within: Whether it may continue the block before.
    """

    items: npt.NDArray[np.intp]
    strides: U64
    bases: U64
    lengths: U64
    regions: U32
    within: npt.NDArray[np.bool_]


def _columns(part: _Part, plan: ComponentPlan, theirs: int, ours: int) -> Iterator[_Columns]:
    """The blocks of one component. ``theirs`` and ``ours`` are the places of its first items among all items."""
    granules = np.arange(part.granules)
    per_source, per_target = (max(each.page // plan.granule, 1) for each in (plan.source, plan.target))
    source, target = granules + part.source, granules + part.target
    sides = (theirs + source // per_source, source % per_source), (ours + target // per_target, target % per_target)
    for group in plan.fused:
        yield _group_columns(group, part.order, *sides)


def _group_columns(group: Group, order: int, source: tuple[I64, I64], target: tuple[I64, I64]) -> _Columns:
    """The blocks of one group: of each buffer, of each granule, of each run. A side is items, and granules in them."""
    runs = group.runs
    granules, buffers = len(source[0]), len(group.source)
    strides = np.array([[group.source_stride], [group.target_stride]], np.uint64)
    # One buffer has a block for each run of each granule.
    items = np.array([np.repeat(side[0], len(runs.nbytes)) for side in (source, target)], np.intp)
    offsets = np.array(
        [
            (runs.source + source[1][:, None] * runs.source_step).ravel(),
            (runs.target + target[1][:, None] * runs.target_step).ravel(),
        ],
        np.uint64,
    )
    lengths = np.tile(runs.nbytes.astype(np.uint64), granules)
    within = np.full(len(lengths), granules > 1)
    within[0] = False
    if order != MIXED:
        # Where items follow each other, the place in the list differs from the index by the same number for all.
        places = items.astype(np.uint64) * strides + offsets
        touch = (places[:, 1:] - places[:, :-1] == lengths[:-1]).all(axis=0)
        alike = (items[:, 1:] == items[:, :-1]).all(axis=0)
        apart = ~(touch & (alike | (order == IN_ORDER)) & within[1:])
        first = np.flatnonzero(np.concatenate(([True], apart)))
        items, offsets = items[:, first], offsets[:, first]
        lengths, within = np.add.reduceat(lengths, first), np.zeros(len(first), np.bool_)
    count = len(lengths)
    return _Columns(
        items=np.tile(items, buffers),
        strides=strides.repeat(buffers * count, axis=1),
        bases=np.array([group.source, group.target]).repeat(count, axis=1) + np.tile(offsets, buffers),
        lengths=np.tile(lengths, buffers),
        regions=np.array([group.source_region, group.target_region]).repeat(count, axis=1),
        within=np.tile(within, buffers),
    )
