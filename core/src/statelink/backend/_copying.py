"""Base class of backends that copy: when ``submit`` returns, no byte of the batch moves any more."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import msgspec

from statelink._json import decode_json
from statelink.errors import TransferError
from statelink.plan import RegionTable

from ._ends import Ends
from ._interface import Backend, Outcome, Transfer

if TYPE_CHECKING:
    from statelink.state import Region

    from ._interface import BackendContext, Batch

__all__ = ["CopyingBackend"]

PlaceT = TypeVar("PlaceT")


class _Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    backend: str
    link: str
    place: msgspec.Raw


class CopyingBackend(Backend, Generic[PlaceT]):
    """Base of a backend that moves a batch while ``submit`` runs, and has nothing to poll for afterwards.

    It keeps the region tables and the peers, and refuses what the contract says: memory of another kind, a descriptor
    that is not one of this backend and of that peer, a peer that is not connected, a block outside registered memory.
    A subclass states ``Place`` and the class attributes of `Backend`, and writes `probe`, `here`, `problem` and `copy`.

    Threads: if ``capabilities.thread_safe`` is set, `problem` and `copy` may run for several peers at once, also while
    that peer is disconnected or the backend is closed. Otherwise the core never runs two of its methods at once.

    Attributes:
        Place: The type of what a peer needs to reach this backend, which `here` returns: anything that ``msgspec``
            encodes as JSON and decodes by type. Its bytes come from a peer, and may be anything of that type.
    """

    Place: ClassVar[type]

    def __init__(self, context: BackendContext) -> None:
        self._link = context.link
        self._lock = threading.Lock()
        self._closed = False
        self._regions = RegionTable((), self.name)
        self._peers: dict[str, tuple[PlaceT, RegionTable]] = {}

    @abstractmethod
    def here(self) -> PlaceT:
        """What a peer needs to reach this process and its memory."""

    @abstractmethod
    def problem(self, there: PlaceT) -> str:
        """Why a peer cannot be reached; empty if it can. Called when a peer is connected, and before each batch.

        Args:
            there: What the peer's `here` returned. Do not trust it.
        """

    @abstractmethod
    def copy(self, there: PlaceT, ends: Ends) -> str:
        """Copy blocks into the memory of a peer. Returns why that failed; empty if a reader there sees every byte.

        May block. No byte moves after it has returned or raised, whatever it returned.

        Args:
            there: What the peer's `here` returned.
            ends: The blocks, all of them inside registered memory of both sides. The arrays belong to the core: do not
                change them.
        """

    def register(self, regions: Sequence[Region]) -> None:
        """Remember the regions. See `Backend.register`.

        Raises:
            TransferError: The backend does not declare that kind of memory.
        """
        kinds = self.capabilities.memory_kinds
        for region in regions:
            if region.kind.partition(":")[0] not in kinds:
                what, hint = f"memory of kind {region.kind!r} cannot be registered", f"{', '.join(sorted(kinds))} can"
                raise TransferError(what, hint=hint, backend=self.name)
        self._regions = RegionTable(regions, self.name)

    def descriptor(self) -> bytes:
        """The name of the backend, that of the link, and what `here` returns."""
        return msgspec.json.encode(_Descriptor(self.name, self._link, msgspec.Raw(msgspec.json.encode(self.here()))))

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        """Decode the descriptor, and ask `problem`. See `Backend.connect`.

        Raises:
            TransferError: The descriptor is not that of the peer, or the peer cannot be reached.
        """
        try:
            found = decode_json(descriptor, _Descriptor)
            there: PlaceT = decode_json(found.place, self.Place)
        except ValueError as error:
            raise self._refused(peer, f"its descriptor does not decode: {error}") from error
        if (found.backend, found.link) != (self.name, peer):
            raise self._refused(peer, f"its descriptor is that of {found.link!r} over {found.backend!r}")
        cause = self.problem(there)
        with self._lock:
            if not (cause or self._closed):
                self._peers[peer] = (there, RegionTable(regions, self.name))
                return
        raise self._refused(peer, cause or "this backend is closed")

    def submit(self, peer: str, batch: Batch) -> Transfer:
        """Check every block, ask `problem`, then `copy`. The transfer has ended, and is settled.

        Raises:
            TransferError: The peer is not connected, or a block is outside registered memory.
        """
        known = self._peers.get(peer)
        if known is None:
            cause = "the peer is not connected"
            raise TransferError("a batch cannot be moved", cause=cause, backend=self.name, peer=peer)
        there, table = known
        ends = Ends.of(batch, self._regions, table)
        wrong = self.problem(there) or self.copy(there, ends)
        return Transfer(Outcome(not wrong, wrong))

    def poll(self, transfers: Sequence[Transfer]) -> None:
        """Does nothing, because a transfer has ended when `submit` returns."""

    def disconnect(self, peer: str) -> None:
        """Forget a peer, known or not."""
        with self._lock:
            self._peers.pop(peer, None)

    def close(self) -> None:
        """Forget all peers. May be called twice."""
        with self._lock:
            self._closed = True
            self._peers.clear()

    def _refused(self, peer: str, cause: str) -> TransferError:
        return TransferError("a peer cannot be connected", cause=cause, backend=self.name, peer=peer)
