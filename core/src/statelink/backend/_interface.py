"""The class that a backend plugin implements, and the optional protocols beside it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from ._capabilities import Side

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from statelink.plan import Blocks
    from statelink.state import Region

    from ._capabilities import Capabilities, Check, Probe
    from ._strategy import Strategy

__all__ = [
    "API_VERSION",
    "MAX_DESCRIPTOR",
    "UNKNOWN",
    "Backend",
    "BackendContext",
    "Batch",
    "Diagnosing",
    "EventDriven",
    "EventLoop",
    "Fencing",
    "Landing",
    "Outcome",
    "Transfer",
    "Transports",
]

API_VERSION = 1
"""Version of the plugin API of this core. A plugin states its own version as a literal, and never imports this one."""

MAX_DESCRIPTOR = 8 << 20
"""Most bytes that `Backend.descriptor` may return."""

UNKNOWN = "unknown"
"""The transport of a peer if nobody can tell it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendContext:
    """What the core passes to a backend's constructor. Later versions may add fields.

    Attributes:
        options: An instance of the backend's ``Options``.
        link: Name of this link. No other process ever has the same name. Peers use it.
        host: IP address at which peers can reach this process.
        listen: IP address at which to listen for them; ``host`` if empty. It is another one where peers reach this
            process under an address that this machine does not have. ``0.0.0.0`` and ``::`` are every interface.
        loopback: Whether all peers are on this machine.
        role: ``prefill``, ``decode`` or ``both``, for a library whose sides start differently; empty where nobody said.
        require: The engine requires one of these transports; empty for any. If it is not empty, ``connect`` finds out
            which transport carries the bytes: see `Transports`.
    """

    options: Any
    link: str
    host: str = "127.0.0.1"
    loopback: bool = True
    role: str = ""
    require: frozenset[str] = frozenset()
    listen: str = ""


class Outcome(NamedTuple):
    """How a transfer ended.

    Attributes:
        ok: Whether a reader at the destination can see all of its bytes.
        reason: Why it failed, in the library's own words if it has any.
        settled: On which sides it is certain that the bytes have stopped: both (``True``), none (``False``), or one. At
            the source this means that no more memory is read; at the target, that nothing more lands. A success is
            settled on both.
    """

    ok: bool
    reason: str = ""
    settled: bool | Side = True

    @property
    def unsettled(self) -> frozenset[Side]:
        """The sides on which the transfer may still be in flight."""
        return frozenset(side for side in Side if self.settled is not True and self.settled is not side)


class Transfer:
    """One submitted batch. A backend may subclass it to keep its handles.

    The backend that made it sets ``outcome`` once, from any thread, and the core reads it. Until then, the backend
    keeps alive what the library needs, such as handles and arrays. A failure that was not settled may be settled later:
    see `settle`.
    """

    __slots__ = ("_outcome", "_then")

    def __init__(self, outcome: Outcome | None = None) -> None:
        self._outcome = outcome
        self._then: Callable[[], object] | None = None

    @property
    def outcome(self) -> Outcome | None:
        """How it ended; ``None`` while it runs."""
        return self._outcome

    @outcome.setter
    def outcome(self, outcome: Outcome | None) -> None:
        self._outcome = outcome  # before `_then` is read: `notify` sets `_then` first, and reads the outcome after that
        then = self._then
        if then is not None and outcome is not None:
            self._then = None
            then()

    def notify(self, then: Callable[[], object]) -> None:
        """Call ``then`` once the outcome is set; at once if it is set already. For the core; any thread.

        Args:
            then: Must not block. Called on the thread that sets the outcome; twice if this method runs meanwhile.
        """
        self._then = then
        if self._outcome is not None:
            then()

    def succeed(self) -> None:
        """Report that all bytes are visible at the destination."""
        self.outcome = Outcome(True)

    def fail(self, reason: str, *, settled: bool | Side) -> None:
        """Report that the batch failed. ``settled`` says where its bytes have certainly stopped, as in `Outcome`.

        The two sides often differ. A closed socket, for example, reads no more memory, but what it has read may still
        land. The core gives each side's memory back when that side is settled, so claim only what is certain.
        """
        self.outcome = Outcome(False, reason, settled)

    def settle(self) -> None:
        """Report that the bytes of a transfer that failed before have certainly stopped on both sides.

        The core passes failed transfers that are not settled to ``poll`` while they keep memory in quarantine.
        """
        if self.outcome is not None and not self.outcome.ok:
            self.outcome = self.outcome._replace(settled=True)


class Batch(NamedTuple):
    """What ``submit`` gets.

    Attributes:
        blocks: At least one block. The core does not change the arrays afterwards.
        room: The request that the bytes belong to; 0 for several, if the backend declares ``joins_rooms``.
        generation: Which use of the room id it is; 0 for several.
        checked: ``RegionTable.key`` of this process's table and of the peer's, if every block was checked against them.
            A backend checks the blocks against its own tables, unless these are the same. `Ends.of` does so.
        piece: Whether it was cut off a larger batch. Batches that are whole are rather small, and may overtake it.
    """

    blocks: Blocks
    room: int
    generation: int
    checked: tuple[bytes, bytes] | None = None
    piece: bool = False


