"""Pairs the items of two ranks by the positions that both hold.

A *granule* is the largest range of positions that is never cut: not by an item of either side, and not by the way
positions are dealt out over ranks. Pages of 16 and of 24 tokens have granules of 8 tokens. If decode deals single
tokens out over its ranks, a granule is one token.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ._positions import held_span, required_span

if TYPE_CHECKING:
    from statelink.state import Component, Partition

    from ._items import Items

__all__ = ["Due", "Pairs", "due", "granule_of", "overlap", "pair"]

I64 = npt.NDArray[np.int64]


class Due(NamedTuple):
    """The granules that one source owes to one destination for a request.

    Attributes:
        first: Number of the first granule in the sequence.
        last: One past the last.
        granules: The numbers of the granules; int64, ascending. ``None`` if all from ``first`` to ``last`` are due.
    """

    first: int
    last: int
    granules: I64 | None = None

    def __len__(self) -> int:
        return self.last - self.first if self.granules is None else len(self.granules)


class Pairs(NamedTuple):
    """Granules that both sides hold, in order of position.

    Attributes:
        source: For each granule, the source's item; int64.
        target: For each granule, the destination's item; int64.
        source_part: For each granule, its number in the source's item; int64, or ``None`` if it is always 0.
        target_part: The same in the destination's item.
        due: For each granule, its place among all granules that are due for the request.
        granules: ``[first, last)`` numbers in the sequence. All granules are between them.
        numbers: The number of each granule in the sequence; int64. ``None`` if ``granules`` has no gap.
    """

    source: I64
    target: I64
    source_part: I64 | None
    target_part: I64 | None
    due: slice | I64
    granules: tuple[int, int]
    numbers: I64 | None = None

    def __len__(self) -> int:
        return len(self.source)


def granule_of(source: Component, target: Component) -> int:
    """Number of positions of a granule; 1 if items do not stand for positions."""
    granule = math.gcd(source.page, target.page)
    for side in (source, target):
        if side.partition.kind == "cyclic":
            granule = math.gcd(granule, side.partition.block)
    return granule or 1


def due(source: Component, target: Component, tokens: int, prefix: int) -> Due:
    """What must move for a request: what decode requires, extended to whole items that both sides hold.

    Both sides compute the same result, and count bytes with it. If items do not stand for positions, one granule is
    due.

    Raises:
        RoomError: The prefix ends inside an item of a type that moves whole items.
    """
    if not target.kind.positional:
        return Due(0, 1)
    a, b = required_span(target, tokens, prefix)
    if a >= b:
        return Due(0, 0)
    granule = granule_of(source, target)
    dealt = "cyclic" in (source.partition.kind, target.partition.kind)
    if dealt:
        low, high = a // granule * granule, -(-b // granule) * granule
    else:
        # The rest of an item across the edge moves, too, if both sides hold it.
        one, other = source.page, target.page
        low = max(a // one * one, a // other * other)
        high = min(-(-b // one) * one, -(-b // other) * other)
    for side in (source, target):
        if side.partition.kind == "contiguous":
            span = held_span(side, tokens)
            low, high = max(low, span[0]), min(high, span[1])
    first, last = low // granule, max(low, high) // granule
    if not dealt:
        return Due(first, last)
    granules = np.arange(first, last, dtype=np.int64)
    for side in (source, target):
        granules = granules[_holds(side.partition, granules, granule)]
    return Due(first, last, granules)


def pair(source: Component, target: Component, granule: int, theirs: Items, ours: Items, owed: Due) -> Pairs:
    """Pair the items of a push with the destination's items, for the granules that are due.

    Args:
        source: The source's component.
        target: The destination's component.
        granule: The result of `granule_of` for the two.
        theirs: The source's items.
        ours: The destination's items.
        owed: The result of `due` for this request.
    """
    if not source.page:
        return Pairs(theirs.ids, ours.ids, None, None, slice(0, 1), (0, 1))
    per_source, per_target = source.page // granule, target.page // granule
    if owed.granules is not None:
        local_source = _numbered(source.partition, owed.granules, granule)
        local_target = _numbered(target.partition, owed.granules, granule)
        item_source = local_source // per_source - theirs.first
        item_target = local_target // per_target - ours.first
        both = (item_source >= 0) & (item_source < len(theirs.ids)) & (item_target >= 0) & (item_target < len(ours.ids))
        places = np.flatnonzero(both)
        return Pairs(
            theirs.ids[item_source[places]],
            ours.ids[item_target[places]],
            local_source[places] % per_source,
            local_target[places] % per_target,
            places,
            (int(owed.granules[places[0]]), int(owed.granules[places[-1]]) + 1)
            if len(places)
            else (owed.first, owed.first),
            owed.granules[places],
        )
    low, high = overlap(per_source, per_target, theirs, ours, owed)
    places_range = slice(low - owed.first, high - owed.first)
    if per_source == per_target == 1:
        return Pairs(
            theirs.ids[low - theirs.first : high - theirs.first],
            ours.ids[low - ours.first : high - ours.first],
            None,
            None,
            places_range,
            (low, high),
        )
    granules = np.arange(low, high, dtype=np.int64)
    return Pairs(
        theirs.ids[granules // per_source - theirs.first],
        ours.ids[granules // per_target - ours.first],
        granules % per_source,
        granules % per_target,
        places_range,
        (low, high),
    )


def overlap(per_source: int, per_target: int, theirs: Items, ours: Items, owed: Due) -> tuple[int, int]:
    """``[first, last)`` granules that both sides name and that are due, where the granules that are due have no gap.

    Args:
        per_source: Granules of one item of the source.
        per_target: Granules of one item of the destination.
        theirs: The source's items.
        ours: The destination's items.
        owed: What is due.
    """
    low = max(theirs.first * per_source, ours.first * per_target, owed.first)
    ends = (theirs.first + theirs.ids.size) * per_source, (ours.first + ours.ids.size) * per_target
    return low, max(min(*ends, owed.last), low)


def _holds(partition: Partition, granules: I64, granule: int) -> npt.NDArray[np.bool_]:
    """Which granules a rank with this cyclic partition holds. The caller has handled contiguous partitions."""
    if partition.kind != "cyclic":
        return np.ones(len(granules), np.bool_)
    held: npt.NDArray[np.bool_] = granules // (partition.block // granule) % partition.size == partition.index
    return held


def _numbered(partition: Partition, granules: I64, granule: int) -> I64:
    """The rank's own numbers for granules that it holds."""
    if partition.kind != "cyclic":
        return granules
    block = partition.block // granule
    return granules // (block * partition.size) * block + granules % block
