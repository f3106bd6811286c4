"""Checks an engine's lists of indices and turns them into items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from statelink._arguments import whole
from statelink.errors import RoomError

from ._positions import MAX_TOKENS, held_items, local, required_span

if TYPE_CHECKING:
    from statelink.state import Component

__all__ = [
    "Items",
    "OffSpanError",
    "Pages",
    "check_pieces",
    "checked_ids",
    "checked_int",
    "index_array",
    "item_at",
    "pushed",
    "required",
]

I64 = npt.NDArray[np.int64]
INDICES_ONE_BY_ONE = 32
"""Most indices that are looked at one by one, because numpy's calls then take longer."""
LARGEST_INDEX = 1 << 62
"""The largest index that is accepted, even where an index addresses nothing."""
SPARSE = 64
"""Marks are used to find duplicates if the range of indices is at most so many times their number."""


class OffSpanError(RoomError):
    """The number of items of a push, or their positions, do not fit its span."""


class Pages(NamedTuple):
    """Indices, and the position at which the first item starts.

    Attributes:
        ids: Indices into the component's buffers, in order of position; any one-dimensional list or array of integers.
        start: Position, in tokens, at which the first item begins.
    """

    ids: Any
    start: int


class Items(msgspec.Struct, frozen=True, gc=False):
    """Checked indices of one component, in order of position.

    Attributes:
        ids: int64, owned by this object.
        first: The rank's number of the first item; 0 if items do not stand for positions.
    """

    ids: I64
    first: int


def required(component: Component, tokens: int, prefix: int, given: Any) -> Items:
    """Check decode's indices of one component: they are exactly the items that must arrive.

    Args:
        component: Decode's component.
        tokens: N.
        prefix: P.
        given: Bare indices, `Pages`, or `Items` as they came over the wire.

    Raises:
        RoomError: They are not the items that the coverage rule gives.
    """
    if not component.page:
        return _one(component, given)
    a, b = required_span(component, tokens, prefix)
    first, last = held_items(component, tokens, (a, b))
    start = None
    if isinstance(given, Items):
        start = given.first
    elif isinstance(given, Pages):
        start = item_at(component, given.start)
        given = given.ids
    ids = checked_ids(component, given)
    if len(ids) != last - first or (start is not None and len(ids) and start != first):
        said = f"{len(ids)} items" + (f" from item {start} of the sequence" if start is not None else "")
        raise RoomError(
            f"{said} of component {component.name!r}",
            cause=f"positions [{a}, {b}) need {last - first} pages of {component.page} tokens from item {first}",
            hint="both sides name the same positions; nothing is trimmed",
            code="room.items",
        )
    if not _distinct(ids):
        _check_once(component, ids)
    return Items(ids, first)


def pushed(component: Component, tokens: int, prefix: int | None, span: tuple[int, int], given: Any) -> Items:
    """Check prefill's indices of one component for a push that covers ``span``.

    Bare indices name the rank's items in ``span`` for which the coverage rule asks, with or without the prefix. `Pages`
    may name any items inside the span. An item that need not arrive may have any index, such as that of an engine's
    empty page.

    Raises:
        RoomError: The number of indices fits no rule, items are outside the span, or two positions that must arrive
            have the same item.
    """
    if not component.page:
        return _one(component, given)
    items = _pushed(component, tokens, prefix, span, given)
    if not _distinct(items.ids):
        needed, begin = _needed(component, tokens, prefix, items)
        _check_once(component, needed.ids, begin)
    return items


def check_pieces(component: Component, tokens: int, prefix: int | None, pieces: Sequence[Items]) -> None:
    """Check that the pushes of a room together name no item for two positions.

    A push may name an item again for the same position, as a push of other layers does.

    Args:
        component: Prefill's component, which covers positions.
        tokens: N.
        prefix: P, if it is known.
        pieces: The result of `pushed` for each push.

    Raises:
        RoomError: An item is named for two positions that must arrive.
    """
    if len(pieces) < 2:
        return  # `pushed` has checked it
    different: list[Items] = []
    for piece in pieces:
        needed, _ = _needed(component, tokens, prefix, piece)
        same = (each for each in different if each.first == needed.first and len(each.ids) == len(needed.ids))
        if len(needed.ids) and not any(np.array_equal(each.ids, needed.ids) for each in same):
            different.append(needed)
    if len(different) < 2 or component.count is None:
        return
    ids = np.concatenate([each.ids for each in different])
    numbers = np.concatenate([np.arange(each.first, each.first + len(each.ids)) for each in different])
    order = np.argsort(ids, kind="stable")
    ids, numbers = ids[order], numbers[order]
    clash = np.flatnonzero((ids[1:] == ids[:-1]) & (numbers[1:] != numbers[:-1]))
    if len(clash):
        at = int(clash[0])
        one, other = sorted((int(numbers[at]), int(numbers[at + 1])))
        raise RoomError(
            f"item {int(ids[at])} of component {component.name!r} is pushed for two positions",
            cause=f"as item {one} and as item {other} of the sequence",
            hint="each position has an item of its own",
            code="room.items",
        )


