"""The backend: blocks pass through memory that two processes of one host share."""

from __future__ import annotations

import os
import sys
import threading
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
    Outcome,
    Probe,
    Region,
    RegionTable,
    Strategy,
    SubmitMode,
    Transfer,
    boot_id,
)
from statelink.errors import BackendUnavailableError, TransferError

from ._descriptor import FORMAT, Descriptor, refused
from ._grants import Grants
from ._inbound import Inbound
from ._outbound import Outbound
from ._segment import MAX_BLOCKS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Options", "ShmBackend"]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the backend.

    Attributes:
        payload: Bytes that pass through the shared memory at once; each peer that writes to us has as many.
        timeout: Seconds that a peer has to put them in place.
    """

    payload: Annotated[int, msgspec.Meta(ge=4096, le=1 << 30)] = 4 << 20
    timeout: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 30.0


class ShmBackend(Backend):
    """Moves bytes between processes of one host, through memory that they share.

    The sender copies blocks into the shared memory, and the process that owns their destination copies them
    out, once it has checked each against what the sender was granted. So the destination alone can stop them.

    Attributes:
        inbound: What others send into this process's memory.
    """

    api_version = 1
    name = "shm"
    Options = Options
    capabilities: ClassVar[Capabilities] = Capabilities(
        memory_kinds=frozenset({"dram"}),
        submit_mode=SubmitMode.BLOCKING,
        source=Fence.MOVER,
        target=Fence.OWNER,
        max_blocks=MAX_BLOCKS,
        max_bytes=4 << 20,
        thread_safe=True,
        block_seconds=4e-6,  # a slice is copied in and another out for each, in Python: 1 KiB blocks against large ones
    )
    strategies: ClassVar[Mapping[str, Strategy]] = MappingProxyType({"*": DIRECT})

    def __init__(self, context: BackendContext) -> None:
        self._link = context.link
        self._options: Options = context.options
        self._lock = threading.Lock()
        self._closed = False
        self._regions = RegionTable((), self.name)
        self._peers: dict[str, Outbound] = {}
        try:
            self.inbound = Inbound(self._options.payload)
        except OSError as error:
            raise BackendUnavailableError("no socket can be opened", cause=str(error), backend=self.name) from error

    @classmethod
    def probe(cls, options: Any) -> Probe:
        """Whether this system has memory that can be shared without a name."""
        try:
            os.close(os.memfd_create("statelink-shm-probe"))
            return Probe(ok=True, reason="shared memory of this host", details={"host": boot_id()})
        except (AttributeError, OSError) as error:
            return Probe(ok=False, reason=f"no shared memory on {sys.platform}: {error}", hint="it needs Linux")

    def register(self, regions: Sequence[Region]) -> None:
        """Take note of our memory; nothing is pinned or mapped."""
        for region in regions:
            if region.kind != "dram":
                raise TransferError(
                    f"memory of kind {region.kind!r} cannot be registered", hint="'dram' can", backend=self.name
                )
        self.inbound.grants = Grants(regions)
        self._regions = RegionTable(regions, self.name)

    def descriptor(self) -> bytes:
        """Where we listen, and what to show there."""
        return Descriptor(FORMAT, self._link, boot_id(), self.inbound.name, self.inbound.secret).encode()

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        """Reach a peer, and map the memory that it shares with us."""
        theirs = Descriptor.decode(descriptor, peer)
        made = Outbound(self._link, theirs, RegionTable(regions, self.name), self._options.timeout)
        with self._lock:
            gone = made if self._closed else self._peers.get(peer)
            if not self._closed:
                self._peers[peer] = made
        if gone is not None:
            gone.close()
        if gone is made:
            raise refused(peer, "this backend is closed")

    def submit(self, peer: str, batch: Batch) -> Transfer:
        """Move a batch: all of it is checked before the first byte moves."""
        with self._lock:
            known = self._peers.get(peer)
        if known is None or known.lost:
            cause = "the peer is not connected" if known is None else "the peer was lost, and has to be connected again"
            raise TransferError("a batch cannot be moved", cause=cause, backend=self.name, peer=peer)
        Ends.of(batch, self._regions, known.table)
        return Transfer(known.write(batch))

    def poll(self, transfers: Sequence[Transfer]) -> None:
        """Nothing to do: a transfer has ended when `submit` returns."""

    def grant(
        self,
        peer: str,
        room: int,
        generation: int,
        addresses: npt.NDArray[np.uint64],
        nbytes: npt.NDArray[np.uint64],
    ) -> None:
        """Allow a peer to write these ranges of our memory."""
        self.inbound.grants.add((peer, room, generation), addresses, nbytes)

    def revoke(self, peer: str, room: int, generation: int) -> Transfer:
        """Take a grant back; waits for the piece that is being put in place, and never for the peer."""
        self.inbound.grants.remove((peer, room, generation))
        return Transfer(Outcome(True))

    def disconnect(self, peer: str) -> None:
        """Forget a peer, known or not."""
        with self._lock:
            known = self._peers.pop(peer, None)
        if known is not None:
            known.close()
        self.inbound.forget(peer)

    def close(self) -> None:
        """Forget everybody; may be called twice."""
        with self._lock:
            self._closed = True
            peers, self._peers = self._peers, {}
        for known in peers.values():
            known.close()
        self.inbound.close()
