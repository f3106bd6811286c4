"""The engine's handle of one room on prefill. It checks and counts what is pushed, before anything is changed."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from statelink._arguments import shown, switch, words
from statelink.errors import ClosedError, RoomError
from statelink.hints import did_you_mean
from statelink.link._room import Room
from statelink.link._status import Status
from statelink.plan import MAX_TOKENS, Items, OffSpanError, Pages, check_pieces, checked_int, item_positions, pushed
from statelink.state import Coverage, IndexSpace

from ._push import Push

if TYPE_CHECKING:
    from statelink.link._ready import Ready
    from statelink.link._room_state import RoomState
    from statelink.state import Component

    from ._sending_state import SendingState

__all__ = ["PushBudget", "Sending"]

MAX_LAYERS = 1 << 31
"""No layer has a larger number, so this is the largest end of a range of layers."""


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
            push = pushes.check_push(items, whole_span, whole_layers, ready, last)
            if not self._budget.admit():
                most = context.config.max_pushes
                raise pushes.error(
                    f"room {state.room} is pushed faster than pushes are moved",
                    cause=f"{most} pushes wait or are under way on this link, as many as 'max_pushes' allows",
                    hint="push again later, or in larger pieces",
                    code="room.pushes",
                )
            pushes.count_push(push)
            state.memory.name()
            context.post_job(state.pushed, push)  # with the lock, so that pushes of two threads keep their order

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
        state.context.post_job(state.abort_unclaimed, said)

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


class PushChecks:
    """The pushes of one room so far. Belongs to the engine's threads; a lock of `Sending` admits one at a time.

    Args:
        room: The room.

    Attributes:
        complete: Whether the last push was made.
    """

    complete = False
    _count = 0
    _reach = 0

    def __init__(self, room: RoomState) -> None:
        self._room = room
        self._named: dict[str, list[tuple[int, Items]]] = {}
        """For each component, the pushes that named items of it, by their number."""
        self._unspanned = False
        """Whether the push that is checked names no span."""

    def check_span(
        self, span: tuple[int, int] | None, layers: tuple[int, int] | None
    ) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """The span and the layers that a push states.

        Raises:
            RoomError: They are not ranges of the request's positions and of layers.
        """
        if layers is None and type(span) is tuple and len(span) == 2:  # as most engines do
            a, b = span
            tokens = self._room.tokens
            if type(a) is int and type(b) is int and 0 <= a <= b <= (MAX_TOKENS if tokens is None else tokens):
                self._unspanned = False
                return span, None
        self._unspanned = span is None
        a, b = self._checked_span(span)
        layers = None if layers is None else self._pair("layers", layers, MAX_LAYERS)
        if layers is not None and layers[0] >= layers[1]:
            raise self.error(f"layers {layers} of a push", cause="[first, last) with first < last is expected")
        return (a, b), layers

    def check_push(
        self,
        items: Mapping[str, Any],
        span: tuple[int, int],
        layers: tuple[int, int] | None,
        ready: Ready | None,
        last: bool | None,
    ) -> Push:
        """The push that a call makes. Changes nothing; `count_push` follows if the push is admitted.

        Raises:
            RoomError: The items do not fit the span or the pools.
        """
        tokens = self._room.tokens  # read once: the control thread may learn N meanwhile
        if tokens is None and last is None:
            raise self.error(
                "a push does not say whether it is the last one",
                cause="prefill does not know the number of tokens yet",
                hint="name last=, or call send() with tokens",
            )
        try:
            final = (span[1] == tokens and layers is None) if last is None else switch(last, "'last'", error=RoomError)
        except RoomError as error:
            raise self.error(error.reason.what, error.reason.cause) from None
        checked = self._check_items(items, span, final, span[1] if tokens is None and final else tokens)
        if layers is not None:
            self._check_layered(checked, final)
        return Push(self._count, checked, span, layers, ready, final)

    @property
    def begun(self) -> bool:
        """Whether a push was made."""
        return self.complete or self._count > 0

    def count_push(self, push: Push) -> None:
        """Note a push that was checked and admitted."""
        self.complete = push.last
        if push.last:
            return  # no other push is compared with it
        self._count += 1
        self._reach = max(self._reach, push.span[1])
        for name, each in push.items.items():
            self._named.setdefault(name, []).append((push.number, each))

    def error(self, what: str, cause: str = "", hint: str = "", code: str = "room.push") -> RoomError:
        """An error that names the room."""
        return RoomError.of(self._room.reason_for(code, what, cause, hint))

    def _checked_span(self, span: tuple[int, int] | None) -> tuple[int, int]:
        tokens = self._room.tokens
        if span is None and tokens is None:
            raise self.error(
                "a push does not say which tokens it covers",
                cause="prefill does not know the number of tokens yet",
                hint="name span=, or call send() with tokens",
            )
        most = MAX_TOKENS if tokens is None else tokens
        a, b = (self._reach, most) if span is None else self._pair("span", span, most)
        if a > b:
            raise self.error(f"span [{a}, {b}) of a push", cause="it ends before it begins")
        return a, b

    def _pair(self, what: str, given: Any, high: int) -> tuple[int, int]:
        try:
            first, last = given
        except (TypeError, ValueError):
            raise self.error(f"{what} {shown(given)} of a push", cause="a pair [first, last) is expected") from None
        if type(first) is int and type(last) is int and 0 <= first <= high and 0 <= last <= high:
            return first, last
        try:
            start = checked_int(first, f"the start of the {what} of a push", 0, high)
            return start, checked_int(last, f"the end of the {what} of a push", 0, high)
        except RoomError as error:
            raise self.error(error.reason.what, error.reason.cause) from None

    def _check_items(
        self, items: Mapping[str, Any], span: tuple[int, int], final: bool, tokens: int | None
    ) -> dict[str, Items]:
        """Check the items of a push. ``tokens``: N, or where the last push ends; ``None`` if neither is known."""
        room = self._room
        known, prefix = room.context.inventory.by_name, room.prefix
        begin, stop = span
        reaches = stop == tokens
        end = MAX_TOKENS if tokens is None else tokens
        checked: dict[str, Items] = {}
        for name, given in items.items():
            component = known.get(name)
            if component is None:
                raise self.error(
                    f"a push names component {shown(name)}",
                    cause=f"this rank has {', '.join(known) or 'none'}",
                    hint=did_you_mean(name, known) if isinstance(name, str) else "",
                )
            if component.page:
                if tokens is None:
                    self._check_independent(component, given)
                step = component.page if component.partition.kind == "all" else item_positions(component)
                if begin % step or (stop % step and not reaches):
                    raise self.error(
                        f"span [{begin}, {stop}) splits a page of component {name!r}",
                        f"a page has {step} tokens",
                        self._no_span(span),
                    )
            elif not reaches or not final:
                self._check_final(component, span, reaches)
            try:
                checked[name] = pushed(component, end, prefix, span, given)
            except RoomError as error:
                hint = (isinstance(error, OffSpanError) and self._no_span(span)) or error.reason.hint
                raise self.error(error.reason.what, error.reason.cause, hint, error.code) from None
        if final:
            if len(checked) < len(known):
                self._check_complete(known.keys() - checked.keys() - self._named.keys())
            if self._named:
                self._check_pieces(checked, end)
        return checked

    def _no_span(self, span: tuple[int, int]) -> str:
        """A hint for a push that names no span; empty for another one."""
        if not self._unspanned:
            return ""
        begins = "where the last push ended" if self._reach else "at 0"
        return (
            f"the push names no span, so it begins {begins} and ends at {span[1]}: name span=(first, last) in a push "
            "of a part of the request, and in all pushes by layers"
        )

    def _check_final(self, component: Component, span: tuple[int, int], reaches: bool) -> None:
        """Refuse an item of the whole request in a push that is not the last one, or does not reach the end."""
        kind = component.kind
        if not reaches or kind.with_last:
            when = "the last push" if kind.with_last else "a push that reaches the end of the request"
            raise self.error(
                f"component {component.name!r} is pushed with span [{span[0]}, {span[1]})",
                cause=f"its {kind.index.value} is final only in {when}",
            )

    def _check_independent(self, component: Component, given: Any) -> None:
        """Refuse a list of items whose meaning depends on N, while N is not known."""
        at_once = component.kind.coverage in (Coverage.SUFFIX, Coverage.WHOLE) and not component.kind.complete
        if component.partition.kind != "contiguous" and (at_once or isinstance(given, Pages)):
            return
        raise self.error(
            f"which items of component {component.name!r} a push names is not known",
            cause="that depends on the number of tokens, which prefill does not know yet",
            hint="name them in the last push, or call send() with tokens",
        )

    def _check_pieces(self, last: Mapping[str, Items], tokens: int) -> None:
        """Refuse a page that stands for two positions in several pushes. `pushed` looks at each push alone.

        The pages of a push that has settled may hold other positions of the same request by now.
        """
        settled = self._room.settled
        for component in self._room.context.inventory.components:
            if not component.page:
                continue
            pieces = [piece for number, piece in self._named.get(component.name, ()) if number >= settled]
            if component.name in last:
                pieces.append(last[component.name])
            try:
                check_pieces(component, tokens, self._room.prefix, pieces)
            except RoomError as error:
                raise self.error(error.reason.what, error.reason.cause, error.reason.hint, error.code) from None

    def _check_layered(self, names: Iterable[str], final: bool) -> None:
        """Refuse a push of layers for a component without layers: it would move nothing of that component."""
        for name in names:
            if all(buffer.layer is None for buffer in self._room.context.inventory.component(name).buffers):
                raise self.error(
                    f"component {name!r} is pushed by layers",
                    cause="none of its buffers belongs to a layer",
                    hint="push it without layers" + (", as a last push of its own" if final else ""),
                )

    def _check_complete(self, missing: set[str]) -> None:
        for component in self._room.context.inventory.components:
            if component.name in missing and component.kind.index is not IndexSpace.PAGE:
                raise self.error(
                    f"the last push of a room lacks component {component.name!r}",
                    cause=f"every request has its {component.kind.index.value}",
                    hint=f"add items[{component.name!r}]",
                )


class PushBudget:
    """Counts the pushes of a link. Thread-safe.

    A push that waits for decode counts once. A push that is under way counts for each destination.

    Args:
        most: Most pushes that are admitted: the option ``max_pushes``.

    Attributes:
        pushes: How many are counted.
    """

    def __init__(self, most: int) -> None:
        self.pushes = 0
        self._most = most
        self._lock = threading.RLock()  # a signal handler or a `__del__` may push meanwhile

    def admit(self) -> bool:
        """Count a new push, and return true; false if so many are counted already. A thread of the engine."""
        with self._lock:
            if self.pushes >= self._most:
                return False
            self.pushes += 1
            return True

    def count(self, pushes: int) -> None:
        """Add ``pushes``, which may be negative. No limit applies here. Control thread."""
        with self._lock:
            self.pushes += pushes