def _needed(component: Component, tokens: int, prefix: int | None, items: Items) -> tuple[Items, int]:
    """The items of a push that must arrive, and where they begin in its list. Those before them may have any index."""
    first, last = held_items(component, tokens, required_span(component, tokens, prefix or 0, aligned=False))
    begin = max(first - items.first, 0)
    if begin == 0 and last - items.first >= len(items.ids):
        return items, 0  # every one of them
    return Items(items.ids[begin : max(last - items.first, begin)], items.first + begin), begin


def _pushed(component: Component, tokens: int, prefix: int | None, span: tuple[int, int], given: Any) -> Items:
    a, b = span
    if isinstance(given, Pages):
        everything = held_items(component, tokens, span)
        ids, first = checked_ids(component, given.ids), item_at(component, given.start)
        if first < everything[0] or first + len(ids) > everything[1]:
            raise OffSpanError(
                f"items of component {component.name!r} leave the pushed span",
                cause=f"{len(ids)} pages of {component.page} tokens from position {given.start}, span [{a}, {b})",
                hint="name a span that has the positions of all lists, and Pages for each list that has fewer",
                code="room.items",
            )
        return Items(ids, first)
    ids = checked_ids(component, given)
    allowed: dict[int, int] = {}
    for known in {prefix or 0, 0}:
        # An engine that does not know of prefixes names the items of the whole span.
        low, high = required_span(component, tokens, known, aligned=False)
        first, last = held_items(component, tokens, (max(low, a), min(high, b)))
        allowed[last - first] = first
    if len(ids) not in allowed:
        wanted = " or ".join(str(n) for n in sorted(allowed))
        low, high = required_span(component, tokens, 0, aligned=False)
        why = "" if low <= a <= b <= high else f": a request of {tokens} tokens needs only positions [{low}, {high})"
        raise OffSpanError(
            f"{len(ids)} items of component {component.name!r} for span [{a}, {b})",
            cause=f"{wanted} pages of {component.page} tokens are expected there{why}",
            hint="name the position of the first page with statelink.Pages(ids, start) where the lists differ",
            code="room.items",
        )
    return Items(ids, allowed[len(ids)])


def _distinct(ids: I64) -> bool:
    """Whether no item is named twice, as far as a quick look tells."""
    size = ids.size
    if size <= INDICES_ONE_BY_ONE:
        return size < 2 or len(set(ids.tolist())) == size
    return bool((ids[1:] > ids[:-1]).all())


def _check_once(component: Component, ids: I64, begin: int = 0) -> None:
    """Check that no item is named for two positions. It would be written twice, or read for bytes that it lacks.

    Args:
        component: The component of the items.
        ids: Their indices. None is negative.
        begin: Where they begin in the list that the engine gave.
    """
    if len(ids) < 2 or component.count is None:
        return
    low, high = int(ids.min()), int(ids.max())
    if high - low < SPARSE * len(ids):
        # Marks are many times faster than sorting.
        marks = np.zeros(high - low + 1, np.bool_)
        marks[ids - low] = True
        once = np.count_nonzero(marks) == len(ids)
    else:
        ordered = np.sort(ids)
        once = bool((ordered[1:] != ordered[:-1]).all())
    if once:
        return
    places: dict[int, int] = {}
    for place, item in enumerate(ids.tolist(), begin):
        if places.setdefault(item, place) != place:
            raise RoomError(
                f"item {item} of component {component.name!r} is named twice",
                cause=f"in places {places[item]} and {place} of the list",
                hint="each position has an item of its own",
                code="room.items",
            )


