"""Computes the indices of one component for a request, from the engine's own tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from statelink._arguments import shown
from statelink.errors import RoomError, StateError
from statelink.state import Component, Coverage, IndexSpace

from ._items import Pages, checked_int, index_array, item_at
from ._positions import MAX_TOKENS, held_items, required_span

__all__ = ["indices_of"]

I64 = npt.NDArray[np.int64]

MOST_UNUSED = 1 << 22
"""Most indices of a component whose indices address nothing."""
TABLE = "'table' has the token slot of each position; a list of page ids is passed as 'pages'"


def indices_of(
    component: Component,
    tokens: int,
    prefix: int = 0,
    *,
    table: Any = None,
    pages: Any = None,
    slot: int | None = None,
    ring: int | None = None,
) -> I64:
    """The indices of all items of one component that must arrive for a request.

    `Receiving.accept` takes exactly these, and `Sending.push` takes them for a push of the whole request. The state
    type decides how they are computed, and which arguments are needed. Pass no others.

    ==========================  =========================================================================
    pages                       ``table[t] // page`` for each page's first position t, or ``pages[n]``
                                for each page number n of the rank
    pages, coverage ``tail``    ``slot * (ring // page) + (N - 1) mod ring // page`` where a group is open
    pages, coverage ``window``  with ``slot`` and ``ring`` instead of a table, where each request has a window of
                                its own: ``(slot * ring + t mod ring) // page`` for each page's first position t
    ring rows                   ``slot * ring + t mod ring`` for each position t
    slots, rows                 ``slot``
    ==========================  =========================================================================

    Args:
        component: What this rank holds: ``link.inventory.component("kv")``.
        tokens: N: the prompt's length.
        prefix: P: positions that decode holds. If it ends inside one of this side's items, that item is included.
        table: Token slots of the request in this component's pool, by position. The positions of a page are
            consecutive, and begin at a page. If positions are dealt out over ranks (``cyclic``), by this rank's own
            numbering.
        pages: Page ids of the request in this component's pool, by page; instead of ``table``, and numbered like it.
            `Pages` may begin at a later position.
        slot: The request's slot, row or ring in this side's pool.
        ring: Positions of one ring, or of one request's window, on this side.

    Returns:
        int64, owned by the caller; empty if nothing must arrive.

    Raises:
        StateError: ``component`` is none.
        RoomError: An argument is missing, too short, or does not fit the type.
    """
    if not isinstance(component, Component):
        raise StateError(
            "indices are computed for a component of an inventory",
            cause=f"got {shown(component)}" if isinstance(component, str) else f"got {type(component).__name__}",
            hint='pass link.inventory.component("kv"), or the component of that name in the inventory of describe',
        )
    tokens = checked_int(tokens, "the number of tokens", 1, MAX_TOKENS)
    prefix = checked_int(prefix, "the prefix", 0, tokens, code="room.prefix")
    kind = component.kind
    if not kind.positional:
        return np.array([_slot(component, slot)], np.int64)
    a, b = required_span(component, tokens, prefix, aligned=False)
    first, last = held_items(component, tokens, (a, b))
    if first == last:
        return np.empty(0, np.int64)
    _check_number(component, last - first)
    if kind.index is IndexSpace.RING:
        size = _ring(component, ring, b - a)
        return _slot(component, slot) * size + np.arange(a, b, dtype=np.int64) % size
    if kind.coverage is Coverage.TAIL:
        size = _ring(component, component.page if ring is None else ring, component.page)
        if size % component.page:
            raise _missing(component, f"a ring of {size} positions is no multiple of {component.page}")
        place = (tokens - 1) % size // component.page
        return np.array([_slot(component, slot) * (size // component.page) + place], np.int64)
    numbers = np.arange(first, last, dtype=np.int64)
    if isinstance(pages, Pages):
        return _taken(component, pages.ids, numbers - item_at(component, pages.start))
    if pages is not None:
        return _taken(component, pages, numbers)
    starts = numbers * component.page
    if table is None and kind.coverage is Coverage.WINDOW and ring is not None:
        size = _ring(component, ring, len(starts) * component.page)
        if size % component.page:
            raise _missing(component, f"a window of {size} positions is no multiple of pages of {component.page}")
        return (_slot(component, slot) * size + starts % size) // component.page
    if table is None:
        raise _missing(component, "its pages come from 'table' (token slots) or 'pages' (page ids)")
    slots = _taken(component, table, starts, TABLE)
    if (slots % component.page).any():
        bad = int(slots[slots % component.page != 0][0])
        cause = f"a page of {component.page} tokens begins at token slot {bad}, inside a page"
        raise _missing(component, cause, TABLE)
    return slots // component.page


def _check_number(component: Component, needed: int) -> None:
    """Refuse more items than the component has, before a list of them takes gigabytes."""
    most = MOST_UNUSED if component.count is None else component.count
    if needed > most:
        raise _missing(component, f"the request has {needed} items, and at most {most} are possible")


def _taken(component: Component, given: Any, places: I64, hint: str = "") -> I64:
    try:
        values = index_array(given, f"the pages of component {component.name!r}")
    except RoomError as error:
        raise _missing(component, f"a list of integers is needed: {error.reason.cause}", error.reason.hint) from error
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise _missing(component, f"a list of integers is needed, got shape {values.shape} of {values.dtype}")
    if places[0] < 0 or len(values) <= places[-1]:
        cause = f"entries {places[0]} to {places[-1]} are needed of a list of {len(values)}"
        raise _missing(component, cause, hint)
    return values[places].astype(np.int64)


def _slot(component: Component, slot: int | None) -> int:
    if slot is None:
        raise _missing(component, "its type needs 'slot'")
    return checked_int(slot, f"the slot of component {component.name!r}", 0, 1 << 48)


def _ring(component: Component, ring: int | None, least: int) -> int:
    if ring is None:
        raise _missing(component, "its type needs 'ring'")
    return checked_int(ring, f"the ring of component {component.name!r}", max(least, 1), 1 << 40)


def _missing(component: Component, cause: str, hint: str = "") -> RoomError:
    what = f"indices of component {component.name!r} of type {component.kind.name!r} cannot be computed"
    return RoomError(what, cause=cause, hint=hint, code="room.indices")
