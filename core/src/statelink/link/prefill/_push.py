"""Checks what an engine passes to `Sending.push`, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from statelink._nearest import did_you_mean
from statelink.errors import RoomError
from statelink.plan import Items, check_pieces, checked_int, item_positions, pushed
from statelink.state import IndexSpace

if TYPE_CHECKING:
    from statelink.link._room import Ready, RoomState

__all__ = ["Push", "Pushes"]

MAX_LAYERS = 1 << 31


class Push(NamedTuple):
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


class Pushes:
    """The pushes of one room so far. Belongs to the engine's threads; a lock of `Sending` admits one at a time.

    Args:
        room: The room.

    Attributes:
        complete: Whether the last push was made.
    """

    def __init__(self, room: RoomState) -> None:
        self.complete = False
        self._room = room
        self._count = 0
        self._reach = 0
        self._named: dict[str, list[Items]] = {}

    def check_span(
        self, span: tuple[int, int] | None, layers: tuple[int, int] | None
    ) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """The span and the layers that a push states.

        Raises:
            RoomError: They are not ranges of the request's positions and of layers.
        """
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
        final = (span[1] == self._room.tokens and layers is None) if last is None else bool(last)
        checked = self._check(items, span, final)
        if layers is not None:
            self._check_layered(checked, final)
        return Push(self._count, checked, span, layers, ready, final)

    def add(self, push: Push) -> None:
        """Note a push that was checked and admitted."""
        self._count += 1
        self._reach = max(self._reach, push.span[1])
        self.complete = push.last
        for name, each in push.items.items():
            self._named.setdefault(name, []).append(each)

    def error(self, what: str, cause: str = "", hint: str = "", code: str = "room.push") -> RoomError:
        """An error that names the room."""
        return RoomError.of(self._room.reason_for(code, what, cause, hint))

    def _checked_span(self, span: tuple[int, int] | None) -> tuple[int, int]:
        a, b = (self._reach, self._room.tokens) if span is None else self._pair("span", span, self._room.tokens)
        if a > b:
            raise self.error(f"span [{a}, {b}) of a push", cause=f"the room has {self._room.tokens} tokens")
        return a, b

    def _pair(self, what: str, given: Any, high: int) -> tuple[int, int]:
        try:
            first, last = given
        except (TypeError, ValueError):
            raise self.error(f"{what} {given!r:.80} of a push", cause="a pair [first, last) is expected") from None
        try:
            return checked_int(first, f"{what} of a push begins", 0, high), checked_int(
                last, f"{what} of a push ends", 0, high
            )
        except RoomError as error:
            raise self.error(error.reason.what, error.reason.cause) from None

    def _check(self, items: Mapping[str, Any], span: tuple[int, int], final: bool) -> dict[str, Items]:
        inventory = self._room.context.inventory
        known = {component.name: component for component in inventory.components}
        checked: dict[str, Items] = {}
        for name, given in items.items():
            component = known.get(name)
            if component is None:
                raise self.error(
                    f"a push names component {name!r}",
                    cause=f"this rank has {', '.join(known) or 'none'}",
                    hint=did_you_mean(name, known),
                )
            kind = component.kind
            if kind.positional:
                step = item_positions(component)
                if span[0] % step or (span[1] % step and span[1] != self._room.tokens):
                    raise self.error(
                        f"span [{span[0]}, {span[1]}) splits a page of component {name!r}",
                        cause=f"a page has {step} tokens",
                    )
            elif span[1] != self._room.tokens or (kind.with_last and not final):
                when = "the last push" if kind.with_last else "a push that reaches the end of the request"
                raise self.error(
                    f"component {name!r} is pushed with span [{span[0]}, {span[1]})",
                    cause=f"its {kind.index.value} is final only in {when}",
                )
            try:
                checked[name] = pushed(component, self._room.tokens, self._room.prefix, span, given)
            except RoomError as error:
                raise self.error(error.reason.what, error.reason.cause, error.reason.hint, error.code) from None
        if final:
            self._check_complete(known.keys() - checked.keys() - self._named.keys())
            self._check_pieces(checked)
        return checked

    def _check_pieces(self, last: Mapping[str, Items]) -> None:
        """Refuse a page that stands for two positions, in one push or in several."""
        for component in self._room.context.inventory.components:
            if not component.kind.positional:
                continue
            pieces = [*self._named.get(component.name, ()), *([last[component.name]] if component.name in last else ())]
            try:
                check_pieces(component, self._room.tokens, self._room.prefix, pieces)
            except RoomError as error:
                raise self.error(error.reason.what, error.reason.cause, error.reason.hint, error.code) from None

    def _check_layered(self, names: Iterable[str], final: bool) -> None:
        """Refuse a push of layers for a component without layers: it would move nothing, and the engine meant more."""
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
