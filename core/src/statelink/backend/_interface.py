"""The one class that a backend plugin implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from ._capabilities import Side

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from statelink.plan import Blocks
    from statelink.state import Region

    from ._capabilities import Capabilities, Check, Op, Probe
    from ._strategy import Strategy

__all__ = [
    "API_VERSION",
    "UNKNOWN",
    "Backend",
    "BackendContext",
    "Batch",
    "Diagnosing",
    "Fencing",
    "Outcome",
    "Transfer",
    "Transports",
]

API_VERSION = 1
"""The plugin API that this core speaks. A plugin states the number it was written for, and never imports this one."""

UNKNOWN = "unknown"
"""The transport of a peer, where nobody can tell it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendContext:
    """What a backend is constructed with. Fields may be added; a backend reads the ones it needs.

    Attributes:
        options: An instance of the backend's ``Options``.
        link: Name of this link, unique among all processes that were ever started; it is what peers call us.
        host: Address at which peers can reach this process, as an IP literal.
        loopback: Whether peers are all on this machine.
        role: ``prefill`` or ``decode``, for a library whose two sides start differently; empty where nobody said.
        require: Transports, one of which the engine requires; empty for any. A backend that has to find its transport
            out does so in ``connect`` then: see `Transports`.
    """

    options: Any
    link: str
    host: str = "127.0.0.1"
    loopback: bool = True
    role: str = ""
    require: frozenset[str] = frozenset()


class Outcome(NamedTuple):
    """How a transfer ended.

    Attributes:
        ok: Whether all of its bytes are visible to a reader at the destination.
        reason: If not: why, in the library's own words where it has any.
        settled: Where it is certain that its bytes have stopped: on both sides (``True``), on neither, or on one only.
            On the source's: no more of its memory is read. On the target's: nothing more lands. A success is settled.
    """

    ok: bool
    reason: str = ""
    settled: bool | Side = True

    @property
    def unsettled(self) -> frozenset[Side]:
        """The sides on which bytes may still be on the move."""
        return frozenset(side for side in Side if self.settled is not True and self.settled is not side)


class Transfer:
    """One submitted batch. A backend may subclass it to keep its handles.

    The backend that made it sets ``outcome`` once, from whatever thread; the core reads it. A backend keeps whatever
    the library needs (handles, arrays) alive until then. A failure that was not settled may be so later: see `settle`.
    """

    __slots__ = ("outcome",)

    def __init__(self, outcome: Outcome | None = None) -> None:
        self.outcome = outcome

    def succeed(self) -> None:
        """All bytes are visible at the destination."""
        self.outcome = Outcome(True)

    def fail(self, reason: str, *, settled: bool | Side) -> None:
        """The batch failed; ``settled`` says where its bytes have certainly stopped, as in `Outcome`.

        Often the two sides differ: a socket that is closed reads no memory any more, and what it took before still
        lands. Each side's memory is given back on its own word, so claim what is certain, and nothing else.
        """
        self.outcome = Outcome(False, reason, settled)

    def settle(self) -> None:
        """It failed without being settled, and by now it is known that its bytes have stopped on both sides.

        The core passes such transfers to ``poll`` for as long as they keep memory in quarantine.
        """
        if self.outcome is not None and not self.outcome.ok:
            self.outcome = self.outcome._replace(settled=True)


class Batch(NamedTuple):
    """What ``submit`` gets.

    Attributes:
        op: WRITE or READ.
        blocks: At least one block. The arrays are not changed by the core afterwards.
        room: The request that the bytes belong to.
        generation: Which use of the room id it is.
    """

    op: Op
    blocks: Blocks
    room: int
    generation: int