def item_at(component: Component, start: Any) -> int:
    """The rank's number of the item that begins at ``start``, the first position of `Pages`.

    Raises:
        RoomError: No item begins there.
    """
    if type(start) is int and 0 <= start <= MAX_TOKENS:
        position = start
    else:
        position = checked_int(start, f"the start of Pages of component {component.name!r}", 0, MAX_TOKENS)
    partition = component.partition
    number, rest = divmod(local(partition, position) if partition.kind == "cyclic" else position, component.page)
    if rest:
        raise RoomError(
            f"Pages of component {component.name!r} start at position {position}",
            cause=f"no item begins there; a page has {component.page} tokens",
            code="room.items",
        )
    return number


def index_array(given: Any, what: str) -> np.ndarray[Any, Any]:
    """Indices that a caller passes, as an array of any type and shape.

    Raises:
        RoomError: They cannot be read; or they have bools among them, which numpy would take for numbers, or a mask,
            which it would drop (``room.indices``).
    """
    try:
        raw = np.asarray(given)
    except Exception as error:
        raise RoomError(f"{what} cannot be read", cause=_clipped(error), code="room.indices") from error
    if type(given) in (list, tuple):
        kinds = set(map(type, given if raw.size <= INDICES_ONE_BY_ONE else _suspects(given, raw)))
        if bool in kinds or np.bool_ in kinds:
            raise RoomError(f"{what} are not a list of integers", cause="bools are among them", code="room.indices")
    elif raw is not given and isinstance(given, np.ma.MaskedArray):
        raise RoomError(
            f"{what} are an array with a mask",
            cause="the mask would be dropped, and indices that it hides would be used",
            hint="pass array.compressed() for those that count",
            code="room.indices",
        )
    return raw


def _suspects(given: Sequence[Any], raw: np.ndarray[Any, Any]) -> Sequence[Any]:
    """The entries that may be bools. In a list of whole numbers, these are read as 0 or 1."""
    if raw.ndim != 1 or raw.dtype.kind not in "iu":
        return given
    return [given[place] for place in np.flatnonzero(raw < 2).tolist()]


def _clipped(error: Exception) -> str:
    """What an error of another library says; its type if it says nothing that can be shown."""
    try:
        return f"{str(error)!s:.200}"
    except Exception:
        return type(error).__name__


def _one(component: Component, given: Any) -> Items:
    only = given[0] if type(given) is list and len(given) == 1 else given
    if type(only) is int and 0 <= only < (LARGEST_INDEX if component.count is None else component.count):
        return Items(np.array((only,), np.int64), 0)
    if isinstance(given, Pages):
        given = given.ids
    ids = checked_ids(component, [given] if isinstance(given, (int, np.integer)) else given)
    if ids.size != 1:
        raise RoomError(
            f"{len(ids)} items of component {component.name!r}",
            cause=f"type {component.kind.name!r} has exactly one {component.kind.index.value} a request",
            code="room.items",
        )
    return Items(ids, 0)


def checked_ids(component: Component, given: Any) -> I64:
    """An int64 copy of indices, or the array of `Items`. Checks that all of them are inside every buffer."""
    listed = isinstance(given, Items)
    raw = given.ids if listed else index_array(given, f"indices of component {component.name!r}")
    if raw.ndim != 1 or (raw.size and raw.dtype.kind not in "iu"):
        raise RoomError(
            f"indices of component {component.name!r} are not a list of integers",
            cause=f"got shape {raw.shape} of {raw.dtype}",
            code="room.indices",
        )
    count = LARGEST_INDEX if component.count is None else component.count
    size = raw.size
    if size == 1:
        inside = 0 <= raw.item() < count
    elif size <= INDICES_ONE_BY_ONE:
        each: list[int] = raw.tolist()
        inside = not each or (min(each) >= 0 and max(each) < count)
    else:
        inside = bool(raw.min() >= 0 and raw.max() < count)
    if not inside:
        bad = int(raw[(raw < 0) | (raw >= count)][0])
        raise RoomError(
            f"index {bad} of component {component.name!r} is out of range",
            cause=f"its buffers have {count} items",
            code="room.indices",
        )
    return raw if listed else raw.astype(np.int64)


def checked_int(value: Any, what: str, low: int, high: int, *, code: str = "room.number") -> int:
    """``value`` as a Python integer in ``[low, high]``.

    Raises:
        RoomError: It is no whole number, or out of bounds. The error says ``what`` it was meant to be.
    """
    return whole(value, what, low, high, error=RoomError, code=code)
