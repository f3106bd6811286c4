"""Send and receive hooks per state type; a pair of them is a strategy.

A strategy decides *how* the planned bytes of one component travel; it never decides which bytes. The core calls its
hooks on data threads, one room and component and peer at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from statelink.plan import Blocks, Move

    from ._interface import Transfer

__all__ = ["DIRECT", "Arrival", "HookContext", "ReceiveHook", "SendHook", "Strategy"]

MAX_PREPARED = 64 << 10
"""Most bytes that a receive hook may send along with a request, per component and writer."""


class Arrival(NamedTuple):
    """A chunk of one component that is visible in local memory.

    Attributes:
        number: Number of the push at its source, from 0.
        grains: ``[first, last)`` granules of the sequence.
        layers: ``[first, last)`` model layers, or ``None`` for all buffers.
    """

    number: int
    grains: tuple[int, int]
    layers: tuple[int, int] | None


class HookContext(Protocol):
    """What a hook may know of the room it serves, and how it reaches its counterpart."""

    @property
    def room(self) -> int:
        """The request."""

    @property
    def generation(self) -> int:
        """Which use of the room id it is."""

    @property
    def peer(self) -> str:
        """The other side's link name."""

    @property
    def component(self) -> str:
        """Name of the component."""

    def message(self, payload: bytes) -> None:
        """Send up to 64 KiB to the counterpart's ``message``. In order, not blocking, callable from any thread."""


class SendHook(ABC):
    """The prefill side of one component, for one room and one peer."""

    def open(self, context: HookContext, prepared: bytes) -> None:  # noqa: B027 - optional
        """The request arrived; ``prepared`` is what the receive hook's ``prepare`` returned for this writer."""

    @abstractmethod
    def chunk(self, context: HookContext, move: Move) -> Iterable[Blocks]:
        """The blocks that carry ``move``, in batches of bounded size. The core submits them.

        The counterpart's ``arrived`` is called after all of them are visible at the destination.
        """

    def message(self, context: HookContext, payload: bytes) -> None:
        """A message from the counterpart.

        Raises:
            NotImplementedError: This hook expects none; fails the room.
        """
        raise NotImplementedError(f"{type(self).__name__} expects no messages")

    def finish(self, context: HookContext) -> None:  # noqa: B027 - optional
        """Every chunk of the room was moved."""

    def abort(self, context: HookContext) -> None:  # noqa: B027 - optional
        """The room failed. Transfers already submitted are drained by the core."""


class ReceiveHook(ABC):
    """The decode side of one component, for one room and one writer."""

    @abstractmethod
    def prepare(self, context: HookContext) -> bytes:
        """Bytes that travel with the request to this writer; at most 64 KiB."""

    def arrived(self, context: HookContext, arrival: Arrival) -> Transfer | None:
        """A chunk is visible in local memory. What remains to be done with it is a transfer, or nothing.

        ``None`` says that the bytes are in place.
        """
        return None

    def message(self, context: HookContext, payload: bytes) -> None:
        """A message from the counterpart.

        Raises:
            NotImplementedError: This hook expects none; fails the room.
        """
        raise NotImplementedError(f"{type(self).__name__} expects no messages")

    def finish(self, context: HookContext) -> Transfer | None:
        """Everything arrived; success waits for what is returned. ``None`` says that nothing remains."""
        return None

    def abort(self, context: HookContext) -> Transfer | None:
        """The room failed; memory is given back only after what is returned has ended."""
        return None


class Strategy(ABC):
    """A pair of hooks under a name. Objects are shared by all rooms of a link; hooks are made per room."""

    name: str

    @abstractmethod
    def sender(self) -> SendHook:
        """A new send hook, or a shared one that keeps nothing per room."""

    @abstractmethod
    def receiver(self) -> ReceiveHook:
        """A new receive hook, or a shared one that keeps nothing per room."""

    def __repr__(self) -> str:
        return f"<strategy {self.name}>"

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Strategy) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


class _DirectSend(SendHook):
    def chunk(self, context: HookContext, move: Move) -> Iterable[Blocks]:
        return move.blocks()


class _DirectReceive(ReceiveHook):
    def prepare(self, context: HookContext) -> bytes:
        return b""


class _Direct(Strategy):
    """One-sided moves from where the bytes are to where they belong. Keeps nothing per room."""

    name = "direct"

    def __init__(self) -> None:
        self._send = _DirectSend()
        self._receive = _DirectReceive()

    def sender(self) -> SendHook:
        return self._send

    def receiver(self) -> ReceiveHook:
        return self._receive


DIRECT: Strategy = _Direct()
"""The core's one-sided strategy."""
