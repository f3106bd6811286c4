"""Positions of a request: which must arrive, which items of a rank hold them, and how items of two ranks pair.

A *granule* is the largest range of positions that is never cut: not by an item of either side, and not by the way
positions are dealt out over ranks. Pages of 16 and of 24 tokens have granules of 8 tokens. If decode deals single
tokens out over its ranks, a granule is one token.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from statelink.errors import RoomError
from statelink.state import Component, Coverage, Partition

if TYPE_CHECKING:
    from ._items import Items

__all__ = [
    "MAX_TOKENS",
    "Due",
    "Pairs",
    "due",
    "granule_of",
    "held_items",
    "held_span",
    "item_positions",
    "local",
    "overlap",
    "pair",
    "required_span",
]

MAX_TOKENS = 1 << 40


def required_span(component: Component, tokens: int, prefix: int, *, aligned: bool = True) -> tuple[int, int]:
    """Positions ``[a, b)`` that must arrive for a request; ``a == b`` if none must.

    With N tokens, of which decode holds P, and the component's window W, group q and kept positions k:

    ========  ==========================
    suffix    ``[P, N)``
    whole     ``[0, N)``
    window    ``[max(P, N - W), N)``
    recent    ``[max(0, N - W), N)``
    tail      ``[max(0, N - N mod q - k), N)``
    open      ``[max(P, N - N mod q), N)``
    ========  ==========================

    Types that count complete groups use ``N - N mod q`` for N.

    Args:
        component: Decode's component, or prefill's. A prefix may end inside an item of prefill.
        tokens: N.
        prefix: P.
        aligned: Whether to check that the prefix ends between two items, if the type demands it. Only decode has to.

    Raises:
        RoomError: The prefix ends inside an item of a type that moves whole items.
    """
    kind = component.kind
    coverage = kind.coverage
    end = tokens - tokens % component.group if kind.complete else tokens
    if coverage is Coverage.SUFFIX:
        start = prefix
    elif coverage is Coverage.WINDOW:
        start = max(prefix, end - (component.window or 0))
    elif coverage is Coverage.RECENT:
        start = max(0, end - (component.window or 0))
    elif coverage is Coverage.TAIL:
        start = max(0, end - end % component.group - component.keep)
    elif coverage is Coverage.OPEN:
        start = max(prefix, end - end % component.group)
    else:
        start = 0
    if aligned and start == prefix < end and kind.aligned and local(component.partition, start) % component.page:
        step = item_positions(component)
        raise RoomError(
            f"prefix {prefix} ends inside a page of component {component.name!r}",
            cause=f"a page has {step} tokens",
            hint=f"use the last page boundary, {start - start % step}",
            code="room.prefix",
        )
    return min(start, end), end


def item_positions(component: Component) -> int:
    """Number of positions from the first one of an item to the first one of the rank's next item."""
    partition = component.partition
    dealt = partition.kind == "cyclic" and partition.block % component.page != 0
    return component.page * partition.size if dealt else component.page


def local(partition: Partition, position: int) -> int:
    """How many positions below ``position`` this rank holds: the position's number in the rank's own numbering."""
    if partition.kind != "cyclic":
        return position
    rounds, rest = divmod(position, partition.block * partition.size)
    return rounds * partition.block + min(max(rest - partition.index * partition.block, 0), partition.block)


def held_span(component: Component, tokens: int) -> tuple[int, int]:
    """The span of positions that this rank holds of a request, extended to whole pages."""
    partition = component.partition
    pages = -(-tokens // component.page)
    if partition.kind != "contiguous":
        return 0, pages * component.page if partition.kind == "all" else tokens
    each, more = divmod(pages, partition.size)
    first = partition.index * each + min(partition.index, more)
    last = first + each + (partition.index < more)
    return first * component.page, last * component.page


def held_items(component: Component, tokens: int, span: tuple[int, int]) -> tuple[int, int]:
    """``[first, last)`` numbers of the rank's items that hold its positions of ``span``; empty as ``(n, n)``."""
    page = component.page
    if component.partition.kind == "all":  # the rank's numbering is that of the sequence
        a, b = span[0], min(span[1], -(-tokens // page) * page)
        return (a // page, -(-b // page)) if a < b else (a // page, a // page)
    low, high = held_span(component, tokens)
    a, b = max(span[0], low), min(span[1], high)
    first = local(component.partition, a)
    last = local(component.partition, b)
    number = first // component.page
    return (number, -(-last // component.page)) if a < b and first < last else (number, number)


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
    if not target.page:
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
