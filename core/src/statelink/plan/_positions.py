"""From lists of indices to positions of the sequence, and to pairs of items."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from statelink.errors import RoomError
from statelink.state import Component, Coverage

from ._numbers import whole

__all__ = ["Items", "Pages", "due", "pair", "pushed", "required", "required_span"]

I64 = npt.NDArray[np.int64]
MAX_TOKENS = 1 << 40


class Pages(NamedTuple):
    """Indices together with the position at which the first of them starts.

    Attributes:
        ids: Indices into the component's buffers, in order of position; anything one-dimensional and integral.
        start: First position of the first item, in tokens; a multiple of the component's page.
    """

    ids: Any
    start: int


class Items(NamedTuple):
    """Checked indices of one component, in order of position.

    Attributes:
        ids: int64, owned by this object.
        first: Number of the first item in the sequence; 0 where items do not stand for positions.
    """

    ids: I64
    first: int


class Pairs(NamedTuple):
    """Granules that both sides hold, in order of position.

    Attributes:
        source: Source item per granule; int64.
        target: Destination item per granule; int64.
        source_part: Which granule of the source's item; int64, or ``None`` where it is always 0.
        target_part: Which granule of the destination's item; likewise.
        first: Number of the first granule in the sequence.
    """

    source: I64
    target: I64
    source_part: I64 | None
    target_part: I64 | None
    first: int

    def __len__(self) -> int:
        return len(self.source)


def required_span(component: Component, tokens: int, prefix: int) -> tuple[int, int]:
    """Positions ``[a, b)`` that must arrive for a request; ``a == b`` when none must.

    The formulas are those of suffix ``[P, N)``, whole ``[0, N)`` and window ``[max(P, N - W), N)``.

    Raises:
        RoomError: The prefix ends inside an item of a type that moves whole items.
    """
    coverage = component.kind.coverage
    if coverage is Coverage.WINDOW:
        start = max(prefix, tokens - (component.window or 0), 0)
    else:
        start = prefix if coverage is Coverage.SUFFIX else 0
    if start == prefix and prefix < tokens and component.kind.aligned and start % component.page:
        raise RoomError(
            f"prefix {prefix} ends inside a page of component {component.name!r}",
            cause=f"a page has {component.page} tokens",
            hint=f"use the last page boundary, {start - start % component.page}",
            code="room.prefix",
        )
    return min(start, tokens), tokens


def due(source: Component, target: Component, granule: int, tokens: int, prefix: int) -> tuple[int, int]:
    """Granules ``[first, last)`` that move for a request: what is required, rounded out to items that both sides hold.

    Both sides compute it alike, and count bytes with it. Where items do not stand for positions it is ``(0, 1)``.
    """
    if not target.kind.positional:
        return 0, 1
    a, b = required_span(target, tokens, prefix)
    if a >= b:
        return 0, 0
    low = max(a // page * page for page in (source.page, target.page))
    high = min(-(-b // page) * page for page in (source.page, target.page))
    return low // granule, high // granule


def required(component: Component, tokens: int, prefix: int, given: Any) -> Items:
    """Decode's items of one component, checked against exactly what must arrive.

    Raises:
        RoomError: They are not what the coverage rule derives.
    """
    if not component.kind.positional:
        return _one(component, given)
    a, b = required_span(component, tokens, prefix)
    first, last = a // component.page, -(-b // component.page)
    if a >= b:
        first = last
    return _listed(component, given, first, last, f"positions [{a}, {b})")


def pushed(
    component: Component,
    tokens: int,
    prefix: int | None,
    span: tuple[int, int],
    given: Any,
) -> Items:
    """Prefill's items of one component for a push that covers ``span``.

    Bare indices are those of the pages of ``span`` that the coverage rule asks for, with the prefix if it is known,
    or without. `Pages` may stand for any pages inside the span.

    Raises:
        RoomError: Their number fits no rule, or they leave the span.
    """
    if not component.kind.positional:
        return _one(component, given)
    page = component.page
    a, b = span
    if isinstance(given, Pages):
        start = whole(given.start, f"the start of Pages of component {component.name!r}", 0, MAX_TOKENS)
        ids, first = _ids(component, given.ids), start // page
        if start % page or first < a // page or first + len(ids) > -(-b // page):
            raise RoomError(
                f"items of component {component.name!r} leave the pushed span",
                cause=f"{len(ids)} pages of {page} tokens from position {start}, span [{a}, {b})",
                code="room.items",
            )
        return Items(ids, first)
    ids = _ids(component, given)
    allowed: dict[int, int] = {}
    for known in {prefix or 0, 0}:
        # A whole-span list is what an engine has that does not know of prefixes.
        lowest, _ = required_span(component, tokens, known - known % page)
        first = max(lowest, a) // page
        last = -(-b // page)
        allowed[max(last - first, 0)] = min(first, last)
    if component.kind.coverage is Coverage.SUFFIX:
        allowed[-(-b // page) - a // page] = a // page
    if len(ids) not in allowed:
        wanted = " or ".join(str(n) for n in sorted(allowed))
        raise RoomError(
            f"{len(ids)} items of component {component.name!r} for span [{a}, {b})",
            cause=f"{wanted} pages of {page} tokens are expected there",
            hint="name the position of the first page with statelink.Pages(ids, start) where the lists differ",
            code="room.items",
        )
    return Items(ids, allowed[len(ids)])


def pair(source: Items, target: Items, pages: tuple[int, int], granule: int, within: tuple[int, int]) -> Pairs:
    """Bring two lists of items together over the positions that both hold.

    Args:
        source: The source's items.
        target: The destination's items.
        pages: Positions of an item, at the source and at the destination; 0 where items do not stand for positions.
        granule: Positions of a granule; divides both pages.
        within: Granules to stay inside of.
    """
    if not pages[0]:
        return Pairs(source.ids, target.ids, None, None, 0)
    per_source, per_target = pages[0] // granule, pages[1] // granule
    low = max(source.first * per_source, target.first * per_target, within[0])
    ends = (source.first + len(source.ids)) * per_source, (target.first + len(target.ids)) * per_target
    high = max(min(*ends, within[1]), low)
    if per_source == per_target == 1:
        return Pairs(
            source.ids[low - source.first : high - source.first],
            target.ids[low - target.first : high - target.first],
            None,
            None,
            low,
        )
    grains = np.arange(low, high, dtype=np.int64)
    return Pairs(
        source.ids[grains // per_source - source.first],
        target.ids[grains // per_target - target.first],
        grains % per_source,
        grains % per_target,
        low,
    )


def _listed(component: Component, given: Any, first: int, last: int, what: str) -> Items:
    start = None
    if isinstance(given, Pages):
        start = whole(given.start, f"the start of Pages of component {component.name!r}", 0, MAX_TOKENS)
        given = given.ids
    ids = _ids(component, given)
    if len(ids) != last - first or (start is not None and len(ids) and start != first * component.page):
        said = f"{len(ids)} items" + (f" from position {start}" if start is not None else "")
        raise RoomError(
            f"{said} of component {component.name!r}",
            cause=f"{what} need {last - first} pages of {component.page} tokens from position {first * component.page}",
            hint="both sides name the same positions; nothing is trimmed",
            code="room.items",
        )
    if len(np.unique(ids)) != len(ids):
        raise RoomError(f"an item of component {component.name!r} is named twice", code="room.items")
    return Items(ids, first)


def _one(component: Component, given: Any) -> Items:
    if isinstance(given, Pages):
        given = given.ids
    ids = _ids(component, [given] if isinstance(given, (int, np.integer)) else given)
    if len(ids) != 1:
        raise RoomError(
            f"{len(ids)} items of component {component.name!r}",
            cause=f"type {component.kind.name!r} has exactly one {component.kind.index.value} a request",
            code="room.items",
        )
    return Items(ids, 0)


def _ids(component: Component, given: Any) -> I64:
    """A private int64 copy of indices, all of them inside every buffer."""
    try:
        raw = np.asarray(given)
    except Exception as error:
        raise RoomError(
            f"indices of component {component.name!r} cannot be read", cause=str(error), code="room.indices"
        ) from error
    if raw.ndim != 1 or (raw.size and raw.dtype.kind not in "iu"):
        raise RoomError(
            f"indices of component {component.name!r} are not a list of integers",
            cause=f"got shape {raw.shape} of {raw.dtype}",
            code="room.indices",
        )
    # Where no buffer has items (layers that share another's index), nothing is addressed, whatever the index.
    count = min((buffer.count for buffer in component.buffers if buffer.count), default=1 << 62)
    if raw.size and not (raw.min() >= 0 and raw.max() < count):
        bad = int(raw[(raw < 0) | (raw >= count)][0])
        raise RoomError(
            f"index {bad} of component {component.name!r} is out of range",
            cause=f"its buffers have {count} items",
            code="room.indices",
        )
    return np.array(raw, dtype=np.int64)
