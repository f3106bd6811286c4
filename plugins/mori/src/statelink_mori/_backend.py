"""The backend: one engine for each link, and one session for each pair of memories.

All calls to the library are made under one lock, because set-up calls must not run beside transfers. Nothing waits for
a transfer under this lock. The library cannot cancel. It keeps raw pointers to the statuses that it returns. So each
status is kept until it has ended, and for some time after. That holds after a disconnect, too.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

from statelink.backend import (
    ANY,
    DIRECT,
    BackendContext,
    Batch,
    Capabilities,
    Check,
    Ends,
    Fence,
    Probe,
    Region,
    RegionTable,
    SubmitMode,
    Transfer,
)
from statelink.backend.native import Ledger, Posted, PostingBackend, Remote, unreachable
from statelink.errors import BackendUnavailableError, TransferError

from ._library import Engine, Library
from ._machine import POLL_MODE, active_ports, diagnose, gpus, harm, hint, missing, trial, what_is_tried
from ._options import Options
from ._tables import Offer, covering, parts_of

__all__ = ["MoriBackend"]

LINGER_SECONDS = 1.0
"""Seconds for which a status is kept after its end, because its last notification comes after the end is visible."""
LEFT_BEHIND = 256
"""The log mentions the connections that the library keeps after this many peers have gone, and again after as many."""
PINNED = "did its process end? MoRI ends one whose memory cannot be pinned: see its output, and its limit on that"

log = logging.getLogger("statelink.mori")

_started: dict[bytes, str] = {}
"""Trials in which an engine started on this machine, with the library's version."""
_orphans: list[Any] = []
"""Statuses that had not ended when their engine was destroyed, or that failed over RDMA.

The library may still use them, so they are never read again and never freed. Such a failure also ends the connection to
the peer, so a connection leaves few of them.
"""


class _Peer(Remote):
    """A remote engine, and what the backend keeps for it."""

    __slots__ = ("engine", "offered", "sessions")

    def __init__(self, name: str, table: RegionTable, engine: Engine, offered: Offer, transport: str) -> None:
        super().__init__(name, table, transport)
        self.engine = engine
        self.offered = offered
        self.sessions: dict[tuple[int, int], Any] = {}