class Backend(ABC):
    """Moves bytes between registered memory of two processes.

    Required of every backend
        the class attributes, ``__init__`` and the abstract methods.

    Required if ``capabilities.fences`` says `Fence.OWNER` for the target of a WRITE
        the two methods of `Fencing`.

    Threads: ``poll`` and, for ``SubmitMode.ASYNC``, ``submit`` must return promptly. Every other method may block for
    as long as its library needs and runs on a data thread of the core. Calls are serialised unless
    ``capabilities.thread_safe``; even then, the core never runs two calls for one *peer* at once, except ``poll``,
    ``grant`` and ``revoke``. Expect a ``disconnect`` while a ``submit`` to that peer is under way, though: the
    conformance kit makes one, and what the transfer then says of its bytes has to hold.

    Failure: raise `statelink.errors.TransferError` (or fail the `Transfer`) with the library's reason. Any other
    exception fails the room as well, and is reported as a defect of the backend; raised by ``submit``, it leaves
    unknown what became of the batch, and its memory stays in quarantine. Nothing is ever skipped silently.

    Attributes:
        api_version: The literal plugin API number that the author wrote against.
        name: Entry-point name, and the value in an engine's config.
        Options: A ``msgspec.Struct`` of typed options, all with defaults.
        capabilities: What it declares.
        strategies: State type to the strategy that carries it; the key ``"*"`` stands for every other type.
    """

    api_version: ClassVar[int]
    name: ClassVar[str]
    Options: ClassVar[type]
    capabilities: ClassVar[Capabilities]
    strategies: ClassVar[Mapping[str, Strategy]]

    @abstractmethod
    def __init__(self, context: BackendContext) -> None:
        """Open the library: devices, threads, listening ports. Called once, when a link opens; may block.

        Raises:
            BackendUnavailableError: The library cannot start here.
        """

    @classmethod
    @abstractmethod
    def probe(cls, options: Any) -> Probe:
        """Say whether it can run here, and if not, why and what to do.

        Called before construction and by diagnostics. May import the library; never raises, never ends the process.
        """

    @abstractmethod
    def register(self, regions: Sequence[Region]) -> None:
        """Make memory known to the library. Called once, before ``descriptor``.

        Args:
            regions: This rank's region table; `Blocks` refer to it by index. Regions do not overlap. The memory
                belongs to the engine and outlives the backend.

        Raises:
            TransferError: A region cannot be registered; names it.
        """

    @abstractmethod
    def descriptor(self) -> bytes:
        """What a peer needs to reach this backend and its registered memory; at most 16 MiB. Opaque to the core."""

    @abstractmethod
    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        """Prepare to move bytes to or from ``peer``. Called on both sides, in no particular order.

        Args:
            peer: The peer's link name.
            descriptor: What its ``descriptor`` returned; may be garbage, and must then be refused.
            regions: Its region table.

        Raises:
            TransferError: The descriptor is not one of ours, or the peer cannot be reached.
        """

    @abstractmethod
    def submit(self, peer: str, batch: Batch) -> Transfer:
        """Start moving a batch.

        All blocks are inside regions of both sides (the core has checked); a backend whose library checks less than
        that checks again. A batch of a WRITE is visible at the destination before its transfer is reported done.

        Raises:
            TransferError: It could not be started, and certainly nothing was or will be moved.
        """

    @abstractmethod
    def poll(self, transfers: Sequence[Transfer]) -> None:
        """Progress the library and set the outcome of those ``transfers`` that ended. Never blocks.

        Among them may be some that failed without being settled: `Transfer.settle` those that are by now, if there is a
        way to know.
        """

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Forget a peer and free what it held; transfers to it that have not ended fail. Unknown peers are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Release everything, threads included. May be called twice."""


@runtime_checkable
class Fencing(Protocol):
    """What a backend has whose memory's owner can stop inbound bytes alone."""

    def grant(
        self,
        peer: str,
        room: int,
        generation: int,
        addresses: npt.NDArray[np.uint64],
        nbytes: npt.NDArray[np.uint64],
    ) -> None:
        """Allow ``peer`` to write these local ranges (uint64, sorted by address, disjoint) for one use of a room.

        Called before the peer learns of the ranges; several calls for one use of a room add up. Everything that is not
        granted is refused to that peer.
        """

    def revoke(self, peer: str, room: int, generation: int) -> Transfer:
        """Take all that was granted for one use of a room back, however many calls granted it.

        The transfer is done when nothing inbound can land under it any more. A grant that is unknown counts as revoked.
        """


@runtime_checkable
class Transports(Protocol):
    """What a backend has that can tell which transport carries its bytes.

    A transport is a word: ``rdma``, ``tcp``, ``shm``, or the backend's own. Whoever requires one is refused where the
    word is another, or `UNKNOWN`; so say what is certain, and `UNKNOWN` otherwise.
    """

    @classmethod
    def transports(cls, options: Any) -> frozenset[str]:
        """The words that `transport` could say on this machine with these options; empty if that cannot be told.

        Called after a successful ``probe``. Opens nothing, and never raises.
        """

    def transport(self, peer: str) -> str:
        """The word for what carries the bytes that this side moves to or from ``peer``, as far as it is known by now.

        It may change with a new connection. Words joined by ``+`` mean that several do, and each of them must be
        allowed. Never blocks; called from any thread, at any time after ``connect``.
        """


@runtime_checkable
class Diagnosing(Protocol):
    """What a backend has that can say more of this machine than its ``probe``, for ``statelink doctor``."""

    @classmethod
    def diagnose(cls, options: Any) -> Sequence[Check]:
        """Look at packages, libraries and devices, one line each. Called before ``probe``; may block; never raises."""


@runtime_checkable
class MemoryKinds(Protocol):
    """What a backend has whose options decide which of the declared kinds of memory it can register."""

    @classmethod
    def memory_kinds(cls, options: Any) -> frozenset[str]:
        """Those of ``capabilities.memory_kinds`` that it registers with these options.

        An engine that holds another kind is refused when it opens, and ``auto`` then takes another backend. Called
        before ``probe``. Opens nothing, and never raises.
        """


def cannot_register(backend: type[Backend], options: Any, kind: str) -> str:
    """Why a backend cannot register memory of a kind with certain options, as a clause; empty where it can."""
    name = kind.partition(":")[0]
    declared = backend.capabilities.memory_kinds
    if name not in declared:
        return f"it declares {', '.join(sorted(declared))}"
    if not issubclass(backend, MemoryKinds) or name in (taken := backend.memory_kinds(options)):
        return ""
    return f"with these options it registers {', '.join(sorted(taken)) or 'none'}"
