"""The backend: a library's queue moves bytes between links of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from statelink.backend import (
    DIRECT,
    Backend,
    BackendContext,
    Batch,
    Capabilities,
    Ends,
    Fence,
    Probe,
    Region,
    RegionTable,
    Strategy,
    SubmitMode,
    Transfer,
)
from statelink.errors import BackendUnavailableError, TransferError

if TYPE_CHECKING:
    import vendor

__all__ = ["Options", "QueueBackend"]

INSTALL = "pip install vendor"
OPEN: set[str] = set()


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the backend.

    Attributes:
        depth: Most batches that wait in the library's queue.
    """

    depth: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 256


class Queued(Transfer):
    """A batch, with the library's job."""

    __slots__ = ("job", "peer")

    def __init__(self, peer: str, job: vendor.Job) -> None:
        super().__init__()
        self.peer = peer
        self.job = job


class QueueBackend(Backend):
    """Moves bytes through the queue of a library."""

    api_version = 1
    name = "queue"
    Options = Options
    capabilities: ClassVar[Capabilities] = Capabilities(
        memory_kinds=frozenset({"dram"}),
        submit_mode=SubmitMode.ASYNC,
        source=Fence.MOVER,
        target=Fence.MOVER,
        max_transfers=4,
    )
    strategies: ClassVar[Mapping[str, Strategy]] = MappingProxyType({"*": DIRECT})

    def __init__(self, context: BackendContext) -> None:
        try:
            import vendor
        except Exception as error:  # native libraries raise more than ImportError
            raise BackendUnavailableError(
                "vendor cannot be imported", cause=str(error), hint=INSTALL, backend=self.name
            ) from error
        options: Options = context.options
        self._queue = vendor.Queue(options.depth)
        self._link = context.link
        self._regions = RegionTable((), self.name)
        self._peers: dict[str, RegionTable] = {}
        self._running: set[Queued] = set()
        OPEN.add(self._link)

    @classmethod
    def probe(cls, options: Any) -> Probe:
        """Whether the library can be imported."""
        try:
            import vendor
        except Exception as error:
            return Probe(ok=False, reason=f"vendor cannot be imported: {error}", hint=INSTALL)
        return Probe(ok=True, reason=f"a queue for {options.depth} batches", details={"vendor": vendor.__version__})

    def register(self, regions: Sequence[Region]) -> None:
        """Remember the regions: the library needs no registration."""
        for region in regions:
            if region.kind != "dram":
                raise TransferError(f"memory of kind {region.kind!r} cannot be registered", backend=self.name)
        self._regions = RegionTable(regions, self.name)

    def descriptor(self) -> bytes:
        """The link's name."""
        return msgspec.json.encode(["queue", self._link])

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        """Check that the peer is a link of this process."""
        if descriptor != msgspec.json.encode(["queue", peer]) or not OPEN.issuperset((peer, self._link)):
            cause = "this is no descriptor of an open link of this process"
            raise TransferError("a peer cannot be connected", cause=cause, backend=self.name, peer=peer)
        self._peers[peer] = RegionTable(regions, self.name)

    def submit(self, peer: str, batch: Batch) -> Transfer:
        """Check every block, and post them."""
        if peer not in self._peers or peer not in OPEN:
            raise TransferError("a batch cannot be moved", cause="no such link", backend=self.name, peer=peer)
        ends = Ends.of(batch, self._regions, self._peers[peer])
        rows = zip(ends.there.tolist(), ends.here.tolist(), ends.nbytes.tolist(), strict=True)
        try:
            queued = Queued(peer, self._queue.post(list(rows)))
        except OverflowError as error:
            raise TransferError("a batch cannot be queued", cause=str(error), backend=self.name, peer=peer) from error
        self._running.add(queued)
        return queued

    def poll(self, transfers: Sequence[Transfer]) -> None:
        """See what became of batches, also of those that have failed and are not settled."""
        for each in transfers:
            if not isinstance(each, Queued) or each.job.state == "queued":
                continue
            self._running.discard(each)
            if each.outcome is not None:  # it has failed before, and its bytes have stopped only now
                each.settle()
            elif each.job.state == "done":
                each.succeed()
            else:
                each.fail(each.job.error, settled=True)

    def disconnect(self, peer: str) -> None:
        """Forget a peer, known or not. What is queued is copied all the same."""
        self._peers.pop(peer, None)
        for each in [each for each in self._running if each.peer == peer]:
            self._running.remove(each)
            each.fail("the peer was disconnected", settled=False)

    def close(self) -> None:
        """Forget everybody, and wait for what is queued. May be called twice."""
        OPEN.discard(self._link)
        for peer in {each.peer for each in self._running}.union(self._peers):
            self.disconnect(peer)
        self._queue.close()
