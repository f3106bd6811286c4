"""The backend: one engine for the process. Its calls return when their bytes have moved."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
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
    Outcome,
    Probe,
    Region,
    RegionTable,
    SubmitMode,
    Transfer,
    leave_in_library,
)
from statelink.backend.native import session, unregistered
from statelink.errors import BackendUnavailableError, TransferError

from ._contacts import Contacts, Unreached
from ._descriptor import Descriptor
from ._door import Door, unanswered
from ._library import REFUSED, Library
from ._machine import devices, diagnose, driver, library, missing, trial
from ._options import Options

__all__ = ["AscendBackend"]

ROLES = {"prefill": "Prefill", "decode": "Decode"}
HINT = "pip install memfabric-hybrid on a host with an NPU, its driver and CANN, or choose another backend"
RETRY_SECONDS = 0.02
"""Seconds between two attempts to reach a peer that is not visible yet."""
BRIEF_SECONDS = 3.0
"""Seconds in which a peer has to answer while others wait."""

_former: list[Any] = []
"""The engine of the last link that was closed. It is destroyed when the next link of the process opens.

From a call of ``destroy`` until that of ``unInitialize`` has ended, which takes up to two seconds, a thread of the
library still tells an engine that a peer has left (`NotifyPeerDown`), although the engine is gone. The process gets
SIGSEGV then. Two fleets that are stopped together would meet that, so a process that ends destroys nothing.
"""
_abandoned: list[Any] = []
"""Engines that failed to move, which are never destroyed: the peer may have ended, and the library may still say so."""
_ending: threading.Thread | None = None
"""Destroys the former engine."""
_taken = threading.Lock()
"""Held while a link of this process has an engine. The library serves one at a time: a second start breaks it."""
_last: Contacts | None = None
"""First contacts of this process's last engine."""
_device: int | None = None
"""The NPU of this process's first engine. The library keeps to it, and fails without a word on another."""


class _Peer:
    """An engine elsewhere."""

    __slots__ = ("check", "patient", "session", "suspect", "table")

    def __init__(self, session: str, table: RegionTable, check: Callable[[], str]) -> None:
        self.session = session
        self.table = table
        self.check = check
        """Returns why the peer does not answer, or nothing."""
        self.suspect = False
        """Whether the last transfer failed.

        The library may then have lost the connection, and connects in the next one.
        """
        self.patient: float | None = None
        """Until when the peer may be invisible. The library publishes memory some time after it is registered."""


