"""The backend: one engine for each link, and one session for each pair of memories.

All calls into the library are made under one lock, because those that set something up must not run beside transfers;
nothing waits for a transfer under it. The library has no cancel, and keeps bare pointers to the statuses it hands out:
each is kept until it ended, and somewhat longer, also after a disconnect.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec

from statelink.backend import (
    ANY,
    DIRECT,
    Backend,
    BackendContext,
    Batch,
    Capabilities,
    Fence,
    Op,
    Probe,
    Region,
    Side,
    SubmitMode,
    Transfer,
)
from statelink.errors import BackendUnavailableError, TransferError

from ._library import Engine, Library
from ._machine import active_ports, gpus, missing, trial
from ._options import Options
from ._tables import Offer, Table, covering, describe

__all__ = ["MoriBackend"]

LINGER = 1.0
"""Seconds that a status is kept after its end: its last notification comes after the end can be seen."""

_started: dict[bytes, str] = {}
"""Options with which an engine started on this machine, and the library's version."""
_orphans: list[Any] = []
"""Statuses that had no end when their engine was destroyed: never looked at again, and never freed."""


class _Peer:
    """An engine elsewhere, and what is kept of it."""

    __slots__ = ("engine", "leaving", "lost", "name", "offered", "sessions", "table")

    def __init__(self, name: str, engine: Engine, offered: Offer, regions: Sequence[Region]) -> None:
        self.name = name
        self.engine = engine
        self.offered = offered
        self.table = Table(regions)
        self.sessions: dict[tuple[int, int], Any] = {}
        self.lost = ""
        """Why its connection is dead; the library never repairs one."""
        self.leaving = False
        """Whether it was disconnected, and only waits for its last transfer."""


class _Work(Transfer):
    """A batch, and the statuses of it that have not ended."""

    __slots__ = ("peer", "statuses")

    def __init__(self, peer: _Peer) -> None:
        super().__init__()
        self.peer = peer
        self.statuses: list[Any] = []

    def failed(self, reason: str) -> None:
        """Fail it, unless it has an outcome; never settled, since other blocks of it may still move."""
        if self.outcome is None:
            self.fail(reason, settled=False)

    def ended(self) -> None:
        """Nothing of it failed, and nothing of it is in progress any more."""
        if self.outcome is None and self.peer.leaving:
            self.fail("the peer was disconnected while the transfer was in progress", settled=True)
        elif self.outcome is None:
            self.succeed()