class Backend(ABC):
    """Moves bytes between registered memory of two processes.

    Required of every backend
        the class attributes, ``__init__`` and the abstract methods.

    Required if ``capabilities.target`` is `Fence.OWNER`
        the two methods of `Fencing`.

    Threads: ``poll`` and, for ``SubmitMode.ASYNC``, ``submit`` must return promptly. Every other method may block for
    as long as its library needs and runs on a data thread of the core. Calls are serialised unless
    ``capabilities.thread_safe``; even then, the core never runs two calls for one *peer* at once, except ``poll``,
    ``grant`` and ``revoke``. A call that still runs when a link's time-out to close has passed may overlap with
    ``close``. Of a backend that is thread-safe, the conformance kit also calls ``disconnect`` while a ``submit`` to
    that peer runs. What a transfer then says about its bytes must be true.

    Failure: raise `statelink.errors.TransferError` (or fail the `Transfer`) with the library's reason. Any other
    exception fails the room, too, and is reported as a defect of the backend. If ``submit`` raises another exception,
    the fate of the batch is unknown, and its memory stays in quarantine. A backend never skips anything silently.

    Attributes:
        api_version: The version of the plugin API for which the backend was written, as a literal.
        name: Entry-point name, and the value in an engine's config.
        Options: A ``msgspec.Struct`` of typed options, all with defaults.
        capabilities: What it declares.
        strategies: State type to the strategy that moves it. The key ``"*"`` stands for every other type.
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
        """Say whether the backend can run here, and if not, why and what to do.

        Called before construction, and by ``statelink doctor``. May import the library. Must not raise, and must not
        end the process.
        """

    @abstractmethod
    def register(self, regions: Sequence[Region]) -> None:
        """Register memory with the library. Called once, before ``descriptor``.

        Args:
            regions: This rank's region table; `Blocks` refer to it by index. `statelink.state.describe` makes regions
                of which no two overlap. Those of an inventory that is built by hand may overlap: serve all of them, or
                refuse the table. The memory belongs to the engine and outlives the backend.

        Raises:
            TransferError: A region cannot be registered. The error names it.
        """

    @abstractmethod
    def descriptor(self) -> bytes:
        """What a peer needs to reach this backend and its memory; at most `MAX_DESCRIPTOR` bytes.

        The core does not look into it. Called again, it returns the same bytes.
        """

    @abstractmethod
    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        """Prepare to move bytes to or from ``peer``. Called on both sides, in no particular order.

        The side that moves bytes may be called long before the other, while the first messages travel, so that this
        takes no time later. It may also be disconnected again without a call on the other side. If it raises, it is
        called once more when the other side wants bytes.

        Args:
            peer: The peer's link name.
            descriptor: What its ``descriptor`` returned. It may be garbage, and must then be refused.
            regions: Its region table.

        Raises:
            TransferError: The descriptor is not one of ours, or the peer cannot be reached.
        """

    def prompt_bytes_to(self, peer: str) -> int:
        """Most bytes of a batch to a peer for which ``Capabilities.prompt_bytes`` holds; by default, that number.

        For a backend that knows, once it has connected, that bytes to a peer take a slow way. At most the declared
        number. Never blocks. Called from any thread, at any time after ``connect``.
        """
        return self.capabilities.prompt_bytes

    @abstractmethod
    def submit(self, peer: str, batch: Batch) -> Transfer:
        """Start moving a batch.

        The core has checked that all blocks are inside regions of both sides. A backend whose library does not check
        this checks it again. The bytes of a WRITE are visible at the destination before its transfer succeeds.

        Raises:
            TransferError: The batch could not be started, and certainly no byte was or will be moved.
        """

    @abstractmethod
    def poll(self, transfers: Sequence[Transfer]) -> None:
        """Let the library make progress, and set the outcome of those ``transfers`` that ended. Never blocks.

        Some of them may have failed without being settled. If the backend can find out that the bytes of such a
        transfer have stopped, it calls `Transfer.settle`.
        """

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Forget a peer and free its resources. Unknown peers are ignored.

        Transfers to it that have not ended fail, during this call or later.
        """

    @abstractmethod
    def close(self) -> None:
        """Free everything, and end all threads. May be called twice."""


@runtime_checkable
class Fencing(Protocol):
    """Implemented by a backend that lets the memory's owner stop inbound bytes alone."""

    def grant(
        self,
        peer: str,
        room: int,
        generation: int,
        addresses: npt.NDArray[np.uint64],
        nbytes: npt.NDArray[np.uint64],
    ) -> None:
        """Allow ``peer`` to write these local ranges (uint64, sorted by address, disjoint) for one use of a room.

        Called before the peer learns of the ranges. Several calls for one use of a room add up. The backend refuses
        everything else that this peer wants to write.

        Each range is inside registered memory, but not always inside one region: if two regions are side by side, a
        range may begin in the first and end in the second. `Ranges` looks ranges up in all regions together.

        Raises:
            TransferError: A range is not in registered memory. Then nothing of this call is granted.
        """

    def revoke(self, peer: str, room: int, generation: int) -> Transfer:
        """Take back all that was granted for one use of a room.

        The transfer that is returned succeeds when nothing can land under these grants. An unknown grant counts as
        revoked.
        """


