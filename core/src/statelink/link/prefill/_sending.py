"""The engine's handle of one room on prefill."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from statelink._arguments import words
from statelink.errors import ClosedError
from statelink.link._room import Room
from statelink.link._status import Status

from ._push import PushChecks

if TYPE_CHECKING:
    from statelink.link._ready import Ready

    from ._push import PushBudget
    from ._sending_state import SendingState

__all__ = ["Sending"]


class Sending(Room):
    """One request on prefill. `Link.send` makes it. Every method returns at once, except `Room.wait`."""

    _state: SendingState

    def __init__(self, state: SendingState, budget: PushBudget) -> None:
        self._state = state
        self._budget = budget
        self._checks = PushChecks(state)
        self._lock = threading.RLock()  # a signal handler or a `__del__` may call the link meanwhile
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
        """Push a part of the request's state. If decode has not asked for the room yet, the push is kept until then.

        A room can fail at any moment; pushing to one that has does nothing, and its `reason` says why.

        By layers, during the forward pass of the last chunk, and then the metadata row::

            for layer in range(model.layers):
                sending.push(pages_or_slot(layer), span=(a, N), layers=(layer, layer + 1), ready=event)
            sending.push({"aux": [row]}, span=(a, N), last=True)

        The named memory must keep its bytes until `settled` counts this push, or until `quiesced`. Thread-safe; pushes
        of one room go out in order.

        Args:
            items: Component name to its indices (anything one-dimensional and integral; copied), or `Pages`.
                A bare list has one index for each page that holds positions which are both in the span and needed: all
                positions for ``kv``, the last W before N for a window of W. If decode's prefix is known, a list without
                the pages before it will do, too. `Pages` may name any pages inside the span. A component with a single
                item for each request has that item, in pushes that reach the end.
            span: Token range ``[a, b)`` that the items cover; when not given, from the furthest end of the pushes so
                far to N. It begins at the start of a page, and ends at the end of a page or at N. It has the positions
                of all lists. A list of fewer positions, such as the last pages beside a window that begins before them,
                is given as `Pages`.
            layers: ``[first, last)`` model layers whose buffers are pushed; all buffers when not given.
            ready: Guards the memory: nothing is read before ``ready.query()`` is true.
            last: Whether this is the last push. When not given, a push that reaches N and names no layers is the last.

        Raises:
            RoomError: The items do not fit the span or the pools, or too many pushes wait (``room.pushes``). Nothing
                was changed.
            ClosedError: The last push was already made.
        """
        state, pushes = self._state, self._checks
        context = state.context
        if context.forked:
            context.check_process()
        # Everything up to the post runs on the engine's thread, so that errors are raised to the caller.
        with self._lock:
            whole_span, whole_layers = pushes.check_span(span, layers)
            if state.status is Status.FAILED:
                return
            if pushes.complete:
                raise ClosedError(
                    "a room takes no more pushes", cause="its last push was made", room=state.room, code="room.closed"
                )
            if type(items) is not dict or ready is not None:
                self._check_given(items, ready, "room.push")
            push = pushes.check(items, whole_span, whole_layers, ready, last)
            if not self._budget.admit():
                most = context.config.max_pushes
                raise pushes.error(
                    f"room {state.room} is pushed faster than pushes are moved",
                    cause=f"{most} pushes wait or are under way on this link, as many as 'max_pushes' allows",
                    hint="push again later, or in larger pieces",
                    code="room.pushes",
                )
            pushes.add(push)
            state.memory.name()
            context.post(partial(state.pushed, push))  # with the lock, so that pushes of two threads keep their order

    @property
    def settled(self) -> int:
        """How many pushes are settled, counted from the first: every destination has them, and nothing reads them.

        The memory that these pushes named may be used again, unless another push named it, too. So an engine that
        pushes a request in chunks need not hold all of it until `quiesced`. The count never goes back.

        It counts the pushes that the room took. A push to a room that has failed names no memory, and is not counted.
        Once a room has failed, its pushes settle together, when nothing reads any of them: some may not have arrived.
        So look at the status first: of a room that has ended, `quiesced` is the whole answer. `taken_back` memory is
        not counted before there is proof.
        """
        return self._state.settled

    @property
    def claimed(self) -> bool:
        """Whether a decode rank that is not lost has said a word of the room: it asked for it, or asked to keep it."""
        return self._state.claimed

    def abort_unclaimed(self, why: str) -> None:
        """Give the room up, unless it is `claimed`. Does not block; does nothing once the room has ended.

        For an engine that needs the memory of requests which may have been lost on their way to decode. A decode that
        comes after all is told so (``room.unclaimed``).

        Args:
            why: The cause, for the reason on both sides.
        """
        state = self._state
        state.context.check_process()
        said = words(why)
        state.context.post(lambda: state.abort_unclaimed(said))

    def poll_all(self) -> Status:
        """The least status that the room has on any rank of this prefill instance. Does not block.

        For engines whose ranks have to agree before they go on, such as pipeline stages: a rank that has not opened the
        room, or has not answered yet, counts as BOOTSTRAPPING. The first call asks the other ranks; they then tell of
        every change. A rank that is alone asks nobody. The room's own `status` stays that of this rank.

        All ranks have to use the same id for the request, and an id that none of them used before: the end of an
        earlier use may stand for one that another rank has not opened yet.

        Raises:
            ConfigError: The addresses of the other ranks are not known: see `Link.siblings`.
            ClosedError: This is a forked child.
        """
        self._state.context.check_process()
        return self._state.everywhere()
