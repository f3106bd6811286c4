"""The backend: one engine for each link. The library moves batches in threads of its own, and is asked how they are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from statelink.backend import (
    ANY,
    DIRECT,
    UNKNOWN,
    Backend,
    BackendContext,
    Batch,
    Capabilities,
    Check,
    Ends,
    Fence,
    Probe,
    RawLibrary,
    Region,
    RegionTable,
    SubmitMode,
    Transfer,
)
from statelink.backend.native import rdma_devices, unregistered
from statelink.errors import BackendUnavailableError, TransferError

from ._descriptor import Descriptor
from ._diagnosis import diagnose
from ._left import Left
from ._library import Library, absent, forced_tcp
from ._moving import Moving, Peer, Submitter
from ._options import Options
from ._raw import RawMooncake
from ._settings import ENTRIES, transfer_seconds

__all__ = ["MooncakeBackend"]


class MooncakeBackend(Backend):
    """Moves bytes with Mooncake's TransferEngine."""

    api_version = 1
    name = "mooncake"
    Options = Options
    capabilities: ClassVar[Capabilities] = Capabilities(
        memory_kinds=frozenset({"dram", "cuda"}),
        state_types=ANY,
        submit_mode=SubmitMode.BLOCKING,
        # The library cannot cancel, and the rest of a failed call continues in its threads.
        source=Fence.MOVER,
        target=Fence.MOVER,
        # The TCP transport takes 1024 entries to a peer, lets 1024 more wait for a second, and fails a batch beyond
        # both. With this limit, the rest of a failed batch does not make the next one fail.
        max_blocks=ENTRIES,
        max_bytes=32 << 20,
        max_transfers=1,
        joins_rooms=True,
        thread_safe=True,
        stalled_peers=None,
        prompt_bytes=2 << 20,  # the library queues blocks: 100 µs for as many as small requests have
        single_process=True,
        priority=40,
        block_seconds=17e-6,  # measured for one entry of a batch over its TCP transport
    )
    strategies: ClassVar = {"*": DIRECT}

    def __init__(self, context: BackendContext) -> None:
        try:
            self._library = Library(context.options)
        except Exception as error:  # whatever its native modules raise
            reason, hint = absent(error)
            raise BackendUnavailableError(reason, hint=hint, backend=self.name) from error
        if ":" in context.host and "MC_USE_IPV6" not in os.environ:
            raise BackendUnavailableError(
                "Mooncake uses IPv4 in this process",
                cause=f"this link's host is {context.host}, and the library reads the family when it is imported",
                hint='set mc = {"USE_IPV6": "1"}, or start the process with MC_USE_IPV6=1 in its environment',
                backend=self.name,
            )
        self._link = context.link
        self._transport = UNKNOWN
        self._host = context.host
        self._table = RegionTable((), self.name)
        self._addresses: list[int] = []
        self._peers: dict[str, Peer] = {}
        engine, status = self._library.engine(context.host, context.options)
        if status != 0:
            raise BackendUnavailableError(
                "Mooncake's engine could not be started",
                cause=f"it returned {status}, and printed why to standard error",
                hint=f"over TCP, it needs two free ports of {context.options.port}" if context.options.port else "",
                backend=self.name,
                library=self._library.version,
                host=context.host,
            )
        self._submitter = Submitter(engine, transfer_seconds())
        self._left = Left()
        possible = self.transports(context.options)
        if len(possible) == 1:
            (self._transport,) = possible
        elif possible:
            # A regular build that finds a device uses RDMA for everything, or does not start.
            self._transport = "rdma" if self._library.finds_devices(engine, context.options) else "tcp"

    @classmethod
    def raw(cls, name: str, options: Any, host: str, regions: Sequence[Region]) -> RawLibrary:
        """See `statelink.backend.RawTransfers`."""
        return RawMooncake(host, options, regions)

    @classmethod
    def probe(cls, options: Any) -> Probe:
        """Import Mooncake, which loads the shared libraries that it needs."""
        try:
            library = Library(options)
        except ImportError as error:
            reason, hint = absent(error)
            return Probe(ok=False, reason=reason, hint=hint)
        except Exception as error:  # a probe explains what a broken installation raises, whatever it is
            return Probe(ok=False, reason=f"Mooncake does not start: {type(error).__name__}: {error}")
        memory = "host and CUDA memory" if library.cuda else "host memory"
        return Probe(ok=True, reason=f"{library.version}, {memory}", details={"library": library.version})

    @classmethod
    def transports(cls, options: Any) -> frozenset[str]:
        """For a regular build: RDMA or TCP if there is a device, otherwise TCP. For other builds it is not known."""
        if options.protocol not in ("auto", "tcp", "rdma"):
            return frozenset()
        may_rdma = rdma_devices() and options.protocol != "tcp" and not forced_tcp()
        return frozenset({"rdma", "tcp"} if may_rdma else {"tcp"})

    def transport(self, peer: str) -> str:
        """The transport that this engine uses for every peer."""
        return self._transport if peer in self._peers else UNKNOWN

    @classmethod
    def diagnose(cls, options: Any) -> list[Check]:
        """Check the build, its shared libraries, and settings that change how bytes are moved."""
        return diagnose(options)

    def register(self, regions: Sequence[Region]) -> None:
        """Register all regions at once. If that fails, register them one by one, to find out which is refused."""
        engine = self._open()
        for index, region in enumerate(regions):
            # A build without CUDA accepts any address, and reads it with the CPU.
            if region.kind != "dram" and not (self._library.cuda and region.kind.startswith("cuda")):
                raise self._unregistered(index, region, f"{self._library.distribution} does not know such memory")
        self._table = RegionTable(regions, self.name)
        self._addresses = [region.address for region in regions]
        if not regions or engine.batch_register_memory(self._addresses, [region.nbytes for region in regions]) == 0:
            return
        engine.batch_unregister_memory(self._addresses)
        for index, region in enumerate(regions):
            status = engine.batch_register_memory([region.address], [region.nbytes])
            if status != 0:
                overlap = " (it overlaps one before it)" if status == -7 else ""
                raise self._unregistered(index, region, f"the library returned {status}{overlap}")

    def descriptor(self) -> bytes:
        """The engine's address. Peers ask the engine for everything else."""
        port = self._open().get_rpc_port()
        return Descriptor(Descriptor.FORMAT, self._link, self._host, port, self._library.version).encode()

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        """Reach the peer's engine, and fetch what it registered."""
        offered = Descriptor.decode(descriptor, peer)
        engine = self._open()
        address = offered.session
        # A first contact inside a transfer holds a lock of the engine. A peer that is stopped or unreachable would then
        # delay all other transfers for a minute. The probe holds no lock.
        status = engine.send_probe(address)
        if status == 0:
            status = self._submitter.open(address)
        if status != 0:
            cause = f"its engine at {address} ({offered.library}) does not answer {self._library.version}: {status}"
            raise Descriptor.refused(peer, cause)
        self._left.remove(address)
        self._peers[peer] = Peer(address, RegionTable(regions, self.name))

    def submit(self, peer: str, batch: Batch) -> Transfer:
        """Hand a batch to the library. Waits for nobody."""
        self._open()
        remote = self._peers.get(peer)
        if remote is None:
            raise TransferError("the peer is not connected", backend=self.name, peer=peer)
        # The library does not check local blocks, and checks remote ones only after it has begun to move others.
        ends = Ends.of(batch, self._table, remote.table)
        return Moving(self._submitter, remote, ends)

    def poll(self, transfers: Sequence[Transfer]) -> None:
        """Ask the library for the state of batches, and submit those that had to wait."""
        for each in transfers:
            if isinstance(each, Moving):
                each.poll()

    def disconnect(self, peer: str) -> None:
        """Forget a peer. Over TCP, the library keeps its connections until the peer's process has ended."""
        known = self._peers.pop(peer, None)
        if known is not None and self._transport == "tcp" and len(known.table.starts):
            self._left.add(known.session, int(known.table.starts[0]))
        engine = self._submitter.engine
        if engine is not None:
            self._left.look(engine)

    def close(self) -> None:
        """Destroy the engine. Its destructor joins threads for about a second, in which no Python thread runs."""
        engine = self._submitter.take()
        self._peers.clear()
        if engine is not None and self._addresses:
            engine.batch_unregister_memory(self._addresses)

    def _open(self) -> Any:
        engine = self._submitter.engine
        if engine is None:
            raise TransferError("the backend is closed", backend=self.name)
        return engine

    def _unregistered(self, index: int, region: Region, cause: str) -> TransferError:
        return unregistered(index, region, cause, backend=self.name, library=self._library.version)
