"""What a prefill engine holds of one request."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from statelink.errors import ClosedError
from statelink.link._handle import Room
from statelink.link._status import Status

from ._push import Pushes

if TYPE_CHECKING:
    from statelink.link._room import Ready

    from ._sending import PushBudget, SendingState

__all__ = ["Sending"]


class Sending(Room):
    """One request on prefill. Made by `Link.send`; every method returns at once, except `Room.wait`."""

    _state: SendingState

    def __init__(self, state: SendingState, budget: PushBudget) -> None:
        super().__init__(state)
        self._budget = budget
        self._pushes = Pushes(state)
        self._lock = threading.Lock()
        """Lets one thread of the engine push at a time."""

    def push(
        self,
        items: Mapping[str, Any],
        *,
        span: tuple[int, int] | None = None,
        layers: tuple[int, int] | None = None,
        ready: Ready | None = None,
        last: bool | None = None,
    ) -> None:
        """Offer a piece of the request's state. May come before decode has asked; it is then kept.

        A room can fail at any moment; pushing to one that has does nothing, and its `reason` says why.

        By layers, during the forward pass of the last chunk, and then the metadata row::

            for layer in range(model.layers):
                sending.push(pages_or_slot(layer), span=(a, N), layers=(layer, layer + 1), ready=event)
            sending.push({"aux": [row]}, span=(a, N), last=True)

        The named memory must keep its bytes until `quiesced`. Thread-safe; pushes of one room go out in order.

        Args:
            items: Component name to its indices (anything one-dimensional and integral; copied), or `Pages`.
                A component that covers positions has one index for each page of the span; one that has a single
                item a request has that item, and belongs into pushes that reach the end.
            span: Token range ``[a, b)`` that the items cover; from where the last push ended to N when not given.
                It begins on a page, and ends on one or at N.
            layers: ``[first, last)`` model layers whose buffers are pushed; all buffers when not given.
            ready: Guards the memory: nothing is read before ``ready.query()`` is true.
            last: Whether this is the last push; when not given, it is if it reaches N and names no layers.

        Raises:
            RoomError: The items do not fit the span or the pools, or too much waits already (``room.pushes``);
                nothing was changed.
            ClosedError: The last push was already made.
        """
        state, pushes = self._state, self._pushes
        state.context.check_process()
        with self._lock:
            whole_span, whole_layers = pushes.check_span(span, layers)
            if state.status is Status.FAILED:
                return
            if pushes.complete:
                raise ClosedError(
                    "a room takes no more pushes", cause="its last push was made", room=state.room, code="room.closed"
                )
            self._check_given(items, ready, "room.push")
            push = pushes.check(items, whole_span, whole_layers, ready, last)
            if not self._budget.admit_push():
                most = state.context.config.max_pushes
                raise pushes.error(
                    f"room {state.room} is pushed to faster than pushes go out",
                    cause=f"{most} pushes wait or are under way on this link, as many as 'max_pushes' allows",
                    hint="push again later, or in larger pieces",
                    code="room.pushes",
                )
            pushes.add(push)
            state.name_memory()
        state.context.post(lambda: state.pushed(push))