class MoriBackend(Backend):
    """Moves bytes with MoRI."""

    api_version = 1
    name = "mori"
    Options = Options
    capabilities: ClassVar[Capabilities] = Capabilities(
        memory_kinds=frozenset({"dram", "cuda"}),
        state_types=ANY,
        ops=frozenset({Op.WRITE, Op.READ}),
        # A full send queue keeps the caller for up to five seconds.
        submit_mode=SubmitMode.BLOCKING,
        # There is no cancel: what is posted goes on until it ended, or the process that posted it did.
        fences=MappingProxyType({(op, side): Fence.MOVER for op in Op for side in Side}),
        # As many requests as a send queue holds. Over TCP, a peer drops its connection at about 65,500 blocks.
        max_blocks=8192,
        max_bytes=64 << 20,
        max_transfers=2,
        thread_safe=True,
        single_process=True,
        priority=70,  # it runs only on hardware of one kind, which somebody bought for this
    )
    strategies: ClassVar = {"*": DIRECT}

    def __init__(self, context: BackendContext) -> None:
        probe = self.probe(context.options)  # the library would end the process instead
        if not probe.ok:
            raise BackendUnavailableError(probe.reason, hint=probe.hint, backend=self.name)
        self._context = context
        self._options: Options = context.options
        self._library = Library()
        self._regions: tuple[Region, ...] = ()
        self._table = Table(())
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._works: list[_Work] = []
        self._ended: deque[tuple[float, Any]] = deque()
        self._spent: set[str] = set()
        """Keys of remote engines to which our engine's connection is dead."""
        self._engine: Engine | None = self._start(self._options.port)

    @classmethod
    def probe(cls, options: Any) -> Probe:
        """Start an engine in another process, and if that fails, look for what this machine lacks."""
        wanted, key = " and ".join(options.backends), msgspec.json.encode(options)
        try:
            details = {"gpus": ", ".join(gpus()) or "none", "active RDMA ports": ", ".join(active_ports()) or "none"}
            if key not in _started:
                good, said = trial(options)
                if not good:
                    lacks = "; ".join(missing(options)) or "nothing that is known"
                    reason = f"{said}. For {wanted}, this machine lacks: {lacks}"
                    return Probe(ok=False, reason=reason, hint="or choose another backend", details=details)
                _started[key] = said
        except Exception as error:  # a probe explains, and never raises
            return Probe(ok=False, reason=f"looking for what MoRI needs failed: {type(error).__name__}: {error}")
        return Probe(ok=True, reason=f"{_started[key]} with {wanted}", details={"library": _started[key], **details})

    def register(self, regions: Sequence[Region]) -> None:
        """Make all regions known; RDMA pins each when the first peer is connected."""
        with self._lock:
            self._open().register(regions)
            self._regions, self._table = tuple(regions), Table(regions)

    def descriptor(self) -> bytes:
        """The library's descriptors of the engine and of each memory, about 160 bytes each."""
        with self._lock:
            return Offer.encode(self._context.link, self._open(), self._library)

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        """Make sessions. While RDMA connects and fetches keys, up to 5 s, no Python thread of this process runs.

        TCP makes no contact before the first transfer.
        """
        offered = Offer.decode(descriptor, peer, regions, self._library)
        with self._lock:
            engine = self._open()
            if offered.engine.key == engine.desc.key:
                raise self._unreachable(peer, "a link cannot connect to itself")
            self._sweep()
            known = self._peers.get(peer)
            if known is not None:
                if any(work.peer is known for work in self._works):
                    cause = "transfers of its earlier connection have not ended"
                    raise self._unreachable(peer, cause, "try again once it answers or has died")
                self._forget(known)
            if offered.engine.key in self._spent:  # connections are never repaired, but a new engine makes new ones
                engine = self._start(port=0)
                engine.register(self._regions)
            known = self._peers[peer] = _Peer(peer, engine, offered, regions)
            try:
                engine.io.register_remote_engine(offered.engine)
                for near, far in sorted(covering(self._regions, regions)):
                    self._session(known, near, far)
            except BaseException:
                self._forget(known)
                raise

    def submit(self, peer: str, batch: Batch) -> Transfer:
        """Post one batch for each pair of memories; where a send queue is full, this takes a while."""
        with self._lock:
            self._open()
            known = self._peers.get(peer)
            if known is None or known.leaving:
                raise TransferError("the peer is not connected", backend=self.name, peer=peer)
            if known.lost:
                raise TransferError("the peer is lost", cause=known.lost, backend=self.name, peer=peer)
            work = _Work(known)
            self._works.append(work)
            try:
                for part in describe(batch.blocks, batch.op, self._table, known.table):
                    session = self._session(known, part.near, part.far)
                    post = session.batch_write if batch.op is Op.WRITE else session.batch_read
                    uid = session.allocate_transfer_uid()
                    work.statuses.append(post(*part.blocks, uid))
                    if work.statuses[-1].Failed():
                        break
            except (TransferError, RuntimeError, TypeError) as error:
                if not work.statuses:  # nothing was posted
                    if isinstance(error, TransferError):
                        raise
                    what = "MoRI refused a transfer before it started"
                    raise TransferError(what, cause=str(error), backend=self.name, peer=peer) from error
                work.failed(str(error))
            finally:
                self._sweep()
            return work

    def poll(self, transfers: Sequence[Transfer]) -> None:
        """Look at all that is posted, unless another thread is in the library: it looks before it leaves."""
        if self._lock.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._lock.release()

    def disconnect(self, peer: str) -> None:
        """Forget a peer, once nothing is posted to it any more; until then, its memory is not known to be quiet."""
        with self._lock:
            self._sweep()  # what ended before this succeeded
            known = self._peers.get(peer)
            if known is not None:
                known.leaving = True
                self._sweep()

    def close(self) -> None:
        """Destroy the engine. Its destructor joins threads, during which no Python thread runs."""
        with self._lock:
            self._sweep()
            engine, self._engine = self._engine, None
            for work in self._works:
                work.failed("the backend was closed while the transfer was in progress")
                _orphans.extend(work.statuses)
            for known in self._peers.values():
                known.sessions.clear()  # all of them, before the first engine goes
            for known in list(self._peers.values()):
                self._forget(known)
            if engine is not None:
                engine.close()
            self._works = []
            self._ended.clear()

    def _start(self, port: int) -> Engine:
        """An engine with a key that no process ever had."""
        key = f"{self._context.link}-{uuid.uuid4().hex}"
        return Engine(self._library, key, self._context.host, self._options, port)

    def _open(self) -> Engine:
        if self._engine is None:
            raise TransferError("the backend is closed", backend=self.name)
        return self._engine

    def _session(self, known: _Peer, near: int, far: int) -> Any:
        """The session of a pair of regions, made where there is none yet.

        Raises:
            TransferError: The library refuses the pair.
        """
        session = known.sessions.get((near, far))
        if session is None:
            pair = f"region {near} here and region {far} there"
            cause = f"{pair}: none of {list(self._options.backends)} can serve them"
            try:
                session = known.engine.io.create_session(known.engine.memories[near], known.offered.memories[far])
            except (RuntimeError, TypeError) as error:
                cause = f"{pair}: {error}; it has {known.offered.library}, this is {self._library.version}"
            if session is None:
                raise self._unreachable(known.name, cause)
            known.sessions[near, far] = session
        return session

    def _sweep(self) -> None:
        """See what ended, and forget what nothing holds any more. Called with the lock held."""
        now = time.monotonic()
        for work in self._works:
            left = []
            for status in work.statuses:
                if status.Failed():
                    code = status.Code().name
                    work.failed(f"{code}: {status.Message()}")
                    if code == "ERR_RDMA_OP":
                        work.peer.lost = work.peer.lost or status.Message()
                        self._spent.add(work.peer.offered.engine.key)
                elif not status.Succeeded():
                    left.append(status)
                    continue
                self._ended.append((now, status))
            work.statuses = left
            if not left:
                work.ended()
        self._works = [work for work in self._works if work.statuses]
        while self._ended and self._ended[0][0] < now - LINGER:
            self._ended.popleft()
        for known in [known for known in self._peers.values() if known.leaving]:
            if not any(work.peer is known for work in self._works):
                self._forget(known)

    def _forget(self, known: _Peer) -> None:
        del self._peers[known.name]
        known.sessions.clear()
        if known.engine is self._engine:
            known.engine.io.deregister_remote_engine(known.offered.engine)
        else:  # it was made for this peer, or is about to be destroyed
            known.engine.close()

    def _unreachable(self, peer: str, cause: str, hint: str = "") -> TransferError:
        what = "a peer cannot be connected over MoRI"
        return TransferError(what, cause=cause, hint=hint, backend=self.name, peer=peer)