class AscendBackend(Backend):
    """Moves bytes with MemFabric's TransferEngine."""

    api_version = 1
    name = "ascend"
    Options = Options
    capabilities: ClassVar[Capabilities] = Capabilities(
        memory_kinds=frozenset({"npu", "dram"}),
        state_types=ANY,
        submit_mode=SubmitMode.BLOCKING,
        # The library cannot cancel, and memory can still be written after it is unregistered.
        source=Fence.MOVER,
        target=Fence.MOVER,
        max_blocks=4096,
        max_bytes=64 << 20,
        max_transfers=1,
        joins_rooms=True,
        thread_safe=True,
        stalled_peers=0,  # it is not known whether calls to two peers can overlap
        single_process=False,
        priority=70,  # it runs only on hardware of one kind, which somebody bought for this
        links_per_process=1,
        both_roles=False,  # the library starts as a Prefill or as a Decode, once in a process
    )
    strategies: ClassVar = {"*": DIRECT}

    def __init__(self, context: BackendContext) -> None:
        global _last, _device
        options = context.options
        who = {"backend": self.name, "host": context.host}
        if context.role not in ROLES:
            raise BackendUnavailableError(f"MemFabric needs a role, and was given {context.role!r}", **who)
        try:
            address = ipaddress.ip_address(context.host)
            if address.is_unspecified:
                raise ValueError("peers cannot reach it")
            if context.role == "decode":  # with an address of another host, the library looks for a port for a minute
                with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6) as free:
                    free.bind((context.host, 0))
        except (ValueError, OSError) as error:
            what = f"MemFabric cannot listen at {context.host!r}"
            hint = "it takes a literal address of this host"
            raise BackendUnavailableError(what, cause=str(error), hint=hint, **who) from error
        try:
            self._library = Library(options.data_op_type)
        except Exception as error:  # whatever its native modules raise
            raise BackendUnavailableError(f"MemFabric cannot be used: {error}", hint=HINT, **who) from error
        if _device not in (None, options.device_id):
            what = f"this process was on device_id {_device}, and the library keeps to that"
            hint = "open a link on another NPU in another process"
            raise BackendUnavailableError(what, hint=hint, **who)
        if not _taken.acquire(blocking=False):
            what = "this process has a link over MemFabric, and the library starts once in a process"
            waits = _last.lingers() if _last else ""
            cause = f"that link is closed, and the library still waits for the engine at {waits}" if waits else ""
            hint = "see whether that peer still runs" if waits else "close that link"
            hint += ", or open this one in another process"
            raise BackendUnavailableError(what, cause=cause, hint=hint, **who)
        cause = self._end_former(options.connect_timeout)
        if cause:
            _taken.release()
            what = "the engine of this process's last link has not ended"
            hint = "see whether each of its peers still runs, or open this link in another process"
            raise BackendUnavailableError(what, cause=cause, hint=hint, **who)
        self._options = options
        self._link = context.link
        self._host = context.host
        self._role = ROLES[context.role]
        self._table = RegionTable((), self.name)
        self._peers: dict[str, _Peer] = {}
        self._contacts = _last = Contacts(self._first_call, self._release)
        self._engine: Any = self._library.engine
        self._door: Door | None = None
        self._closing = False
        self._started = False
        self._broken = False
        """Whether a move has failed."""
        try:
            if context.role == "decode":
                self._door = Door(context.host, context.link)
            reason = self._library.start(session(context.host, 0), self._role, options.device_id, options.nic)
        except Exception as error:  # whatever its native modules raise
            reason = f"{type(error).__name__}: {error}"
        self._started = not reason
        if _device is None and not reason:
            _device = options.device_id
        if reason:
            self.close()
            cause = "; ".join([reason, *missing()])
            raise BackendUnavailableError("MemFabric's engine could not be started", cause=cause, **who)

    @classmethod
    def probe(cls, options: Any) -> Probe:
        """Start an engine in another process. If that fails, look for what is missing."""
        try:
            version = library()
            reason, log = trial(options) if version else ("", "")
            found = {"memfabric": version, "devices": ", ".join(devices()), "driver": driver()[0], "log": log}
            details = {name: value or "none" for name, value in found.items()}
            if version and not reason:
                started = f"memfabric_hybrid {version} starts here, with {options.data_op_type}"
                return Probe(ok=True, reason=started, details=details)
            reason = "; ".join(filter(None, [reason, *missing()]))
        except Exception as error:  # a probe explains, and never raises
            return Probe(ok=False, reason=f"looking for what MemFabric needs failed: {error}")
        return Probe(ok=False, reason=f"MemFabric cannot run here: {reason}", hint=HINT, details=details)

    @classmethod
    def memory_kinds(cls, options: Any) -> frozenset[str]:
        """Host memory with ``HOST_RDMA``, and an NPU's with every kind of transfer."""
        return frozenset({"npu", "dram"} if options.data_op_type == "HOST_RDMA" else {"npu"})

    @classmethod
    def transports(cls, options: Any) -> frozenset[str]:
        """The transport in the options: ``sdma``, ``urma``, ``uboe``, or ``rdma`` for both kinds of RDMA."""
        return frozenset({options.transport})

    def transport(self, peer: str) -> str:
        """The transport in the options. Peers with another one are refused."""
        return self._options.transport if peer in self._peers else UNKNOWN

    @classmethod
    def diagnose(cls, options: Any) -> list[Check]:
        """Check what MemFabric needs of this machine."""
        return list(diagnose())

    def register(self, regions: Sequence[Region]) -> None:
        """Register all regions at once, so that the library merges those that share a page of 2 MiB.

        On prefill, the library only records the regions. It reports errors when a peer is connected.
        """
        engine = self._open()
        for index, region in enumerate(regions):
            cause = self._foreign(region)
            if cause:
                raise unregistered(index, region, cause, backend=self.name)
        self._table = RegionTable(regions, self.name)
        if not regions:
            return
        addresses, sizes = self._table.starts.tolist(), self._table.sizes.tolist()
        code, reason = self._library.call(engine.batch_register_memory, addresses, sizes)
        if code != 0:
            for index, region in enumerate(regions):
                alone = self._library.call(engine.batch_register_memory, [region.address], [region.nbytes])
                if alone[0] != 0:
                    raise unregistered(index, region, alone[1], backend=self.name)
            raise unregistered(f"{len(regions)} regions at once", regions[0], reason, backend=self.name)

    def descriptor(self) -> bytes:
        """The engine's address and role."""
        port = self._open().get_rpc_port()
        kind, door = self._options.data_op_type, self._door.port if self._door else 0
        return Descriptor(Descriptor.FORMAT, self._link, self._host, port, self._role, kind, door).encode()

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        """On prefill, reach decode's engine within the time-out. On decode, prefill's engine connects by itself."""
        self._open()
        offered = Descriptor.decode(descriptor, peer)
        lacks = offered.fits(self._role, self._options.data_op_type)
        if lacks:
            raise Descriptor.refused(peer, lacks)
        check = partial(unanswered, offered.host, offered.door, offered.port, peer)
        if self._role == "Prefill":
            self._reach(peer, offered.session, check)
        brief = partial(check, BRIEF_SECONDS) if self._role == "Prefill" else str
        self._peers[peer] = _Peer(offered.session, RegionTable(regions, self.name), brief)

    def submit(self, peer: str, batch: Batch) -> Transfer:
        """Move a batch. Returns when it has moved or failed."""
        engine = self._open()
        known = self._peers.get(peer)
        if known is None:
            raise TransferError("the peer is not connected", backend=self.name, peer=peer)
        ends = Ends.of(batch, self._table, known.table)
        gone = known.check() if known.suspect else ""
        if gone:
            raise TransferError("a batch was not started", cause=gone, backend=self.name, peer=peer)
        move = engine.batch_transfer_sync_write
        lists = (ends.here.tolist(), ends.there.tolist(), ends.nbytes.tolist())
        if known.patient is None:
            known.patient = time.monotonic() + self._options.connect_timeout
        code, reason = self._library.call(move, known.session, *lists)
        # Everything else was checked, so the library does not know this memory. A new peer may still become visible.
        while code == REFUSED and time.monotonic() < known.patient:
            time.sleep(RETRY_SECONDS)
            code, reason = self._library.call(move, known.session, *lists)
        known.suspect = code not in (0, REFUSED)
        self._broken = self._broken or known.suspect
        if code == 0:
            known.patient = 0.0
            return Transfer(Outcome(True))
        if code == REFUSED:
            cause = f"{reason}; it does not know the peer, or not its memory"
            raise TransferError("a batch was refused before it started", cause=cause, backend=self.name, peer=peer)
        # The device may have moved a part, and nobody can tell whether it continues.
        return Transfer(Outcome(False, f"{reason}, for {batch.blocks.count} blocks", settled=False))

    def poll(self, transfers: Sequence[Transfer]) -> None:
        """Does nothing, because the library has no transfers in progress."""

    def disconnect(self, peer: str) -> None:
        """Forget a peer. The library keeps its connection until the engine is destroyed."""
        self._peers.pop(peer, None)

    def close(self) -> None:
        """Use the engine no more. Blocks for a moment.

        The engine stays, and with it what is registered, until the next link of this process opens. If a first contact
        still waits, no other link can be opened before it ends.
        """
        self._closing = True
        self._peers.clear()
        if self._door is not None:
            self._door.close()
        self._contacts.close()

    def _reach(self, peer: str, session: str, check: Callable[[float], str]) -> None:
        """Make the first call to a session, so that the library connects. Makes none if the peer does not answer."""
        patience = self._options.connect_timeout
        until = time.monotonic() + patience
        try:
            gone = check(patience)
            if gone:
                raise Unreached(gone, "see whether it still runs, and whether this host may reach that address")
            left = max(until - time.monotonic(), patience / 2)
            self._contacts.make(peer, session, left, partial(check, min(BRIEF_SECONDS, patience)))
        except Unreached as error:
            self._open()
            raise Descriptor.refused(peer, error.cause, error.hint) from error

    def _first_call(self, session: str) -> str:
        """Transfer nothing.

        The library connects before it checks the lists, and then refuses them because they are empty.
        """
        code, reason = self._library.call(self._engine.batch_transfer_sync_write, session, [], [], [])
        if code == REFUSED:
            return ""
        reason = reason or "it took an empty batch, so this version connects in another way"
        return f"its engine at {session} cannot be reached: {reason}"

    def _end_former(self, seconds: float) -> str:
        """Destroy the engine of this process's last link. Returns why it did not end in so many seconds, or nothing."""
        global _ending
        if _former:
            end = partial(self._library.end, _former[0])
            ending = threading.Thread(target=end, name="statelink-ascend-end", daemon=True)
            try:
                ending.start()
            except RuntimeError as error:
                return f"no thread can be started that ends it: {error}"
            leave_in_library(ending)
            _ending = ending
            _former.clear()
        if _ending is not None:
            _ending.join(seconds)
            if _ending.is_alive():
                return "the library takes leave of its peers, and one does not answer"
        return ""

    def _release(self) -> None:
        """Leave the engine, so that the next link can start another one. `Contacts` calls it once.

        An engine that did not start has met no peer, and is destroyed: otherwise the next one would not start, either.
        """
        engine, self._engine = self._engine, None
        if self._started:
            (_abandoned if self._broken else _former).append(engine)
        else:
            self._library.end(engine)
        _taken.release()

    def _open(self) -> Any:
        if self._closing:
            raise TransferError("the backend is closed", backend=self.name)
        return self._engine

    def _foreign(self, region: Region) -> str:
        kind, _, device = region.kind.partition(":")
        if kind not in self.capabilities.memory_kinds:
            return "MemFabric does not know such memory"
        if kind == "dram" and self._options.data_op_type != "HOST_RDMA":
            return f"{self._options.data_op_type} moves an NPU's memory; host memory needs HOST_RDMA"
        if device not in ("", str(self._options.device_id)):
            return f"the engine runs on device_id {self._options.device_id}"
        return ""
