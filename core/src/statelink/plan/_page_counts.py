"""How many tokens a request can have, as far as decode's numbers of pages say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from statelink.errors import RoomError
from statelink.state import Coverage

from ._items import Items, Pages, checked_ids
from ._positions import MAX_TOKENS

if TYPE_CHECKING:
    from statelink.state import Component

__all__ = ["Tokens", "needs_tokens", "tokens_of", "unknown_pages"]


class Tokens(NamedTuple):
    """How many tokens a request has.

    Attributes:
        least: The least number.
        most: The largest number; the same if the number is known.
    """

    least: int
    most: int


def needs_tokens(component: Component) -> bool:
    """Whether a rank's pages of a component depend on more than the number of a request's pages.

    A window begins at another page, and an open group has other rows or pages, for another number of tokens on the same
    last page. Where positions are divided among ranks, a rank's own pages do not say how many there are.
    """
    kind = component.kind
    counts = kind.coverage in (Coverage.SUFFIX, Coverage.WHOLE) and not kind.complete
    return kind.positional and not (counts and component.partition.kind == "all")


def tokens_of(components: Iterable[Component], prefix: int, given: Mapping[str, Any]) -> Tokens:
    """The numbers of tokens of which decode's components have as many pages as it names.

    Args:
        components: Decode's components.
        prefix: P.
        given: Component name to bare indices or `Pages`. A component that is not named has no pages. If no component
            has a page for each page of the request, any number of tokens is possible.

    Raises:
        RoomError: No number of tokens gives these numbers of pages, or one is needed to know which pages those are.
    """
    found = Tokens(max(1, prefix), MAX_TOKENS)
    named = ""
    unclear = []
    for component in components:
        if needs_tokens(component):
            unclear.append(component)
        elif component.kind.positional:
            here = _tokens_of(component, prefix, given.get(component.name, ()))
            both = Tokens(max(found.least, here.least), min(found.most, here.most))
            if both.least > both.most:
                raise RoomError(
                    f"component {component.name!r} has pages for {_words(here)} tokens",
                    cause=f"{named or f'a prefix of {prefix}'} says {_words(found)}",
                    hint="name the pages of the same tokens of every component",
                    code="room.items",
                )
            found, named = both, f"component {component.name!r}"
    if unclear and found.least != found.most:
        raise unknown_pages(unclear[0])
    return found


def unknown_pages(component: Component) -> RoomError:
    """The error for a component if nobody can say which of its pages must arrive."""
    return RoomError(
        f"which pages of component {component.name!r} must arrive is not known",
        cause=f"for its type {component.kind.name!r}, that depends on the number of tokens, "
        "and decode knows only the number of pages",
        hint="pass tokens to receive()",
        code="room.tokens",
    )


def _tokens_of(component: Component, prefix: int, given: Any) -> Tokens:
    listed = given.ids if isinstance(given, (Pages, Items)) else given
    pages, page = len(checked_ids(component, listed)), component.page
    first = prefix if component.kind.coverage is Coverage.SUFFIX else 0
    if not pages:
        return Tokens(first, first)
    if first % page:
        raise RoomError(
            f"prefix {prefix} ends inside a page of component {component.name!r}",
            cause=f"a page has {page} tokens",
            hint=f"use the last page boundary, {first - first % page}",
            code="room.prefix",
        )
    return Tokens(first + (pages - 1) * page + 1, first + pages * page)


def _words(tokens: Tokens) -> str:
    return str(tokens.least) if tokens.least == tokens.most else f"{tokens.least} to {tokens.most}"