class MoriBackend(PostingBackend[_Peer]):
    """Moves bytes with MoRI."""

    api_version = 1
    name = "mori"
    Options = Options
    capabilities: ClassVar[Capabilities] = Capabilities(
        memory_kinds=frozenset({"dram", "cuda"}),
        state_types=ANY,
        # A full send queue blocks the caller for up to five seconds.
        submit_mode=SubmitMode.BLOCKING,
        # The library cannot cancel. A transfer continues until it ends, or until the process that posted it ends.
        source=Fence.MOVER,
        target=Fence.MOVER,
        max_blocks=8192,  # the size of a send queue
        max_bytes=64 << 20,
        max_transfers=2,
        joins_rooms=True,
        thread_safe=True,
        stalled_peers=0,  # one lock guards the library, and a full send queue waits under it
        single_process=True,
        priority=70,  # it runs only on special hardware, which was bought for this
    )
    strategies: ClassVar = {"*": DIRECT}

    def __init__(self, context: BackendContext) -> None:
        probe = self.probe(context.options)  # the library would end the process instead
        if not probe.ok:
            raise BackendUnavailableError(probe.reason, hint=probe.hint, backend=self.name)
        self._context = context
        self._options: Options = context.options
        try:
            self._library = Library()
        except Exception as error:  # it could be imported in another process, but not in this one
            cause = f"{type(error).__name__}: {error}"
            raise BackendUnavailableError("MoRI cannot be imported here", cause=cause, backend=self.name) from error
        self._regions: tuple[Region, ...] = ()
        self._table = RegionTable((), self.name)
        self._lock = threading.Lock()
        self._ledger: Ledger[_Peer] = Ledger(self.name, self._ended, self._forget)
        self._finished: deque[tuple[float, Any]] = deque()
        self._left = 0
        """Number of peers that are gone and whose connections the engine keeps."""
        self._spent: set[str] = set()
        """Keys of remote engines with a dead connection."""
        self._engine: Engine | None = self._start(self._options.port)

    @classmethod
    def probe(cls, options: Any) -> Probe:
        """Start an engine in another process. If that fails, look for what this machine lacks."""
        wanted = " and ".join(options.backends)
        try:
            key = what_is_tried(options)
            details = {"gpus": ", ".join(gpus()) or "none", "active RDMA ports": ", ".join(active_ports()) or "none"}
            event = harm(POLL_MODE) if "RDMA" in options.backends else ""
            if event:
                return Probe(ok=False, reason=event, hint=f"unset {POLL_MODE}", details=details)
            if key not in _started:
                good, said = trial(options)
                if not good:
                    lacks = "; ".join(missing(options)) or "nothing that is known"
                    reason = f"{said}. For {wanted}, this machine lacks: {lacks}"
                    return Probe(ok=False, reason=reason, hint=hint(), details=details)
                _started[key] = said
        except Exception as error:  # a probe explains, and never raises
            return Probe(ok=False, reason=f"looking for what MoRI needs failed: {type(error).__name__}: {error}")
        return Probe(ok=True, reason=f"{_started[key]} with {wanted}", details={"library": _started[key], **details})

    @classmethod
    def transports(cls, options: Any) -> frozenset[str]:
        """``rdma`` and ``xgmi``, as far as the options name them, or the environment adds XGMI."""
        return frozenset(options.transports)

    @classmethod
    def diagnose(cls, options: Any) -> list[Check]:
        """Check what each transport needs of this machine, and look for harmful settings of the library."""
        return list(diagnose(options))

    def register(self, regions: Sequence[Region]) -> None:
        """Register all regions, and refuse those that the system would not pin.

        RDMA pins each region when the first peer is connected, and ends the process if it cannot.
        """
        with self._lock:
            self._open().register(regions)
            self._regions, self._table = tuple(regions), RegionTable(regions, self.name)

    def descriptor(self) -> bytes:
        """The library's descriptors of the engine and of each memory. Each has about 160 bytes."""
        with self._lock:
            return Offer.encode(self._context.link, self._open(), self._library, self._options)

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        """Make sessions. While RDMA connects and fetches keys, up to 5 s, no Python thread of this process runs.

        RDMA pins memory. If memory cannot be pinned here, the library ends this process. If it cannot be pinned at the
        peer, it ends the peer's process.
        """
        with self._lock:
            engine = self._open()
            self._hear()
            offered = Offer.decode(descriptor, peer, regions, self._library, self._options)
            if offered.engine.key == engine.desc.key:
                raise unreachable("MoRI", peer, "a link cannot connect to itself", backend=self.name)
            self._ledger.make_room(peer)
            # The library never repairs connections, but a new engine makes new ones.
            if offered.engine.key in self._spent:
                engine = self._start(port=0)
                engine.register(self._regions)
            word = offered.transport(self._options, engine.desc, (*self._regions, *regions))
            known = _Peer(peer, RegionTable(regions, self.name), engine, offered, word)
            self._ledger.add(known)
            try:
                engine.io.register_remote_engine(offered.engine)
                for near, far in sorted(covering(engine.memories, offered.memories)):
                    self._session(known, near, far)
            except BaseException:
                self._ledger.remove(known)
                raise

    def submit(self, peer: str, batch: Batch) -> Transfer:
        """Post one batch for each pair of memories. This takes long if a send queue is full."""
        with self._lock:
            self._open()
            self._hear()
            known = self._ledger.usable(peer)
            parts = parts_of(Ends.of(batch, self._table, known.table), self._table, known.table)
            # All sessions are made before the first batch is posted, so that nothing is in flight if one cannot be
            # made.
            sessions = [(self._session(known, near, far), blocks) for near, far, blocks in parts]
            work = Posted(known)
            self._ledger.posted.append(work)
            try:
                for session, blocks in sessions:
                    work.handles.append(session.batch_write(*blocks, session.allocate_transfer_uid()))
                    if work.handles[-1].Failed():
                        break
            except (RuntimeError, TypeError) as error:
                if not work.handles:
                    what = "MoRI refused a transfer before it started"
                    raise TransferError(what, cause=str(error), backend=self.name, peer=peer) from error
                work.fail(str(error), settled=False)  # other parts of it may still be in flight
            finally:
                self._sweep()  # this also forgets a batch of which nothing was posted
            return work

    def close(self) -> None:
        """Destroy the engine. Its destructor joins threads, during which no Python thread runs."""
        with self._lock:
            handles, peers = self._ledger.close()
            _orphans.extend(handles)
            for known in peers:
                known.sessions.clear()  # all statuses, before the first engine is destroyed
            for engine in (self._engine, *(known.engine for known in peers)):
                if engine is not None:
                    engine.close()
            self._engine = None
            self._finished.clear()

    def _start(self, port: int) -> Engine:
        """An engine with a key that no other process ever had."""
        key = f"{self._context.link}-{uuid.uuid4().hex}"
        return Engine(self._library, key, self._context.host, self._options, port)

    def _open(self) -> Engine:
        if self._engine is None:
            raise TransferError("the backend is closed", backend=self.name)
        return self._engine

    def _session(self, known: _Peer, near: int, far: int) -> Any:
        """The session of a pair of regions. Makes one if there is none.

        Raises:
            TransferError: The library refuses the pair.
        """
        session = known.sessions.get((near, far))
        if session is None:
            pinned = ""
            pair = f"region {near} here and region {far} there"
            cause = f"{pair}: none of {list(self._options.backends)} can serve them"
            try:
                session = known.engine.io.create_session(known.engine.memories[near], known.offered.memories[far])
            except (RuntimeError, TypeError) as error:
                cause = f"{pair}: {error}; it has {known.offered.library}, this is {self._library.version}"
                pinned = PINNED if "EOF" in str(error) else ""
            if session is None:
                raise unreachable("MoRI", known.name, cause, backend=self.name, hint=pinned)
            known.sessions[near, far] = session
        return session

    def _sweep(self) -> None:
        """Find transfers that have ended, and free those that ended some time ago. The caller holds the lock."""
        super()._sweep()
        self._hear()
        while self._finished and self._finished[0][0] < time.monotonic() - LINGER_SECONDS:
            self._finished.popleft()

    def _hear(self) -> None:
        """Mark peers as lost whose connection broke without a transfer. The caller holds the lock.

        MoRI tells since 1.2.4. An older one says nothing, and the next transfer to the peer fails.
        """
        peers = self._ledger.peers()
        for engine in {engine for engine in (self._engine, *(known.engine for known in peers)) if engine is not None}:
            for key, said in engine.failures():
                if not key:  # of a port or a device: connections may outlive it
                    log.warning("MoRI reports: %s (link %s)", said, self._context.link)
                    continue
                self._spent.add(key)
                for known in peers:
                    if known.engine is engine and known.offered.engine.key == key:
                        known.lost = known.lost or said

    def _ended(self, work: Posted[_Peer], status: Any) -> bool:
        """Whether the part of a transfer that has this status has ended. If it failed, the transfer fails.

        That does not prove that the other parts of the transfer have stopped.
        """
        if status.Failed():
            code = status.Code().name
            if work.outcome is None:
                work.fail(f"{code}: {status.Message()}", settled=False)
            if code == "ERR_RDMA_OP":
                work.peer.lost = work.peer.lost or status.Message()
                self._spent.add(work.peer.offered.engine.key)
            if "RDMA" in self._options.backends:
                _orphans.append(status)
                return True
        elif not status.Succeeded():
            return False
        self._finished.append((time.monotonic(), status))
        return True

    def _forget(self, known: _Peer) -> None:
        known.sessions.clear()
        if known.engine is self._engine:
            known.engine.io.deregister_remote_engine(known.offered.engine)
            self._left += 1
            if "RDMA" in self._options.backends and self._left % LEFT_BEHIND == 0:
                said = "MoRI keeps the RDMA connections of %d peers that are gone, until this link is closed (link %s)"
                log.warning(said, self._left, self._context.link)
        else:  # the session was made for this peer
            known.engine.close()