@runtime_checkable
class Landing(Protocol):
    """Implemented by a backend with an owner's fence whose destination sees by itself when bytes have landed.

    A room then ends on decode with its last byte. Without it, decode waits until the mover's transfer has ended and
    prefill has said so, which is one round trip more.
    """

    def when_landed(self, peer: str, room: int, generation: int, nbytes: int, then: Callable[[], object]) -> None:
        """Call ``then`` once batches of ``peer`` for one use of a room have put so many bytes in place.

        A batch counts once a reader here sees all of its bytes, and a batch that fails does not count. The core calls
        this once for a use of a room, after `Fencing.grant`. If the grant is revoked before, ``then`` is not called any
        more. Never blocks. Called from any thread.

        Args:
            peer: The peer's link name.
            room: The room id.
            generation: The generation of its use.
            nbytes: Bytes of all batches of this use together, at least one.
            then: Must not block. Called once, on any thread, perhaps during this call.
        """


@runtime_checkable
class Transports(Protocol):
    """Implemented by a backend that can tell which transport carries its bytes.

    A transport is a word: ``rdma``, ``tcp``, ``shm``, or the backend's own. An engine that requires a transport is
    refused if the word is another one or `UNKNOWN`. So return a word only if it is certain, and `UNKNOWN` otherwise.
    """

    @classmethod
    def transports(cls, options: Any) -> frozenset[str]:
        """The words that `transport` could return on this machine with these options; empty if nobody can tell.

        Called after a successful ``probe``. Opens nothing, and never raises.
        """

    def transport(self, peer: str) -> str:
        """The transport that carries the bytes that this side moves to or from ``peer``, as far as it is known.

        It may change with a new connection. Words joined by ``+`` mean that several transports carry bytes, and that
        each of them must be allowed. Never blocks. Called from any thread, at any time after ``connect``.
        """


@runtime_checkable
class Diagnosing(Protocol):
    """Implemented by a backend that can tell ``statelink doctor`` more about the machine than ``probe`` does."""

    @classmethod
    def diagnose(cls, options: Any) -> Sequence[Check]:
        """Check packages, libraries and devices, one by one. Called before ``probe``; may block; never raises."""


@runtime_checkable
class MemoryKinds(Protocol):
    """Implemented by a backend whose options decide which of the declared memory kinds it can register."""

    @classmethod
    def memory_kinds(cls, options: Any) -> frozenset[str]:
        """The part of ``capabilities.memory_kinds`` that it registers with these options.

        A rank that holds another kind is refused when it opens, and ``auto`` takes another backend. Called before
        ``probe``. Opens nothing, and never raises.
        """


def cannot_register(backend: type[Backend], options: Any, kind: str) -> str:
    """Why a backend with these options cannot register memory of a kind, as a clause; empty if it can."""
    name = kind.partition(":")[0]
    declared = backend.capabilities.memory_kinds
    if name not in declared:
        return f"it declares {', '.join(sorted(declared))}"
    if not issubclass(backend, MemoryKinds) or name in (taken := backend.memory_kinds(options)):
        return ""
    return f"with these options it registers {', '.join(sorted(taken)) or 'none'}"


class EventLoop(Protocol):
    """The control thread of a link, which waits for file descriptors beside its messages. Thread-safe; never blocks."""

    def add_reader(self, descriptor: int, ready: Callable[[], object]) -> None:
        """Call ``ready`` on the control thread whenever something new can be read from a descriptor.

        It is called once for what has come, not again for what was left unread (``EPOLLET``). So it reads until nothing
        is left, or has another thread do so.

        Args:
            descriptor: A socket, a pipe, an ``eventfd`` or whatever else ``epoll`` takes. The backend owns it, and
                calls `remove_reader` before it closes it.
            ready: Must not block. It may also be called without a cause. What it raises is logged.

        Raises:
            OSError: The descriptor cannot be watched.
        """

    def remove_reader(self, descriptor: int) -> None:
        """Watch a descriptor no longer; does nothing if it is not watched. A call of ``ready`` may still run."""


@runtime_checkable
class EventDriven(Protocol):
    """Implemented by a backend that can have the control thread wait for its descriptors.

    That saves a change of threads for each transfer. Beside an engine that computes, it also saves up to 5 ms, because
    a thread of the backend would wait for the interpreter, and the control thread after it.
    """

    def use_loop(self, loop: EventLoop) -> None:
        """Take the control thread of the link. Called once, before ``connect``. Nobody calls it without a link."""
