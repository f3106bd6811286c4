"""What a decode engine accepted: the memory for a request's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from statelink._arguments import shown
from statelink.errors import RoomError
from statelink.hints import did_you_mean
from statelink.link._ready import Ready
from statelink.plan import Items, Tokens, required, tokens_of
from statelink.wire import MAX_INDICES

if TYPE_CHECKING:
    from statelink.link._room_state import RoomState
    from statelink.state import Component

__all__ = ["Accepted", "check_items"]


class Accepted(msgspec.Struct, frozen=True):
    """One call of `Receiving.accept`.

    Attributes:
        room: The room's id.
        generation: The number that this side drew for this use of the id.
        tokens: N: positions of the request; the most that it can have, while decode knows only its number of pages.
        least: The fewest that it can have; N if that is known.
        prefix: P: positions that decode already holds.
        items: Checked items per component.
        ready: The ready event that guards the memory, if there is one.
        content: The content of the request; empty if the engine states none.
    """

    room: int
    generation: int
    tokens: int
    least: int
    prefix: int
    items: Mapping[str, Items]
    ready: Ready | None
    content: bytes


def check_items(
    room: RoomState, tokens: int | None, items: Mapping[str, Any], prefix: int
) -> tuple[dict[str, Items], Tokens]:
    """The checked items of every component that an engine passed to `Receiving.accept`, and how many tokens there are.

    Args:
        room: The room.
        tokens: N, if decode's engine knows it.
        items: What was passed.
        prefix: P.

    Raises:
        RoomError: They are not what must arrive.
    """
    known = room.context.inventory.by_name
    try:
        if not items.keys() <= known.keys():
            raise _unknown(next(name for name in items if name not in known), known)
        found = tokens_of(known.values(), prefix, items) if tokens is None else Tokens(tokens, tokens)
        most = found.most
        checked: dict[str, Items] = {}
        count = 0
        for name, component in known.items():
            given = items.get(name)
            if given is None:
                if not component.page:
                    raise _lacking(component)
                given = ()
            each = checked[name] = required(component, most, prefix, given)
            count += len(each.ids)
        if count > MAX_INDICES:
            raise RoomError(
                f"accept names {count} indices",
                cause=f"a request carries at most {MAX_INDICES}, of all components together",
                hint="describe pages of more tokens",
                code="room.items",
            )
    except RoomError as error:
        reason = error.reason
        raise RoomError.of(room.reason_for(reason.code, reason.what, reason.cause, reason.hint)) from None
    return checked, found


def _unknown(name: str, known: Mapping[str, Component]) -> RoomError:
    return RoomError(
        f"accept names component {shown(name)}",
        cause=f"this rank has {', '.join(known) or 'none'}",
        hint=did_you_mean(name, known) if isinstance(name, str) else "",
        code="room.items",
    )


def _lacking(component: Component) -> RoomError:
    return RoomError(
        f"accept lacks component {component.name!r}",
        cause=f"every request has its {component.kind.index.value}",
        hint=f"add items[{component.name!r}]",
        code="room.items",
    )
