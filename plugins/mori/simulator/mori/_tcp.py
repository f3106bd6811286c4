"""TCP, in which the target's threads check, place and answer."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _host, _sockets, _status
from ._configs import TcpBackendConfig
from ._onesided import Backend
from ._status import StatusCode, TransferStatus

if TYPE_CHECKING:
    from ._descs import EngineDesc, MemoryDesc
    from ._engine import Core
    from ._host import U64

CONTROL_BYTES = 1 << 20
BLOCK_BYTES = 16
IN_KERNEL = 1 << 17
"""Writes of up to so many bytes travel through the socket, where they are when their writer dies."""


class _Op:
    def __init__(self, status: TransferStatus, deadline: float) -> None:
        self.status = weakref.ref(status)
        self.deadline = deadline


class _Peer:
    """The connection to one engine, made by the first operation that needs it."""

    def __init__(self, desc: EngineDesc | None, timeout: float) -> None:
        self.desc = desc
        self.timeout = timeout
        self.ops: dict[int, _Op] = {}
        self.lock = threading.Lock()
        self.socket: socket.socket | None = None

    def send(self, message: Any) -> None:
        with self.lock:
            if self.socket is None:
                if self.desc is None:
                    return  # nobody knows where it is: the operation times out
                self.socket = socket.create_connection((self.desc.host, self.desc.port), 5)
                self.socket.settimeout(None)
                threading.Thread(target=self._listen, args=(self.socket,), daemon=True).start()
            connection = self.socket
        _sockets.send(connection, message)

    def _listen(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, _sockets.DropError):
            while True:
                uid, code, text, aborts = _sockets.receive(connection)
                if aborts:
                    self.abort(StatusCode(code), text)
                    return
                op = self.ops.pop(uid, None)
                if op is not None:
                    _status.end(op.status(), StatusCode(code), text)
        if self.socket is connection:
            self.abort(StatusCode.ERR_BAD_STATE, "TCP: connection lost")

    def abort(self, code: StatusCode, text: str) -> None:
        """End every operation of the peer with one operation's error; the next one connects anew."""
        with self.lock:
            ops, self.ops = self.ops, {}
            connection, self.socket = self.socket, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for op in ops.values():
            _status.end(op.status(), code, text)

    def look(self) -> None:
        if any(op.deadline < time.monotonic() for op in list(self.ops.values())):
            what = "connection" if self.socket is None else "operation"
            self.abort(StatusCode.ERR_BAD_STATE, f"TCP: {what} timeout")


class Tcp(Backend):
    """The transport of the branch."""

    paced = False

    def __init__(self, core: Core, config: TcpBackendConfig | None) -> None:
        self.config = config or TcpBackendConfig()
        host = core.config.host or "0.0.0.0"
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise RuntimeError(f"TCP: invalid listen IPv4 address: {host}") from None
        try:
            self._server = _sockets.Server(host, core.config.port, self._answer, parallel=True)
        except OSError as error:
            raise RuntimeError(f"TCP: bind {host}:{core.config.port}: {error.strerror}") from error
        core.config.port = self._server.port
        self._peers: dict[str, _Peer] = {}
        super().__init__(core)
        threading.Thread(target=self._time, daemon=True).start()

    def close(self) -> None:
        self._server.close()
        for peer in list(self._peers.values()):
            peer.abort(StatusCode.ERR_BAD_STATE, "TCP: transport shutdown")
        super().close()

    def session(self, local: MemoryDesc, remote: MemoryDesc) -> str | None:
        """Purely local."""
        return str(remote.engine_key)

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
            return _status.failed(StatusCode.ERR_INVALID_ARGS, "TCP: lengths of offsets and sizes differ")
        if not len(sizes):
            return _status.done()
        for offsets, memory in ((near, local), (far, remote)):
            if ((sizes > memory.size) | (offsets > np.uint64(memory.size) - np.minimum(sizes, memory.size))).any():
                return _status.failed(StatusCode.ERR_INVALID_ARGS, "TCP: out of range")
        if local.id not in self.memories:
            return _status.failed(StatusCode.ERR_INVALID_ARGS, f"TCP: invalid {kind} request")
        least, target = self.config.striping_threshold_bytes, far if kind == "write" else near
        if self.config.num_data_conns > 1 and least and int(sizes.sum()) >= least:
            order = np.argsort(target, kind="stable")
            if (target[order][1:] < (target + sizes)[order][:-1]).any():
                return _status.failed(
                    StatusCode.ERR_INVALID_ARGS, "TCP: overlapping destination segments cannot be striped"
                )
        near, far, sizes = _merged(near, far, sizes)
        known = self.remotes.get(remote.engine_key)
        peer = self._peers.setdefault(remote.engine_key, _Peer(known, self._timeout))
        peer.desc = known
        if uid in peer.ops:
            return _status.failed(StatusCode.ERR_BAD_STATE, "TCP: duplicate peer/op id")
        status = TransferStatus()
        _status.begin(status, self.core)
        peer.ops[uid] = _Op(status, time.monotonic() + self._timeout)
        # Where ours is goes along, because the other side copies; the library's limit does not count it.
        here = (near + np.uint64(local.data)).tobytes()
        raw = [here, far.tobytes(), sizes.tobytes()]
        message = [kind, uid, remote.id, os.getpid(), self.config.num_data_conns]
        small = kind == "write" and int(sizes.sum()) <= IN_KERNEL

        def job() -> None:
            payload = _host.gather(np.frombuffer(here, np.uint64), sizes) if small else b""
            try:
                peer.send([*message, payload, *raw])
            except OSError:
                peer.abort(StatusCode.ERR_BAD_STATE, "TCP: connection lost")

        self.later(job)
        return status

    @property
    def _timeout(self) -> float:
        return self.config.op_timeout_ms / 1000 if self.config.op_timeout_ms > 0 else float("inf")

    def _time(self) -> None:
        while self.core.running:
            time.sleep(0.01)
            for peer in list(self._peers.values()):
                peer.look()

    def _answer(self, message: list[Any]) -> list[Any]:
        kind, uid, number, pid, conns, payload, *raw = message
        near, far, sizes = (np.frombuffer(each, np.uint64) for each in raw)
        if len(sizes) * BLOCK_BYTES + 64 > CONTROL_BYTES or conns > self.config.num_data_conns:
            raise _sockets.DropError
        code, text, aborts = StatusCode.SUCCESS, "", False
        memory = self.memories.get(number)
        if memory is None:
            aborts = kind == "write"
            code = StatusCode.ERR_INVALID_ARGS if aborts else StatusCode.ERR_NOT_FOUND
            text = "TCP: invalid write request" if aborts else "TCP: remote mem not found"
        else:
            self.core.wait()
            there = far + np.uint64(memory.data)
            if payload:
                problem = _host.scatter(payload, there, sizes)
            else:
                problem = _host.copy(pid, there, near, sizes, write=kind == "read")
            if problem:
                code, text = StatusCode.ERR_BAD_STATE, "TCP: data connection closed by peer"
        return [uid, int(code), text, aborts]


def _merged(near: U64, far: U64, sizes: U64) -> tuple[U64, U64, U64]:
    """Neighbours in the list that are neighbours on both sides become one."""
    joined = (near[1:] == near[:-1] + sizes[:-1]) & (far[1:] == far[:-1] + sizes[:-1])
    starts = np.flatnonzero(np.concatenate(([True], ~joined)))
    return near[starts], far[starts], np.add.reduceat(sizes, starts)
