"""Strategies: how the planned bytes of a component travel. A strategy is a pair of send hook and receive hook.

A strategy decides *how* the planned bytes travel, never *which* bytes.

Threads: the core calls hooks on data threads, and makes one call at a time to each hook. There are two exceptions. A
send hook's ``message`` may run at the same time as another of its calls. ``sender``, ``receiver``, ``waits`` and a send
hook's ``open`` run on the link's control thread, where nothing may block.
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
"""Most bytes that a receive hook may add to a request, for each component and writer."""


class Arrival(NamedTuple):
    """A chunk of one component that is visible in local memory.

    Attributes:
        number: Number of the push at its source, from 0.
        granules: ``[first, last)`` granules of the sequence.
        layers: ``[first, last)`` model layers, or ``None`` for all buffers.
    """

    number: int
    granules: tuple[int, int]
    layers: tuple[int, int] | None


class HookContext(Protocol):
    """What a hook may know about its room, and how it reaches its counterpart."""

    @property
    def room(self) -> int:
        """The request."""

    @property
    def generation(self) -> int:
        """Which use of the room id this is."""

    @property
    def peer(self) -> str:
        """The other side's link name."""

    @property
    def component(self) -> str:
        """Name of the component."""

    def message(self, payload: bytes) -> None:
        """Send up to 64 KiB to the counterpart's ``message``.

        Keeps the order, never blocks, callable from any thread.
        """


class SendContext(HookContext, Protocol):
    """What else a send hook may do."""

    def wake(self) -> None:
        """Let ``blocks`` continue if it waits. Never blocks, callable from any thread."""


class ReceiveContext(HookContext, Protocol):
    """What else a receive hook may do."""

    def expected(self) -> Move:
        """Everything of the component that the writer has to write. Only the target side of the move is meaningful.

        While decode's engine knows only the number of pages, this is the most that these pages can hold. In ``finish``
        it is exact.
        """

    def grant(self, address: int, nbytes: int, then: Callable[[], None]) -> None:
        """Grant the writer some of the strategy's own memory, until ``released``.

        Never blocks, callable from any thread.

        ``then`` is called on a data thread once the writer may write there. It is not called if the room has ended.
        """


class SendHook(ABC):
    """The prefill side of one component, for one room and one peer."""

    prompt: bool = False
    """Whether no method of it ever blocks, or computes for longer than it takes to list the blocks of a move. The core
    may then call all of them on the thread that must not block, which saves a small request a change of threads."""

    plain: bool = False
    """Whether ``blocks`` yields ``move.blocks()``, and all other methods are those of this class. The core may then
    list the same blocks itself, and leave out the calls to the hook."""

    def open(self, context: SendContext, prepared: bytes) -> None:  # noqa: B027 - optional
        """The request has arrived. ``prepared`` is what the receive hook's ``prepare`` returned for this writer.

        Called on the control thread: it must not block.
        """

    @abstractmethod
    def blocks(self, context: SendContext, move: Move) -> Iterable[Blocks | None]:
        """Yield the blocks that carry ``move``, in batches of bounded size. The core submits them.

        If the receive hook is ``in_place``, the blocks have each byte of ``move`` once. More or fewer bytes fail the
        room (``room.bytes``). The counterpart's ``arrived`` is called when all blocks are visible at the destination.

        ``None`` means that there is nothing to submit yet. The core asks again when all earlier blocks are visible at
        the destination, or, if they are already, when ``context.wake`` is called. It may ask more often. No thread is
        held in the meantime.
        """

    def message(self, context: SendContext, payload: bytes) -> None:
        """A message from the counterpart has come. ``blocks`` may run on another thread at the same time.

        Raises:
            NotImplementedError: This hook expects none; fails the room.
        """
        raise NotImplementedError(f"{type(self).__name__} expects no messages")

    def waits(self) -> str:
        """What the hook waits for, in words, for the error of a room that passes its deadline; empty for nothing.

        Called on the control thread, maybe during another call to this hook: it must not block.
        """
        return ""

    def finish(self, context: SendContext) -> None:  # noqa: B027 - optional
        """Every push of the room has been moved."""

    def abort(self, context: SendContext) -> None:  # noqa: B027 - optional
        """The room has failed. The core waits for transfers that are submitted."""

    def released(self, context: SendContext) -> None:  # noqa: B027 - optional
        """The room has failed, and none of its transfers to this peer reads local memory.

        From this call on, and not before, the strategy may use memory of its own again that blocks named. Called after
        ``abort``, or never.
        """


