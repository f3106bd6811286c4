"""Computes which positions of a request must arrive, and which items of a rank hold them."""

from __future__ import annotations

from statelink.errors import RoomError
from statelink.state import Component, Coverage, Partition

__all__ = ["MAX_TOKENS", "held_items", "held_span", "item_positions", "local", "required_span"]

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
