"""The receiving side: a thread for each peer checks every batch against the grants and puts its bytes in place."""

from __future__ import annotations

import errno
import threading
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from statelink.backend import logger

from . import _iovec
from ._copying import PIECE_BYTES, Copier
from ._frames import (
    HEADER,
    MOST_AGAIN,
    BadFrameError,
    Header,
    Mode,
    Status,
    check_lengths,
    pack_reply,
    unpack_header,
)
from ._handshake import Welcome, frame, token_is_readable
from ._inbox import Inbox
from ._iovec import Vectors
from ._stream import MORE_THREADS, POLLIN, Interrupted, Lost, Stream, Waker

if TYPE_CHECKING:
    import socket

    from ._grants import Grant, Grants
    from ._handshake import Hello, Proof
    from ._iovec import U64

__all__ = ["Caller", "Receiver"]

log = logger("statelink.tcp")

SCRATCH: Final = 256 << 10
"""Memory for refused payload. It is overwritten again and again."""
CANNOT_READ: Final = (errno.EPERM, errno.ESRCH, errno.ENOSYS)
"""Errors that mean that the memory cannot be read. Permission can end, for example if a sender drops privileges."""


class Caller(NamedTuple):
    """A connection whose sender has authenticated.

    Attributes:
        sock: The connection. The holder of this object closes it.
        key: The pair's key.
        hello: The sender's first message.
        nonce: The nonce of the challenge.
        proof: The sender's proof.
    """

    sock: socket.socket
    key: bytes
    hello: Hello
    nonce: bytes
    proof: Proof


class Receiver:
    """Serves the incoming connections of one peer with one number, one at a time.

    A new connection replaces the one before, because its sender has given that one up. The receiver welcomes the new
    one only after the last byte of the old one has landed.

    Args:
        peer: The peer's link name.
        near: Whether the peer may be on this machine and both sides allow its memory to be read.
        grants: What peers may write.
    """

    def __init__(self, peer: str, *, near: bool, grants: Grants) -> None:
        self._peer = peer
        self._near = near
        self._grants = grants
        self._copier = Copier(peer)
        self._landed = deque[int](maxlen=MOST_AGAIN)
        """Numbers of the last batches that have landed. Their sender sends them again if it did not hear of that."""
        self._lock = threading.Lock()
        self._waker = Waker()
        self._next: Caller | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None

    def offer(self, caller: Caller) -> None:
        """Serve this connection as soon as the current one has ended. Callable from any thread; never blocks.

        Raises:
            Lost: The system starts no thread that could serve it. The connection is still the caller's.
        """
        with self._lock:
            superseded = caller if self._stopping else self._next
            if not self._stopping:
                self._start()
                self._next = caller
        if superseded is not None:
            superseded.sock.close()
        self._waker.wake()

    def stop(self) -> None:
        """Tell the thread to end. Callable from any thread; never blocks."""
        with self._lock:
            self._stopping = True
            waiting, self._next = self._next, None
        if waiting is not None:
            waiting.sock.close()
        self._waker.wake()

    def join(self) -> None:
        """Wait until nothing from this peer can land, and free everything. Call it after `stop`."""
        if self._thread is not None:
            self._thread.join()
        self._waker.close()

    def _start(self) -> None:
        """Start the thread, unless it runs. Under the lock."""
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name=f"tcp-receive-{self._peer}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # its sender tries again, and then there may be one
            raise Lost(f"no thread can be started to receive from {self._peer}: {error}; {MORE_THREADS}") from error
        self._thread = thread  # not before it runs: `join` waits for it

    def _check(self) -> None:
        if self._stopping or self._next is not None:
            raise Interrupted

    def _run(self) -> None:
        while True:
            with self._lock:
                caller, self._next = self._next, None
                if self._stopping:
                    break
            if caller is None:
                self._waker.wait()
                continue
            try:
                self._serve(caller)
            except (Lost, Interrupted, BadFrameError) as ended:
                log.debug("the connection from %s ended: %s", self._peer, ended)
            except Exception:
                log.exception("defect: the connection from %s is dropped", self._peer)
            finally:
                caller.sock.close()
        self._copier.close()

    def _serve(self, caller: Caller) -> None:
        stream = Stream(caller.sock, self._waker, self._check)
        readable = self._near and token_is_readable(caller.key, caller.hello, caller.nonce, caller.proof)
        stream.write(frame(Welcome(readable)))
        pid = caller.proof.pid if readable else 0
        connection = _Connection(self._peer, stream, pid, self._grants, self._copier, self._landed)
        while True:
            connection.serve_one()


