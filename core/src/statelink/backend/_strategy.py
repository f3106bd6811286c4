"""Send and receive hooks per state type; a pair of them is a strategy.

A strategy decides *how* the planned bytes of one component travel; it never decides which bytes. The core calls its
hooks on data threads, one call at a time for each hook that it made, except that a send hook's ``message`` may come at
the same time as another of its calls, and that ``sender``, ``receiver``, ``waits`` and a send hook's ``open`` are
called on the link's control thread, where nothing may block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from statelink.plan import Blocks, Move
    from statelink.state import Inventory, Region

    from ._interface import Transfer

__all__ = [
    "DIRECT",
    "Arrival",
    "HookContext",
    "ReceiveContext",
    "ReceiveHook",
    "SendContext",
    "SendHook",
    "Strategy",
]

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


class SendContext(HookContext, Protocol):
    """What a send hook may do besides."""

    def wake(self) -> None:
        """Let ``chunk`` go on, if it waits. Not blocking, callable from any thread."""


class ReceiveContext(HookContext, Protocol):
    """What a receive hook may do besides."""

    def expected(self) -> Move:
        """Everything that the writer owes of the component. Only its target side means anything here."""

    def lend(self, address: int, nbytes: int, then: Callable[[], None]) -> None:
        """Let the writer write to memory of the strategy's, until ``released``. Not blocking, from any thread.

        ``then`` is called on a data thread once that is so; never, if the room has ended.
        """


class SendHook(ABC):
    """The prefill side of one component, for one room and one peer."""

    def open(self, context: SendContext, prepared: bytes) -> None:  # noqa: B027 - optional
        """The request arrived; ``prepared`` is what the receive hook's ``prepare`` returned for this writer.

        Called on the control thread: it must not block.
        """

    @abstractmethod
    def chunk(self, context: SendContext, move: Move) -> Iterable[Blocks | None]:
        """The blocks that carry ``move``, in batches of bounded size. The core submits them.

        Where the receive hook is ``in_place``, they have the bytes of ``move``, each once. A strategy that hands over
        more bytes or fewer fails the room (``room.bytes``).

        The counterpart's ``arrived`` is called after all of them are visible at the destination.

        ``None`` says that there is nothing to submit for now. The core asks for the next batch once everything that it
        was given before is visible at the destination; if that is so already, once ``context.wake`` was called. No
        thread is held meanwhile. It may ask more often than that.
        """

    def message(self, context: SendContext, payload: bytes) -> None:
        """A message from the counterpart; it may come while ``chunk`` runs on another thread.

        Raises:
            NotImplementedError: This hook expects none; fails the room.
        """
        raise NotImplementedError(f"{type(self).__name__} expects no messages")

    def waits(self) -> str:
        """What it waits for, in words, for the error of a room that passes its deadline; empty for nothing.

        Called on the control thread, beside any other of its calls: it must not block.
        """
        return ""

    def finish(self, context: SendContext) -> None:  # noqa: B027 - optional
        """Every chunk of the room was moved."""

    def abort(self, context: SendContext) -> None:  # noqa: B027 - optional
        """The room failed. Transfers already submitted are drained by the core."""

    def released(self, context: SendContext) -> None:  # noqa: B027 - optional
        """The room failed, and none of its transfers to this peer reads local memory any more.

        Only now may memory of the strategy's that blocks named be used again; it may never come. Later than ``abort``.
        """


class ReceiveHook(ABC):
    """The decode side of one component, for one room and one writer."""

    in_place: bool = True
    """Whether the writer writes to the items of the request. Read after ``prepare``; if not, it is not allowed to.

    If it does, the core counts the bytes that the send hook hands over against the plan. If it does not, this hook
    checks that everything has come, and says in ``finish`` if something has not.
    """

    @abstractmethod
    def prepare(self, context: ReceiveContext) -> bytes:
        """Bytes that travel with the request to this writer; at most 64 KiB."""

    def arrived(self, context: ReceiveContext, arrival: Arrival) -> Transfer | None:
        """A chunk is visible in local memory. What remains to be done with it is a transfer, or nothing.

        ``None`` says that the bytes are in place.
        """
        return None

    def message(self, context: ReceiveContext, payload: bytes) -> None:
        """A message from the counterpart.

        Raises:
            NotImplementedError: This hook expects none; fails the room.
        """
        raise NotImplementedError(f"{type(self).__name__} expects no messages")

    def waits(self) -> str:
        """See `SendHook.waits`."""
        return ""

    def finish(self, context: ReceiveContext) -> Transfer | None:
        """Everything arrived; success waits for what is returned. ``None`` says that nothing remains."""
        return None

    def abort(self, context: ReceiveContext) -> Transfer | None:
        """The room failed; memory is given back only after what is returned has ended."""
        return None

    def released(self, context: ReceiveContext) -> None:  # noqa: B027 - optional
        """The room ended, every hook's work is done, and nothing of this writer can land any more.

        Only now may memory that was lent to it be used again; it may never come. Later than ``abort``.
        """


class Strategy(ABC):
    """A pair of hooks under a name. Objects are shared by all rooms of a link; hooks are made per room.

    One that brings memory of its own is an object for one link.
    """

    name: str

    def open(self, inventory: Inventory, components: Sequence[str]) -> Sequence[Region]:
        """The link opens: memory of the strategy's own, which is registered behind that of the inventory.

        Args:
            inventory: What the rank holds; the first region that is returned has the number ``len(inventory.regions)``.
            components: Those that it carries.
        """
        return ()

    def close(self) -> None:  # noqa: B027 - optional
        """The link has closed, or could not be opened after all.

        Memory that was lent and not released may still be written to: keep it.
        """

    def snapshot(self) -> Mapping[str, int]:
        """What it holds, in numbers, for `Link.snapshot`. Any thread; does not block."""
        return {}

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
    def chunk(self, context: SendContext, move: Move) -> Iterable[Blocks]:
        return move.blocks()


class _DirectReceive(ReceiveHook):
    def prepare(self, context: ReceiveContext) -> bytes:
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
