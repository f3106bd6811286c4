"""The methods of the backend, with senders, receivers and grants."""

from __future__ import annotations

import contextlib
import ipaddress
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from statelink.backend import (
    DIRECT,
    UNKNOWN,
    Backend,
    BackendContext,
    Batch,
    Capabilities,
    EventLoop,
    Fence,
    Ports,
    Probe,
    Ranges,
    RawLibrary,
    Region,
    RegionTable,
    Strategy,
    SubmitMode,
    Transfer,
    boot_id,
)
from statelink.errors import BackendUnavailableError, TransferError

from . import _iovec, _options
from ._descriptor import Descriptor, pair_key
from ._frames import MAX_BLOCKS, MAX_BYTES
from ._grants import Grants
from ._lingering import Lingering
from ._listener import Known, Listener, listen
from ._raw import RawSocket
from ._receiver import Receiver
from ._sender import Sender
from ._stream import MORE_CONGESTION, MORE_THREADS, why_not
from ._streams import Receivers, Senders

if TYPE_CHECKING:
    from ._iovec import U64

__all__ = ["TcpBackend"]

UINT64: Final = 1 << 64
COLUMNS: Final = (
    ("source", np.dtype(np.uint64)),
    ("target", np.dtype(np.uint64)),
    ("nbytes", np.dtype(np.uint64)),
    ("source_region", np.dtype(np.uint32)),
    ("target_region", np.dtype(np.uint32)),
)


class _Peer(NamedTuple):
    """What the backend keeps for a connected peer."""

    regions: RegionTable
    known: Known
    senders: Senders
    near: bool

    def stop(self) -> None:
        """Tell all threads to end. Returns at once."""
        self.senders.stop()
        self.known.receivers.stop()

    def join(self) -> None:
        """Wait for all threads. After that, nothing from this peer can land."""
        self.senders.join()
        self.known.receivers.join()


