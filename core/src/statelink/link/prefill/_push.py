"""Checks and counts what an engine passes to `Sending.push`, before anything is changed."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from statelink._arguments import shown, switch
from statelink.errors import RoomError
from statelink.hints import did_you_mean
from statelink.link._ready import Ready
from statelink.plan import MAX_TOKENS, Items, OffSpanError, Pages, check_pieces, checked_int, item_positions, pushed
from statelink.state import Coverage, IndexSpace

if TYPE_CHECKING:
    from statelink.link._room_state import RoomState
    from statelink.state import Component

__all__ = ["Push", "PushBudget", "PushChecks"]

MAX_LAYERS = 1 << 31
"""No layer has a larger number, so this is the largest end of a range of layers."""


class Push(msgspec.Struct, frozen=True):
    """One call of `Sending.push`.

    Attributes:
        number: Its number in the room, from 0.
        items: Checked items per component.
        span: ``[a, b)`` positions that it covers.
        layers: ``[first, last)`` model layers; ``None`` for all buffers.
        ready: The ready event that guards the memory, if there is one.
        last: Whether it is the last push of the room.
    """

    number: int
    items: Mapping[str, Items]
    span: tuple[int, int]
    layers: tuple[int, int] | None
    ready: Ready | None
    last: bool


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

    def check(
        self,
        items: Mapping[str, Any],
        span: tuple[int, int],
        layers: tuple[int, int] | None,
        ready: Ready | None,
        last: bool | None,
    ) -> Push:
        """The push that a call makes. Changes nothing; `add` follows if the push is admitted.

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
        checked = self._check(items, span, final, span[1] if tokens is None and final else tokens)
        if layers is not None:
            self._check_layered(checked, final)
        return Push(self._count, checked, span, layers, ready, final)

    @property
    def begun(self) -> bool:
        """Whether a push was made."""
        return self.complete or self._count > 0

    def add(self, push: Push) -> None:
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

    def _check(
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