class ReceiveHook(ABC):  # noqa: B024 - a strategy overrides what it needs
    """The decode side of one component, for one room and one writer."""

    prompt: bool = False
    """As `SendHook.prompt`."""

    in_place: bool = True
    """Whether the writer writes to the items of the request. Read after ``prepare``. If not, it must not write there.

    If it does, the core compares the bytes that the send hook submits with the plan. If it does not, this hook checks
    that everything has come, and fails in ``finish`` if something is missing.
    """

    def prepare(self, context: ReceiveContext) -> bytes:
        """Return bytes that go to this writer with the request; at most 64 KiB."""
        return b""

    def arrived(self, context: ReceiveContext, arrival: Arrival) -> Transfer | None:
        """A chunk is visible in local memory. Return a transfer if something remains to be done with it.

        ``None`` means that the bytes are in place.
        """
        return None

    def message(self, context: ReceiveContext, payload: bytes) -> None:
        """A message from the counterpart has come.

        Raises:
            NotImplementedError: This hook expects none; fails the room.
        """
        raise NotImplementedError(f"{type(self).__name__} expects no messages")

    def waits(self) -> str:
        """See `SendHook.waits`."""
        return ""

    def finish(self, context: ReceiveContext) -> Transfer | None:
        """Everything has arrived. The room succeeds only after the returned transfer; ``None`` if nothing remains."""
        return None

    def abort(self, context: ReceiveContext) -> Transfer | None:
        """The room has failed. Its memory quiesces only after the returned transfer has ended."""
        return None

    def released(self, context: ReceiveContext) -> None:  # noqa: B027 - optional
        """The room has ended, every hook's work is done, and nothing from this writer can land.

        From this call on, and not before, memory that was granted to the writer may be used again. Called after
        ``abort``, or never.
        """


class Strategy(ABC):
    """A pair of hooks under a name. All rooms of a link share the object. Hooks are made for each room.

    A strategy with memory of its own serves one link only.
    """

    name: str

    def open(self, inventory: Inventory, components: Sequence[str]) -> Sequence[Region]:
        """The link opens. Return memory of the strategy's own. It is registered after the inventory's regions.

        Args:
            inventory: What the rank holds; the first region that is returned has the number ``len(inventory.regions)``.
            components: The components that it moves.
        """
        return ()

    def close(self) -> None:  # noqa: B027 - optional
        """The link has closed, or could not be opened.

        Memory that was granted, and for which ``released`` was not called, may still be written to: keep it.
        """

    def snapshot(self) -> Mapping[str, int]:
        """Numbers about this strategy, for `Link.snapshot`. Callable from any thread; never blocks."""
        return {}

    @abstractmethod
    def sender(self) -> SendHook:
        """A new send hook, or a shared one if it keeps no data of a room."""

    @abstractmethod
    def receiver(self) -> ReceiveHook:
        """A new receive hook, or a shared one if it keeps no data of a room."""

    def __repr__(self) -> str:
        return f"<strategy {self.name}>"

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Strategy) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


class _DirectSend(SendHook):
    prompt = True
    plain = True

    def blocks(self, context: SendContext, move: Move) -> Iterable[Blocks]:
        return move.blocks()


class _DirectReceive(ReceiveHook):
    prompt = True


class _Direct(Strategy):
    """Moves bytes directly from the source's items to the destination's. Keeps no data of a room."""

    name = "direct"

    def __init__(self) -> None:
        self._send = _DirectSend()
        self._receive = _DirectReceive()

    def sender(self) -> SendHook:
        return self._send

    def receiver(self) -> ReceiveHook:
        return self._receive


DIRECT: Strategy = _Direct()
"""The strategy that moves bytes directly."""
