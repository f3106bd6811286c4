"""The engine's handle of one room on decode."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from statelink.errors import ClosedError, RoomError
from statelink.link._handle import Room
from statelink.link._status import Status
from statelink.plan import MAX_TOKENS, checked_int

from ._request import Accepted, check_items

if TYPE_CHECKING:
    from statelink.link._room import Ready

    from ._receiving import ReceivingState

__all__ = ["Receiving"]


class Receiving(Room):
    """One request on decode. `Link.receive` makes it. Every method returns at once, except `Room.wait`."""

    _state: ReceivingState

    def __init__(self, state: ReceivingState) -> None:
        super().__init__(state)
        self._prefix: int | None = None
        self._lock = threading.Lock()
        """Admits one thread of the engine to `accept` at a time."""

    @property
    def generation(self) -> int:
        """The number that this side drew for this use of the room id."""
        return self._state.generation

    @property
    def prefix(self) -> int | None:
        """P: positions that this side already holds; ``None`` before `accept`."""
        return self._prefix

    def accept(self, items: Mapping[str, Any], *, prefix: int = 0, ready: Ready | None = None) -> None:
        """Name the memory for the request's state. From this call until `quiesced`, that memory may be written.

        If `Link.receive` got no number of tokens, the pages say what it can be, and prefill says what it is. This is
        possible only where every component has the same pages for each of these numbers: a window has not. If a page
        has one token, they say the number itself.

        Thread-safe. A room can fail at any moment; accepting one that has does nothing, and its `reason` says why.

        Args:
            items: Component name to its indices (anything one-dimensional and integral; copied), or `Pages`. A
                component that covers positions has one index for each page that must arrive; every other component has
                exactly one. A component that covers positions, and of which nothing must arrive, may be left out.
            prefix: P: positions that this side already holds.
            ready: Guards the memory: nothing is written before ``ready.query()`` is true.

        Raises:
            RoomError: The items are not what must arrive, or not known without the number of tokens
                (``room.tokens``). The room stays as it was.
            ClosedError: It was accepted before.
        """
        state = self._state
        state.context.check_process()
        with self._lock:
            if state.status is Status.FAILED:
                return
            if self._prefix is not None:
                raise ClosedError(
                    "a room cannot be accepted", cause="it was accepted before", room=state.room, code="room.closed"
                )
            try:
                most = MAX_TOKENS if state.tokens is None else state.tokens
                prefix = checked_int(prefix, "the prefix of a room", 0, most, code="room.prefix")
            except RoomError as error:
                what, cause = error.reason.what, error.reason.cause
                raise RoomError.of(state.reason_for(error.code, what, cause)) from None
            self._check_given(items, ready, "room.items")
            checked, tokens = check_items(state, state.tokens, items, prefix)
            self._prefix = prefix
            state.name_memory()
        use = state.room, state.generation, state.attempt
        accepted = Accepted(*use, tokens.most, tokens.least, prefix, checked, ready)
        state.context.post(lambda: state.accepted(accepted))
