"""The engine's handle of one room on decode."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from statelink.errors import ClosedError, RoomError
from statelink.link._room import Room
from statelink.link._status import Status
from statelink.plan import MAX_TOKENS, checked_int

from ._accepted import Accepted, check_items

if TYPE_CHECKING:
    from statelink.link._ready import Ready

    from ._receiving_state import ReceivingState

__all__ = ["Receiving"]


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
            context.post(lambda: state.accepted(accepted))

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
