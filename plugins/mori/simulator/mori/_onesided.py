"""Transports that reach the other process's memory by themselves: RDMA and XGMI."""

from __future__ import annotations

import os
import queue
import random
import signal
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import _configs, _host, _sockets, _status
from ._configs import MemoryLocationType, PeerFailureReason, RdmaBackendConfig
from ._memory import Place
from ._status import StatusCode, TransferStatus

if TYPE_CHECKING:
    from ._descs import EngineDesc, MemoryDesc
    from ._engine import Core
    from ._host import U64

SEND_WR = 8192
RETRIES = "transport retry counter exceeded"
FLUSHED = "Work Request Flushed Error"
HINT = " Hint: check that the peer is alive and its memory is registered"


class Backend:
    """What the transports have in common: a thread that does what was submitted, later."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.memories: dict[int, MemoryDesc] = {}
        self.remotes: dict[str, EngineDesc] = {}
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def later(self, job: Callable[[], None]) -> None:
        self._queue.put(job)

    def close(self) -> None:
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            self.core.wait()
            if not self.core.running:
                return
            job()


class PeerFailureEvent(NamedTuple):
    """A connection that failed."""

    reason: PeerFailureReason
    remote_engine_key: str
    detail: str


class _Qp:
    """A connection, for good: nothing repairs one. The environment sets the length of its queue when it is made."""

    def __init__(self, peer: str, place: Place) -> None:
        self.peer = peer
        self.place = place
        self.broken = False
        self.degraded = False
        self.depth = int(os.environ.get("MORI_IO_QP_MAX_SEND_WR", "0")) or SEND_WR
        self.patience = int(os.environ.get("MORI_IO_SQ_BACKOFF_TIMEOUT_US", "5000000")) / 1e6
        self.queued = 0


def _merged(near: U64, far: U64, sizes: U64) -> U64:
    """Bytes of each request: neighbours on the far side that are neighbours here become one."""
    order = np.argsort(far, kind="stable")
    near, far, sizes = near[order], far[order], sizes[order]
    joined = (near[1:] == near[:-1] + sizes[:-1]) & (far[1:] == far[:-1] + sizes[:-1])
    return np.add.reduceat(sizes, np.flatnonzero(np.concatenate(([True], ~joined))))


Where = tuple[MemoryLocationType, int, int]


def _where(memory: MemoryDesc) -> Where:
    """What connections are kept by, on each side."""
    return memory.loc, memory.device_id, memory.numa_node


class Rdma(Backend):
    """RDMA, and the port of its control plane."""

    def __init__(self, core: Core, config: RdmaBackendConfig | None) -> None:
        if _host.gpus() < 1:
            _host.leave("[ROCm-SMI] rsmi_num_monitor_devices reported 0 GPUs")
        if _host.active_ports() < 1:
            said = "no active RDMA device on this host; set MORI_DISABLE_AUTO_XGMI=0 to enable XGMI-only fallback"
            raise RuntimeError(said)
        self.config = _configs.effective(config or RdmaBackendConfig())
        try:
            address = socket.inet_ntoa(socket.inet_aton(core.config.host or "0.0.0.0"))
        except OSError:
            address = "255.255.255.255"  # what inet_addr() says of whatever it does not understand
        try:
            self._server = _sockets.Server(address, core.config.port)
        except OSError as error:
            _host.leave(f"listen on {core.config.host}:{core.config.port}: {error}")
        core.config.port = self._server.port
        core.table.publish(self._server.port)
        self.qps: dict[tuple[str, Where, Where], _Qp] = {}
        """Connections. None is ever taken out, whoever is deregistered."""
        self._pinned: dict[int, int] = {}
        self._keys: dict[tuple[str, int], tuple[int, int]] = {}
        self._max_msg = _host.max_msg()
        self._failures: deque[PeerFailureEvent] = deque()
        super().__init__(core)

    def close(self) -> None:
        self._server.close()
        super().close()

    def session(self, local: MemoryDesc, remote: MemoryDesc) -> _Qp | None:
        """Connect, pin, and fetch the remote key, all of it with the interpreter's lock held.

        Memory that cannot be pinned ends the process whose memory it is.

        Raises:
            RuntimeError: Any other trouble.
        """
        if local.id in self.memories:
            self._pin(local)
        place = (remote.engine_key, _where(local), _where(remote))
        key = (remote.engine_key, remote.id)
        if place not in self.qps or key not in self._keys:
            desc = self.remotes[remote.engine_key]
            there = self._ask(desc)
            address, size = there.get(remote.id)
            if size == remote.size and not _host.mapped(there.pid, address, size):
                os.kill(there.pid, signal.SIGABRT)  # what its own thread does to it
                raise RuntimeError("ReadMessageHeader(type) failed: expected 1 byte(s), received 0 before EOF")
            self.qps.setdefault(place, _Qp(remote.engine_key, there))
            if size != remote.size:
                raise RuntimeError(
                    f"RdmaBackend::CreateSession: remote MR size mismatch for engine {remote.engine_key} "
                    f"rdevId=0 memId={remote.id} expected={remote.size} got={size}"
                )
            self._keys[key] = (address, size)
        return self.qps[place]

    def _pin(self, local: MemoryDesc) -> None:
        self._pinned[local.id] = local.size
        if sum(self._pinned.values()) > _host.memlock() or not _host.mapped(os.getpid(), local.data, local.size):
            _host.abort(f"RegisterRdmaMemoryRegionAuto: ibv_reg_mr of {local.size} bytes at {local.data:#x} failed")

    def submit(
        self,
        kind: str,
        local: MemoryDesc,
        remote: MemoryDesc,
        blocks: tuple[U64, U64, U64],
        uid: int,
        *,
        state: Any,
    ) -> TransferStatus:
        near, far, sizes = blocks
        qp: _Qp = state
        if not self.config.qp_per_transfer:
            return _status.failed(StatusCode.ERR_INVALID_ARGS, "no endpoints")
        if not len(near) == len(far) == len(sizes):
            said = "lengths of local offsets, remote offsets or sizes mismatch"
            return _status.failed(StatusCode.ERR_INVALID_ARGS, said)
        if not len(sizes):
            return _status.done()
        if qp.degraded:
            return _status.failed(StatusCode.ERR_RDMA_OP, "EP is degraded, rejecting new submissions")
        requests = _merged(near, far, sizes)
        problem = self._problem(local, remote, blocks, requests)
        if problem:
            return _status.failed(StatusCode.ERR_INVALID_ARGS, problem)
        status = TransferStatus()
        found = weakref.ref(status)
        if not self._takes(qp, len(requests)):
            full = f"SQ full (batch): ep=0 depth={qp.queued} requested={len(requests)} max={qp.depth}"
            status.Update(StatusCode.ERR_RDMA_OP, full + HINT)
            if self.config.qp_per_transfer > 1:  # what was posted on the others still points at it
                _status.hold(status, self.core)
                self.later(lambda: _status.end(found(), StatusCode.SUCCESS, ""))
            return status
        _status.begin(status, self.core)
        qp.queued += len(requests)
        self.later(lambda: self._move(found, kind, local, remote, blocks, qp, len(requests)))
        return status

    def pop_failure(self) -> PeerFailureEvent | None:
        """See `IOEngine.pop_peer_failure`."""
        for qp in self.qps.values() if _host.fault() else ():
            if not qp.degraded:
                qp.broken = qp.degraded = True
                detail = "IBV_EVENT_QP_FATAL on device simulated0 qpn=100"
                self._failures.append(PeerFailureEvent(PeerFailureReason.LOCAL_QP_ERROR, qp.peer, detail))
        return self._failures.popleft() if self._failures else None

    def _takes(self, qp: _Qp, requests: int) -> bool:
        """Whether the send queue drains in time, for which the caller waits. One batch may be longer than the queue."""
        until = time.monotonic() + qp.patience
        while qp.queued and qp.queued + requests > qp.depth:
            if time.monotonic() > until:
                return False
            time.sleep(0.0005)
        return True

    def _problem(self, local: MemoryDesc, remote: MemoryDesc, blocks: tuple[U64, U64, U64], requests: U64) -> str:
        near, far, sizes = blocks
        for offsets, memory in ((near, local), (far, remote)):
            if ((sizes > memory.size) | (offsets > np.uint64(memory.size) - np.minimum(sizes, memory.size))).any():
                return "length out of range"
        most = int(requests.max())
        if not self.config.enable_transfer_chunking and most > self._max_msg:
            number = int(requests.argmax())
            return (
                f"merged RDMA WR {number} length {most} exceeds local max_msg_sz {self._max_msg}; "
                "enable RDMA transfer chunking or reduce batch size"
            )
        return ""

    def _move(self, found: Any, kind: str, local: Any, remote: Any, blocks: Any, qp: _Qp, requests: int) -> None:
        qp.queued -= requests
        problem = self._broken(qp, local, remote)
        if not problem:
            near, far, sizes = blocks
            order = np.random.default_rng().permutation(len(sizes))
            base, _ = self._keys[remote.engine_key, remote.id]
            here, there = near[order] + np.uint64(local.data), far[order] + np.uint64(base)
            problem = _host.copy(qp.place.pid, here, there, sizes[order], write=kind == "write")
            problem = problem and f"remote access error ({problem})"
        if problem:
            qp.broken = True
            if problem == RETRIES:
                detail = f"completion status {RETRIES}: peer did not acknowledge within the transport retry budget"
                self._failures.append(PeerFailureEvent(PeerFailureReason.PEER_UNREACHABLE, qp.peer, detail))
            hint = "" if problem == FLUSHED else HINT
            _status.end(found(), StatusCode.ERR_RDMA_OP, problem + hint)
            return
        _status.end(found(), StatusCode.SUCCESS, "success")

    def _broken(self, qp: _Qp, local: MemoryDesc, remote: MemoryDesc) -> str:
        if qp.broken:
            return FLUSHED
        if _host.broken() or not qp.place.alive():
            return RETRIES
        if local.id not in self.memories:
            return "local protection error"
        if qp.place.get(remote.id) != self._keys[remote.engine_key, remote.id]:
            return "remote access error"
        return ""

    def _ask(self, desc: EngineDesc) -> Place:
        place: Place = _sockets.reach_with_the_lock(
            desc.host, desc.port, lambda: Place.published(desc.pid, desc.port), _host.control_timeout()
        )
        return place


class Xgmi(Backend):
    """Copies between GPUs of one node, whose end is seen by whoever polls."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._mapped: set[bytes] = set()

    @classmethod
    def can(cls, local: MemoryDesc, remote: MemoryDesc, desc: EngineDesc | None, node: str) -> bool:
        gpu = MemoryLocationType.GPU
        return local.loc is gpu and remote.loc is gpu and desc is not None and desc.node_id == node

    def session(self, local: MemoryDesc, remote: MemoryDesc) -> Place | None:
        place = Place.of(remote.ipc_handle)
        if remote.ipc_handle not in self._mapped:  # a mapping is kept, whatever becomes of its owner
            if not _host.gpus() or not place.alive():
                return None
            self._mapped.add(remote.ipc_handle)
        return place

    def submit(
        self,
        kind: str,
        local: MemoryDesc,
        remote: MemoryDesc,
        blocks: tuple[U64, U64, U64],
        uid: int,
        *,
        state: Any,
    ) -> TransferStatus:
        near, far, sizes = blocks
        if not len(near) == len(far) == len(sizes):
            _host.abort("Assertion `sizes.size() == localOffsets.size()' failed")
        if not len(sizes):
            return _status.done()
        status, result = TransferStatus(), list[tuple[StatusCode, str]]()
        _status.begin(status, self.core)
        _status.watch(status, lambda: result[0] if result else None)
        order = random.sample(range(len(sizes)), len(sizes))

        def job() -> None:  # no bounds are checked
            here, there = near[order] + np.uint64(local.data), far[order] + np.uint64(remote.data)
            problem = _host.copy(state.pid, here, there, sizes[order], write=kind == "write")
            result.append((StatusCode.ERR_GPU_OP, f"hipMemcpy: {problem}") if problem else (StatusCode.SUCCESS, ""))

        self.later(job)
        return status
