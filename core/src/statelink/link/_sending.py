"""Prefill's side of one room: pushes, and one delivery to each destination."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from statelink._nearest import did_you_mean
from statelink.backend import Side
from statelink.errors import ClosedError, Reason, RoomError
from statelink.plan import Due, Items, PairPlan, check_pieces, checked_int, due, item_positions, pushed
from statelink.state import IndexSpace

from ._room import Ready, Room
from ._standing import Party, missing_on_prefill
from ._status import ENDED, Status

if TYPE_CHECKING:
    import numpy.typing as npt

    from statelink.backend import Moved, SendHook, Transfer
    from statelink.wire import Request

    from ._delivery import Delivered
    from ._destinations import Destination
    from ._hook_room import SendRoom
    from ._node import Node
    from ._prefill import PrefillRole
    from ._to import To

__all__ = ["Delivery", "Push", "Sending"]

MAX_LAYERS = 1 << 31


class Push(NamedTuple):
    """One call of `Sending.push`.

    Attributes:
        number: From 0.
        items: Checked items per component.
        span: ``[a, b)`` positions that it covers.
        layers: ``[first, last)`` model layers, or ``None``.
        ready: What guards the memory.
        last: Whether nothing follows.
    """

    number: int
    items: Mapping[str, Items]
    span: tuple[int, int]
    layers: tuple[int, int] | None
    ready: Ready | None
    last: bool


@dataclass
class Delivery:
    """What one destination gets of one room. Its jobs run one after the other, so that only one thread changes it.

    Attributes:
        destination: The decode rank.
        request: What it asked for.
        plan: What this rank writes for it.
        targets: Destination items per component.
        hooks: Send hook per component.
        contexts: What each of them sees.
        line: Pushes that have not gone out; the first is under way. Belongs to the lane of the destination.
        under_way: What goes on with the first of them, once its strategy was woken; likewise.
        covered: Per component, which granules of which layer were moved: bool, one row a layer.
        dues: What is due, per component; kept once it was computed.
        moved: What was moved.
        digests: Sums of the digests of what was moved, per component, where both sides verify.
        cancelled: Set when the room failed.
        jobs: Jobs that were posted and have not reported back.
        pending: Transfers that a cancelled job left running.
        strays: Transfers that failed without being settled, as long as their backend may learn that they are.
        watched: Whether somebody asks the backend for that.
        unknown: Whether a batch was given to the backend of which nothing is known.
        unsettled: Per side, why it is not known that the bytes of a failed transfer have stopped.
        over: Whether the destination's process has ended: what is still read for it goes nowhere.
        finished: Whether its last word was sent.
        accepted: Whether the destination has everything.
        drained: Whether it was told that nothing is in flight.
        released: Whether the hooks were told that nothing reads this side's memory for it.
    """

    destination: Destination
    request: Request
    plan: PairPlan
    targets: dict[str, Items]
    hooks: dict[str, SendHook]
    contexts: dict[str, SendRoom] = field(default_factory=dict)
    line: deque[Push] = field(default_factory=deque)
    under_way: Generator[float | None, None, Delivered] | None = None
    covered: dict[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    dues: dict[str, Due] = field(default_factory=dict)
    moved: dict[str, Moved] = field(default_factory=dict)
    digests: dict[str, int] = field(default_factory=dict)
    cancelled: threading.Event = field(default_factory=threading.Event)
    jobs: int = 0
    pending: list[Transfer] = field(default_factory=list)
    strays: list[Transfer] = field(default_factory=list)
    watched: bool = False
    unknown: bool = False
    unsettled: dict[Side, str] = field(default_factory=dict)
    over: bool = False
    finished: bool = False
    accepted: bool = False
    drained: bool = False
    released: bool = False

    def owed(self, component: str) -> Due:
        """What of a component must move, all pushes together."""
        known = self.dues.get(component)
        if known is None:
            plan = self.plan.components[component]
            known = self.dues[component] = due(plan.source, plan.target, self.request.tokens, self.request.prefix)
        return known

    @property
    def moving(self) -> bool:
        """Whether transfers are under way that will end."""
        return bool(self.jobs or (self.pending and not self.over))

    @property
    def unread(self) -> bool:
        """Whether nothing reads this side's memory for it any more that the destination could get."""
        return not self.moving and (self.over or Side.SOURCE not in self.unsettled)

    @property
    def still(self) -> bool:
        """Whether nothing of it can land at the destination any more."""
        return not self.moving and (self.over or Side.TARGET not in self.unsettled)