class TcpBackend(Backend):
    """Moves host memory between any two hosts over plain sockets, and on one host with one copy.

    A WRITE is a message to the destination's process. That process checks each range against the sender's grants. Its
    own thread puts the bytes in place. It reads them from the socket or, on one host, from the sender's memory. So the
    destination can stop a WRITE alone. The source cannot. If the destination's process reads the source's memory, only
    that process knows when it has stopped. If the bytes were sent, some in the destination's socket buffer may still
    land. So the fence of the source is ``MOVER``. A connection that was given up is kept until the destination has
    closed its end, which proves that it has stopped.

    A peer may write what it is granted, and nothing else.
    """

    api_version = 1
    name = "tcp"
    Options = _options.Options
    capabilities: ClassVar[Capabilities] = Capabilities(
        memory_kinds=frozenset({"dram"}),
        submit_mode=SubmitMode.ASYNC,
        source=Fence.MOVER,
        target=Fence.OWNER,
        max_blocks=MAX_BLOCKS,
        max_transfers=32,
        thread_safe=True,
        priority=0,  # any other backend that can run here was installed on purpose
        ends_unpolled=True,
        prompt_fences=True,
        block_seconds=1e-6,  # measured on one host with 1 KiB blocks against large ones; half of this over a socket
    )
    strategies: ClassVar[Mapping[str, Strategy]] = MappingProxyType({"*": DIRECT})

    def __init__(self, context: BackendContext) -> None:
        self._options: _options.Options = context.options
        self._require = context.require
        self._role = context.role
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._closed = False
        self._regions = RegionTable((), "tcp")
        self._grants = Grants(Ranges.of(()))
        self._lingering = Lingering()
        self._loop: EventLoop | None = None
        host = self._options.host or context.listen or context.host
        try:
            ipaddress.ip_address(context.host)
            self._listener = Listener(context.link, host, self._options, self._find)
        except (OSError, ValueError) as error:
            ports = self._options.ports
            chosen = "port 0 lets the system choose one" if ports.first else ""
            if ports.several:
                chosen = f"each rank of this host takes a port of the range: give it more of them; {chosen}"
            raise self._portless(host, ports.why(error), chosen) from error
        near = self._options.same_host_copy and _iovec.can_copy()
        # One key pair for each backend object, so that the knowledge of an earlier incarnation's peer is useless.
        self._private = X25519PrivateKey.generate()
        self._own = Descriptor(
            link=context.link,
            host=context.host,
            port=self._listener.port,
            public=self._private.public_key().public_bytes_raw(),
            boot=boot_id(),
            same_host_copy=near,
            streams=self._options.streams,
        )
        if near and self._options.permit_ptrace:
            _iovec.permit_ptrace()
        try:
            self._listener.start()  # the last thing: nothing that follows can fail and leave its thread behind
        except RuntimeError as error:
            raise self._portless(host, f"no thread can be started: {error}", MORE_THREADS) from error

    def _portless(self, host: str, cause: str, hint: str) -> BackendUnavailableError:
        what = "the data port cannot be opened"
        return BackendUnavailableError(what, cause=cause, hint=hint, backend="tcp", host=host, port=self._options.port)

    @classmethod
    def raw(cls, name: str, options: Any, host: str, regions: Sequence[Region]) -> RawLibrary:
        """See `statelink.backend.RawTransfers`."""
        return RawSocket(host, regions)

    @classmethod
    def probe(cls, options: Any) -> Probe:
        """Whether a data port can be opened here, and whether the same-host copy works."""
        if sys.maxsize < 1 << 32:
            return Probe(ok=False, reason="this is a 32-bit process", hint="use a 64-bit Python")
        problem = why_not(options.congestion)
        if problem:
            return Probe(ok=False, reason=problem, hint=MORE_CONGESTION)
        try:
            # A port of a range that is held here, for a moment, could be the last one for another rank of this host.
            listen(options.host or "127.0.0.1", Ports(0, 0) if options.ports.several else options.ports).close()
        except OSError as error:
            return Probe(ok=False, reason=f"the data port cannot be opened: {error}", hint="see options host and port")
        copy = _same_host_copy(options)
        return Probe(ok=True, reason=f"sockets; same-host copy: {copy}", details={"same_host_copy": copy})

    @classmethod
    def transports(cls, options: Any) -> frozenset[str]:
        """``socket``, and ``process_vm`` if this machine allows the same-host copy."""
        near = options.same_host_copy and _iovec.can_copy()
        return frozenset({"socket", "process_vm"} if near else {"socket"})

    def transport(self, peer: str) -> str:
        """How batches to ``peer`` travel. Known after the first connection, or if there is only one way."""
        with self._lock:
            known = self._peers.get(peer)
        if known is None:
            return UNKNOWN
        found = known.senders.transport or (UNKNOWN if known.near else "socket")
        if found == UNKNOWN and self._require and self._role == "both":
            known.senders.want()
        return found

    def use_loop(self, loop: EventLoop) -> None:
        """See `statelink.backend.EventDriven`."""
        self._loop = loop

    def register(self, regions: Sequence[Region]) -> None:
        """Store the region table. Nothing is pinned or mapped."""
        for at, region in enumerate(regions):
            if region.kind != "dram":
                raise TransferError(
                    f"region {at} cannot be registered",
                    cause=f"its memory is {region.kind!r}, and a socket reaches only 'dram'",
                    backend="tcp",
                )
        try:
            registered = Ranges.of([(region.address, region.nbytes) for region in regions])
        except ValueError as error:
            raise TransferError("the regions cannot be registered", cause=str(error), backend="tcp") from error
        self._regions = RegionTable(regions, "tcp")
        self._grants = Grants(registered)

    def descriptor(self) -> bytes:
        """This side's address, and its half of the key agreement; see `Descriptor`."""
        return self._own.encode()

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        """Store ``peer``. Neither side waits for the other.

        A prefill rank begins to dial, so that its first batch need not wait for that. A rank of both roles may never
        send to this peer, and dials with the first batch.
        """
        theirs = Descriptor.decode(descriptor, peer)
        if peer == self._own.link:
            raise TransferError("a link cannot connect to itself", backend="tcp", peer=peer)
        key = pair_key(self._private, self._own, theirs)
        if self._find(peer) is not None:
            self.disconnect(peer)
        made = self._make(theirs, key, RegionTable(regions, "tcp"))
        with self._lock:
            if not self._closed:
                self._peers[peer] = made
        if self._closed:
            made.stop()
            made.join()
            raise TransferError("cannot connect", cause="this backend is closed", backend="tcp", peer=peer)
        self._listener.look_again()
        # A decode rank connects before its peer knows it. A link of both roles may, too: it asks in `transport`.
        if self._require and self._role not in ("decode", "both"):
            try:
                made.senders.find_out()
            except TransferError:
                self.disconnect(peer)
                raise
        elif self._role == "prefill":
            made.senders.want()

    def _make(self, theirs: Descriptor, key: bytes, regions: RegionTable) -> _Peer:
        """What is kept for a peer. No thread runs yet.

        Raises:
            TransferError: The process has no file descriptors left.
        """
        near = self._own.near(theirs)
        most = min(self._own.streams, theirs.streams)

        def receiver(number: int) -> Receiver:
            return Receiver(theirs.link, near=near, grants=self._grants)

        def sender(number: int) -> Sender:
            return Sender(self._own, theirs, key, number, self._options, self._lingering, self._loop)

        with contextlib.ExitStack() as undo:
            try:
                receivers = Receivers(receiver, most)
                undo.callback(receivers.join)
                # The threads that copy share one large batch, so that a second connection for such would not help.
                senders = Senders(sender, min(most, 2) if near else most, theirs.link)
            except OSError as error:
                raise TransferError(
                    "cannot connect",
                    cause=str(error),
                    hint="raise the limit of open files (ulimit -n, LimitNOFILE), or look for what leaves files open",
                    backend="tcp",
                    peer=theirs.link,
                ) from error
            undo.pop_all()
        return _Peer(regions, Known(key, receivers), senders, near)

    def submit(self, peer: str, batch: Batch) -> Transfer:
        """Send a batch to ``peer``, or queue it for the thread that sends. Does not block."""
        with self._lock:
            known = self._peers.get(peer)
        nbytes = int(np.add.reduce(batch.blocks.nbytes))
        cause = "it is not connected" if known is None else self._wrong(batch, known.regions)
        if not cause and nbytes > MAX_BYTES:
            cause = f"it has {nbytes} bytes"
        if known is None or cause:
            raise TransferError("a batch cannot be moved", cause=cause, backend="tcp", peer=peer, room=batch.room)
        return known.senders.submit(batch, nbytes)

    def poll(self, transfers: Sequence[Transfer]) -> None:
        """Settle transfers that failed before their receiver had stopped. The sending threads do everything else."""
        if any(transfer.outcome is not None for transfer in transfers):
            self._lingering.look()

    def grant(self, peer: str, room: int, generation: int, addresses: U64, nbytes: U64) -> None:
        """Allow ``peer`` to write these ranges. Calls for one use of a room add up. Callable from any thread.

        Raises:
            TransferError: The ranges are not sorted, disjoint, or inside our registered memory.
        """
        self._grants.grant(peer, room, generation, addresses, nbytes)

    def revoke(self, peer: str, room: int, generation: int) -> Transfer:
        """Take a grant back. Callable from any thread; never blocks.

        The transfer succeeds at once, or when a running system call ends that writes under this grant. Neither depends
        on the peer, which may be stopped in the middle of a payload.
        """
        return self._grants.revoke(peer, room, generation)

    def when_landed(self, peer: str, room: int, generation: int, nbytes: int, then: Callable[[], object]) -> None:
        """See `statelink.backend.Landing`. The thread of a connection calls ``then``."""
        self._grants.when_landed(peer, room, generation, nbytes, then)

    def disconnect(self, peer: str) -> None:
        """End both directions and their threads. Blocks for at most about a second for each connection to it."""
        with self._lock:
            known = self._peers.pop(peer, None)
        if known is not None:
            known.stop()
            known.join()
        self._grants.forget(peer)
        self._lingering.look()

    def close(self) -> None:
        """Disconnect everybody at once, and close the data port."""
        with self._lock:
            self._closed = True
            peers, self._peers = self._peers, {}
        for known in peers.values():
            known.stop()
        for name, known in peers.items():
            known.join()
            self._grants.forget(name)
        self._lingering.close()
        self._listener.close()

    def _find(self, peer: str) -> Known | None:
        with self._lock:
            known = self._peers.get(peer)
        return None if known is None else known.known

    def _wrong(self, batch: Batch, theirs: RegionTable) -> str:
        """What is wrong with a batch, in words; empty for nothing."""
        blocks = batch.blocks
        count = len(blocks.nbytes)
        if not 0 < count <= MAX_BLOCKS:
            return f"it has {count} blocks; at most {MAX_BLOCKS} go into one"
        for name, dtype in COLUMNS:
            array = getattr(blocks, name)
            if array.dtype != dtype or array.shape != (count,):
                return f"its {name} is {array.dtype} of shape {array.shape}, not {dtype} of one shape"
        if not (0 <= batch.room < UINT64 and 0 <= batch.generation < UINT64):
            return f"room {batch.room} and generation {batch.generation} are not unsigned 64-bit numbers"
        try:
            if batch.checked != (self._regions.key, theirs.key):
                self._regions.check("here", blocks.source, blocks.nbytes, blocks.source_region)
                theirs.check("by the peer", blocks.target, blocks.nbytes, blocks.target_region)
        except TransferError as error:
            return f"{error.reason.what}: {error.reason.cause}"
        return ""


def _same_host_copy(options: _options.Options) -> str:
    if not options.same_host_copy:
        return "off"
    if not _iovec.can_copy():
        return "the kernel has no process_vm_readv, or forbids it"
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii"))
    except (OSError, ValueError):
        scope = 0
    if scope == 0 or (scope == 1 and options.permit_ptrace):
        return "yes"
    return f"only where the peer may trace this process (kernel.yama.ptrace_scope is {scope}; see permit_ptrace)"
