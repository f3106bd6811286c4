"""The engine's handle of one room on decode. It checks the memory that the engine accepts."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from statelink._arguments import shown
from statelink.errors import ClosedError, RoomError
from statelink.hints import did_you_mean
from statelink.link._ready import Ready
from statelink.link._room import Room
from statelink.link._status import Status
from statelink.plan import MAX_TOKENS, Items, Tokens, checked_int, required, tokens_of
from statelink.wire import MAX_INDICES

if TYPE_CHECKING:
    from statelink.link._room_state import RoomState
    from statelink.state import Component

    from ._receiving_state import ReceivingState

__all__ = ["Accepted", "Receiving", "check_items"]


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


class Receiving(Room):
    """One request on decode. `Link.receive` makes it. Every method returns at once, except `Room.wait`."""

    _state: ReceivingState
    _prefix: int | None = None

    def __init__(self, state: ReceivingState) -> None:
        self._state = state
        self._lock = threading.RLock()  # a signal handler or a `__del__` may call the link meanwhile
        """Admits one thread of the engine to `accept` at a time."""

    @property
    def prefix(self) -> int | None:
        """P: positions that this side already holds; ``None`` before `accept`."""
        return self._prefix

    def accept(self, items: Mapping[str, Any], *, prefix: int = 0, ready: Ready | None = None) -> None:
        """Name the memory for the request's state. From this call until `quiesced`, that memory may be written.

        If `Link.receive` got no number of tokens, the number of pages says which numbers are possible, and prefill says
        which of them it is. Every component must then need the same pages for each possible number. A window does not.
        If a page has one token, the number of pages is the number of tokens.

        Two live rooms that name the same memory are not refused. The engine has to give each item to one room only,
        until that room has quiesced.

        Thread-safe. A room can fail at any moment; accepting one that has does nothing, and its `reason` says why.

        Args:
            items: Component name to its indices (anything one-dimensional and integral; copied), or `Pages`. A
                component that covers positions has one index for each page that must arrive; every other component has
                exactly one. A component that covers positions may be left out if nothing of it must arrive.
            prefix: P: positions that this side already holds.
            ready: Guards the memory: nothing is written before ``ready.query()`` is true.

        Raises:
            RoomError: The items are not what must arrive, or not known without the number of tokens
                (``room.tokens``). The room stays as it was.
            ClosedError: It was accepted before.
        """
        state = self._state
        context = state.context
        if context.forked:
            context.check_process()
        accepted = self._check_accept(items, prefix, ready)
        if accepted is not None:
            context.post_job(state.accepted, accepted)

    def _check_accept(self, items: Mapping[str, Any], prefix: int, ready: Ready | None) -> Accepted | None:
        """Check what an engine accepts, and note that it names memory. Returns what the control thread is told of it.

        ``None`` if the room has failed.

        Raises:
            RoomError: As `accept`.
            ClosedError: As `accept`.
        """
        state = self._state
        with self._lock:
            if state.status is Status.FAILED:
                return None
            if self._prefix is not None:
                raise ClosedError(
                    "a room cannot be accepted", cause="it was accepted before", room=state.room, code="room.closed"
                )
            if type(prefix) is not int or not 0 <= prefix <= (MAX_TOKENS if state.tokens is None else state.tokens):
                prefix = self._checked_prefix(prefix)
            if type(items) is not dict or ready is not None:
                self._check_given(items, ready, "room.items")
            checked, tokens = check_items(state, state.tokens, items, prefix)
            self._prefix = prefix
            state.memory.name()
        return Accepted(
            state.room,
            state.generation,
            tokens.most,
            tokens.least,
            prefix,
            checked,
            ready,
            state.content,
        )

    def _checked_prefix(self, prefix: Any) -> int:
        state = self._state
        most = MAX_TOKENS if state.tokens is None else state.tokens
        try:
            return checked_int(prefix, "the prefix of a room", 0, most, code="room.prefix")
        except RoomError as error:
            raise RoomError.of(state.reason_for(error.code, error.reason.what, error.reason.cause)) from None