class Sending(Room):
    """One request on prefill. Made by `Link.send`; every method returns at once, except `Room.wait`."""

    def __init__(
        self,
        node: Node,
        role: PrefillRole,
        room: int,
        tokens: int,
        deadline: float | None,
        attempt: int = 0,
        to: To | None = None,
    ) -> None:
        super().__init__(node, room, tokens, deadline, attempt)
        self._role = role
        self._to = to
        self._begun = False
        self._deliveries: dict[str, Delivery] = {}
        self._queue: deque[Push] = deque()
        self._pushes = 0
        self._reach = 0
        self._complete = False
        self._named: dict[str, list[Items]] = {}
        self._lock = threading.Lock()

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
        self._node.check_process()
        with self._lock:
            a, b = self._span(span)
            layers = None if layers is None else self._pair("layers", layers, MAX_LAYERS)
            final = (b == self._tokens and layers is None) if last is None else bool(last)
            if layers is not None and layers[0] >= layers[1]:
                raise self._error(f"layers {layers} of a push", cause="[first, last) with first < last is expected")
            if self._status is Status.FAILED:
                return
            if self._complete:
                raise ClosedError(
                    "a room takes no more pushes", cause="its last push was made", room=self._room, code="room.closed"
                )
            self._check_given(items, ready, "room.push")
            checked = self._check(items, (a, b), final)
            if layers is not None:
                self._check_layered(checked, final)
            if not self._node.hold_pushes(1):
                most = self._node.config.max_pushes
                raise self._error(
                    f"room {self._room} is pushed to faster than pushes go out",
                    cause=f"{most} pushes wait or are under way on this link, as many as 'max_pushes' allows",
                    hint="push again later, or in larger pieces",
                    code="room.pushes",
                )
            push = Push(self._pushes, checked, (a, b), layers, ready, final)
            self._pushes += 1
            self._reach = max(self._reach, b)
            self._complete = final
            for name, each in checked.items():
                self._named.setdefault(name, []).append(each)
            self._quiesced = False  # from here on the memory is named; worked out anew on the control thread
            self._quiet.clear()
        self._node.post(lambda: self._role.pushed(self, push))

    def _span(self, span: tuple[int, int] | None) -> tuple[int, int]:
        a, b = (self._reach, self._tokens) if span is None else self._pair("span", span, self._tokens)
        if a > b:
            raise self._error(f"span [{a}, {b}) of a push", cause=f"the room has {self._tokens} tokens")
        return a, b

    def _pair(self, what: str, given: Any, high: int) -> tuple[int, int]:
        try:
            first, last = given
        except (TypeError, ValueError):
            raise self._error(f"{what} {given!r:.80} of a push", cause="a pair [first, last) is expected") from None
        try:
            return checked_int(first, f"{what} of a push begins", 0, high), checked_int(
                last, f"{what} of a push ends", 0, high
            )
        except RoomError as error:
            raise self._error(error.reason.what, error.reason.cause) from None

    def _check(self, items: Mapping[str, Any], span: tuple[int, int], final: bool) -> dict[str, Items]:
        inventory = self._node.inventory
        known = {component.name: component for component in inventory.components}
        checked: dict[str, Items] = {}
        for name, given in items.items():
            component = known.get(name)
            if component is None:
                raise self._error(
                    f"a push names component {name!r}",
                    cause=f"this rank has {', '.join(known) or 'none'}",
                    hint=did_you_mean(name, known),
                )
            kind = component.kind
            if kind.positional:
                step = item_positions(component)
                if span[0] % step or (span[1] % step and span[1] != self._tokens):
                    raise self._error(
                        f"span [{span[0]}, {span[1]}) splits a page of component {name!r}",
                        cause=f"a page has {step} tokens",
                    )
            elif span[1] != self._tokens or (kind.with_last and not final):
                when = "the last push" if kind.with_last else "a push that reaches the end of the request"
                raise self._error(
                    f"component {name!r} is pushed with span [{span[0]}, {span[1]})",
                    cause=f"its {kind.index.value} is final only in {when}",
                )
            try:
                checked[name] = pushed(component, self._tokens, self._prefix, span, given)
            except RoomError as error:
                raise self._error(error.reason.what, error.reason.cause, error.reason.hint, error.code) from None
        if final:
            self._check_complete(known.keys() - checked.keys() - self._named.keys())
            self._check_pieces(checked)
        return checked

    def _check_pieces(self, last: Mapping[str, Items]) -> None:
        """No page stands for two positions, in whichever pushes they were."""
        for component in self._node.inventory.components:
            if not component.kind.positional:
                continue
            pieces = [*self._named.get(component.name, ()), *([last[component.name]] if component.name in last else ())]
            try:
                check_pieces(component, self._tokens, self._prefix, pieces)
            except RoomError as error:
                raise self._error(error.reason.what, error.reason.cause, error.reason.hint, error.code) from None

    def _check_layered(self, names: Iterable[str], final: bool) -> None:
        """A push of layers moves nothing of a component that has none: that is not what the engine meant."""
        for name in names:
            if all(buffer.layer is None for buffer in self._node.inventory.component(name).buffers):
                raise self._error(
                    f"component {name!r} is pushed by layers",
                    cause="none of its buffers belongs to a layer",
                    hint="push it without layers" + (", as a last push of its own" if final else ""),
                )

    def _check_complete(self, missing: set[str]) -> None:
        for component in self._node.inventory.components:
            if component.name in missing and component.kind.index is not IndexSpace.PAGE:
                raise self._error(
                    f"the last push of a room lacks component {component.name!r}",
                    cause=f"every request has its {component.kind.index.value}",
                    hint=f"add items[{component.name!r}]",
                )

    def _error(self, what: str, cause: str = "", hint: str = "", code: str = "room.push") -> RoomError:
        return RoomError.of(self._reason_for(code, what, cause, hint))

    def _parties(self) -> list[Party]:
        return [delivery.destination.party for delivery in list(self._deliveries.values())]

    def _transports(self) -> dict[str, str]:
        peers = [delivery.destination for delivery in list(self._deliveries.values())]
        return {peer.name: peer.carried(self._node) for peer in peers}

    def _missing(self) -> str:
        return missing_on_prefill(self)

    def _abort(self, why: str) -> None:
        self._role.fail(self, self._reason_for("room.aborted", "prefill aborted the request", why))

    def _broken(self, reason: Reason) -> None:
        self._role.fail(self, reason)

    def _settle(self) -> None:
        """Work out anew whether this side's memory is quiet."""
        deliveries = self._deliveries.values()
        ended = self._status in ENDED or (bool(deliveries) and all(each.finished for each in deliveries))
        self._set_quiesced(not self._pushes or (ended and all(each.unread for each in deliveries)))
        if self._status in ENDED:
            self._node.forget(self)

    def _held(self) -> tuple[int, str]:
        named = list(self._named.items())  # an engine's thread may be adding to it
        ids = {name: np.unique(np.concatenate([piece.ids for piece in pieces])) for name, pieces in named}
        nbytes = sum(self._bytes_of(name, len(each)) for name, each in ids.items())
        for delivery in list(self._deliveries.values()):
            if Side.SOURCE in delivery.unsettled:
                return nbytes, delivery.unsettled[Side.SOURCE]
        return nbytes, "transfers are in flight"