class _Connection:
    """One authenticated connection. Only its receiver's thread uses it.

    Args:
        pid: The process whose memory may be read; 0 for none.
        copier: Reads it.
        landed: Numbers of the last batches that have landed. It adds to them.
    """

    def __init__(self, peer: str, stream: Stream, pid: int, grants: Grants, copier: Copier, landed: deque[int]) -> None:
        self._landed = landed
        self._peer = peer
        self._stream = stream
        self._pid = pid
        self._grants = grants
        self._copier = copier
        self._inbox = Inbox(stream, ahead=pid != 0)
        self._scratch = memoryview(b"")

    def serve_one(self) -> None:
        """Take one WRITE and answer it.

        Raises:
            Lost: The peer closed the connection.
            BadFrameError: The bytes are no WRITE, so it is unknown where the next one starts.
        """
        header = unpack_header(self._inbox.take(HEADER.size).data)
        targets, nbytes, sources = self._read_arrays(header)
        check_lengths(header, nbytes)
        admitted = self._grants.admit(self._peer, header.room, header.generation, targets, nbytes)
        if header.sequence in self._landed:  # it landed, and the connection on which that was said has ended
            self._reply(header, Status.DONE)
            self._discard(header, 0)
        elif isinstance(admitted, str):
            self._reply(header, Status.REFUSED, admitted)
            self._discard(header, 0)
        elif header.mode is Mode.SEND:
            self._receive(header, admitted, Vectors(targets, nbytes))
        else:
            self._copy(header, admitted, Vectors(targets, nbytes), Vectors(sources, nbytes))

    def _read_arrays(self, header: Header) -> tuple[U64, U64, U64]:
        count = header.arrays
        body = self._inbox.take(8 * count * header.blocks)
        arrays = body.view("<u8").reshape(count, header.blocks).astype(np.uint64, copy=False)
        return arrays[0], arrays[1], arrays[-1]

    def _receive(self, header: Header, grant: Grant, target: Vectors) -> None:
        position = 0
        while position < target.total:
            self._stream.check()
            if not grant.enter():
                self._reply(header, Status.REFUSED, _revoked(header, position))
                self._discard(header, position)
                return
            try:
                received = self._inbox.receive(target, position, PIECE_BYTES)
            finally:
                grant.leave()
            if not received:
                self._stream.wait(POLLIN)
            position += received
        self._land(header, grant)

    def _copy(self, header: Header, grant: Grant, target: Vectors, source: Vectors) -> None:
        moved, failed = self._copier.copy(self._pid, grant, source, target, self._look)
        # The reply is sent outside of the grant: a revoke waits for a copy, but never for a peer that reads slowly.
        if failed is not None:
            resend = failed.errno in CANNOT_READ
            self._inbox.ahead = self._inbox.ahead and not resend  # payload follows from now on
            status = Status.RESEND if resend else Status.FAILED
            self._reply(header, status, f"process_vm_readv: {failed.strerror}{_whose(failed, target)}")
        elif moved < target.total:
            self._reply(header, Status.REFUSED, _revoked(header, moved))
        else:
            self._land(header, grant)

    def _land(self, header: Header, grant: Grant) -> None:
        # The reply first: who is told here may close this backend, and the sender still has to learn of its success.
        self._landed.append(header.sequence)
        # It counts also if the reply reaches nobody: the sender hears of it when it sends the batch again.
        try:
            self._reply(header, Status.DONE)
        finally:
            grant.land(header.total)

    def _look(self) -> None:
        self._stream.check()
        if self._stream.hung_up():
            raise Lost("it closed the connection", ended=True)

    def _reply(self, header: Header, status: Status, reason: str = "") -> None:
        self._stream.write(pack_reply(status, header.sequence, reason))

    def _discard(self, header: Header, position: int) -> None:
        """Receive and drop the rest of a payload that may not land."""
        left = header.total - position if header.mode is Mode.SEND else 0
        if left and not self._scratch:
            self._scratch = memoryview(bytearray(SCRATCH))
        while left:
            self._stream.check()
            received = self._inbox.drop(self._scratch[:left])
            if not received:
                self._stream.wait(POLLIN)
            left -= received


def _whose(failed: OSError, target: Vectors) -> str:
    """Which side's memory is missing, for an error that does not say it; empty for another error."""
    if failed.errno != errno.EFAULT:
        return ""
    side = "the sender's" if _iovec.is_mapped(target) else "the receiver's"
    return f": {side} memory is not mapped any more; it must outlive its link: was it freed?"


def _revoked(header: Header, position: int) -> str:
    return f"the grant for room {header.room} was revoked after {position} of {header.total} bytes"
