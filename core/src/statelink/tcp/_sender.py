"""The sending side: for each peer a queue, and a thread with one connection."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from statelink.backend import Batch, Side, Transfer
from statelink.errors import TransferError

from ._frames import (
    REPLY,
    BadFrameError,
    Header,
    Mode,
    Reply,
    Status,
    pack_write,
    unpack_reply,
)
from ._handshake import dial
from ._iovec import SMALL, Vectors
from ._lingering import Linger
from ._stream import POLLIN, POLLOUT, Interrupted, Lost, Stream, Waker

if TYPE_CHECKING:
    from ._descriptor import Descriptor
    from ._lingering import Lingering
    from ._options import Options

__all__ = ["Sender", "Write"]

log = logging.getLogger("statelink.tcp")

TRANSPORTS: Final = {Mode.COPY: "process_vm", Mode.SEND: "socket"}
"""The transports: the receiver reads this side's memory, or the connection carries the payload."""
SLICE: Final = 4 << 20
"""Most bytes that are offered to the socket in one call."""
FEW: Final = 4
"""Most such calls that `Sender.submit` makes."""


class Write(Transfer):
    """One submitted batch and its progress. Once it is queued, only its sender's thread uses it."""

    __slots__ = ("_batch", "_frame", "_position", "_total", "_vectors", "mode", "sequence")

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.mode = Mode.SEND
        self.sequence = 0
        self._batch: Batch | None = batch
        self._frame = b""
        self._vectors: Vectors | None = None
        """What to send, if it is more than a small frame."""
        self._position = 0
        self._total = 0

    def begin(self, sequence: int, mode: Mode) -> None:
        """Make what to send: the frame, and in mode SEND the payload."""
        assert self._batch is not None
        blocks = self._batch.blocks
        nbytes = int(np.add.reduce(blocks.nbytes))
        header = Header(mode, len(blocks.nbytes), sequence, self._batch.room, self._batch.generation, nbytes)
        self._frame = frame = pack_write(header, blocks)
        self._vectors, self._total = None, len(frame)
        if mode is Mode.SEND or len(frame) > SMALL:
            addresses = np.array([np.frombuffer(frame, np.uint8).ctypes.data], np.uint64)
            lengths = np.array([len(frame)], np.uint64)
            if mode is Mode.SEND:
                addresses = np.concatenate((addresses, blocks.source))
                lengths = np.concatenate((lengths, blocks.nbytes))
            self._vectors = Vectors(addresses, lengths)
            self._total = self._vectors.total
        self.mode = mode
        self.sequence = sequence
        self._position = 0

    def send(self, stream: Stream) -> bool:
        """Send what the socket takes. Return whether it took anything."""
        if self._vectors is not None:
            sent = stream.send_vectors(self._vectors, self._position, SLICE)
        else:
            sent = stream.send(memoryview(self._frame)[self._position :] if self._position else self._frame)
        self._position += sent
        return sent > 0

    @property
    def sent(self) -> bool:
        """Whether everything has been sent."""
        return self._total > 0 and self._position == self._total

    @property
    def exposed(self) -> bool:
        """Whether enough was sent for the receiver to read or write some of its bytes."""
        return self._total > 0 and self._position >= len(self._frame)

    def release(self) -> None:
        """Free the arrays. The core may keep the transfer itself."""
        self._batch = self._vectors = None
        self._frame, self._total = b"", 0


class Sender:
    """Moves batches to one peer, in order.

    ``submit`` queues a batch, and sends what is queued itself, if there is a connection, nobody else is sending and the
    socket takes it. The first batch starts a thread, which connects, sends what is left, and takes the replies. Several
    batches can be under way before the peer replies. If the connection is lost, these fail, and the next batch opens a
    new one.

    A failed batch is *settled* only if the receiver has replied, or has closed the connection, which it does only after
    the last byte that it copied. Without this, bytes could still land from a socket's buffer. On the source's side, a
    batch is then settled only if this thread has sent it. The connection is kept until the receiver closes its end,
    which settles the batch later.

    Args:
        own: This side's descriptor.
        peer: The peer's descriptor.
        key: The pair's key.
        options: The backend's options.
        lingering: Takes connections whose receivers have not confirmed that they stopped.
    """

    def __init__(self, own: Descriptor, peer: Descriptor, key: bytes, options: Options, lingering: Lingering) -> None:
        self._own = own
        self._peer = peer
        self._key = key
        self._options = options
        self._lingering = lingering
        self._lock = threading.Lock()
        """Guards `_queue` against batches after `stop`, and the start of the thread. Held for a moment only."""
        self._waker = Waker()
        self._queue: deque[Write] = deque()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._turn = threading.Lock()
        """Guards what follows, up to `_progress`. The thread may hold it for long; `submit` does not wait for it."""
        self._open = False
        """Whether batches may be sent over `_stream`."""
        self._stream: Stream | None = None
        self._mode = Mode.SEND
        self._sequence = 0
        self._current: Write | None = None
        self._unanswered: deque[Write] = deque()
        self._progress = 0.0
        # Only the thread uses the rest.
        self._known = False
        self._replies = bytearray()
        self._answers = memoryview(bytearray(4096))
        self._dialled = threading.Event()
        """Set once the first connection was made or given up; `find_out` waits for it."""
        self._wanted = False

    @property
    def transport(self) -> str:
        """The transport of the last connection; empty before the first one. Callable from any thread."""
        return TRANSPORTS[self._mode] if self._known else ""

    def find_out(self) -> None:
        """Connect now, so that `transport` is known if the peer can be reached. Blocks up to ``connect_timeout``."""
        with self._lock:
            if self._stopping:
                return
            self._wanted = True
            self._start()
        self._waker.wake()
        self._dialled.wait(self._options.connect_timeout + 1.0)

    def want(self) -> None:
        """Connect soon, if there was no connection, so that `transport` is known later. Any thread; does not block."""
        with self._lock:
            if self._stopping or self._known or self._wanted:
                return
            self._wanted = True
            self._start()
        self._waker.wake()

    def submit(self, batch: Batch) -> Write:
        """Send a batch, or queue it. Callable from any thread; never blocks.

        Raises:
            TransferError: The peer is being disconnected.
        """
        write = Write(batch)
        with self._lock:
            if self._stopping:
                raise TransferError("a batch cannot be sent", cause="the peer is disconnected", peer=self._peer.link)
            self._queue.append(write)
            self._start()
        if not self._sends():
            self._waker.wake()
        return write

    def _sends(self) -> bool:
        """Send what is queued, if nobody else does. Whether nothing is left, so that the thread need not be woken."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            return self._flush(FEW)
        except Lost:
            return False  # the thread finds out the same, and gives the connection up
        finally:
            self._turn.release()

    def _flush(self, most: int) -> bool:
        """Send what the socket takes, in at most so many pieces. Whether nothing is left. In one's turn.

        Raises:
            Lost: The stream ended.
        """
        if self._stream is None or not self._open:
            return False
        for _ in range(most):
            if self._current is None:
                if not self._queue:
                    return True
                self._begin(self._queue.popleft())
            write = self._current
            assert write is not None
            if not write.send(self._stream):
                return False
            self._progress = time.monotonic()
            if write.sent:
                self._unanswered.append(write)
                self._current = None
        return self._current is None and not self._queue

    def stop(self) -> None:
        """Fail what has not ended, and tell the thread to end. Callable from any thread; never blocks."""
        with self._lock:
            self._stopping = True
        self._waker.wake()

    def join(self) -> None:
        """Wait for the thread, at most about ``drain_timeout``, and free everything. Call it after `stop`."""
        if self._thread is not None:
            self._thread.join()
        self._waker.close()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"tcp-send-{self._peer.link}", daemon=True)
            self._thread.start()

    def _check(self) -> None:
        if self._stopping:
            raise Interrupted

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._step()
            except Interrupted:
                break
            except (Lost, BadFrameError) as error:
                self._give_up(f"lost the peer: {error}", ended=isinstance(error, Lost) and error.ended)
            except Exception as error:
                log.exception("defect: the connection to %s is dropped", self._peer.link)
                self._give_up(f"defect of the sender: {error!r}", ended=False)
        self._give_up("the peer was disconnected", ended=False)
        self._fail_queue("the peer was disconnected before this batch was sent")

    def _step(self) -> None:
        """Do what can be done now, and wait for more."""
        if self._stream is None:
            if self._queue or self._wanted:
                self._connect()
            else:
                self._waker.wait()
            return
        with self._turn:
            idle = self._flush(1)
            deadline = self._deadline()
        # While this waits without a deadline, `submit` may send a batch: look again before that one's deadline.
        ready = self._stream.wait(POLLIN if idle else POLLIN | POLLOUT, deadline, self._options.stall_timeout)
        if ready & ~POLLOUT:
            self._take_replies(self._stream)

    def _connect(self) -> None:
        try:
            stream, near = dial(self._own, self._peer, self._key, self._options, self._waker, self._check)
            with self._turn:
                self._stream, self._open = stream, True
                self._mode, self._known = Mode.COPY if near else Mode.SEND, True
        except Lost as lost:
            self._fail_queue(str(lost))
            return
        finally:
            self._wanted = False
            self._dialled.set()
        self._replies.clear()

    def _begin(self, write: Write) -> None:
        self._sequence += 1
        self._current = write
        if not self._unanswered:
            self._progress = time.monotonic()
        write.begin(self._sequence, self._mode)

    def _deadline(self) -> float | None:
        waiting = self._current is not None or self._unanswered
        return self._progress + self._options.stall_timeout if waiting and self._options.stall_timeout else None

    def _take_replies(self, stream: Stream) -> None:
        """Receive and handle replies.

        Raises:
            Lost: The receiver closed the connection. Replies before that have been handled.
        """
        received = stream.receive(self._answers)
        self._replies += self._answers[:received]
        while len(self._replies) >= REPLY.size:
            reply = unpack_reply(self._replies[: REPLY.size])
            end = REPLY.size + reply.length
            if len(self._replies) < end:
                return
            reason = self._replies[REPLY.size : end].decode("utf-8", "replace") if reply.length else ""
            del self._replies[:end]
            self._progress = time.monotonic()
            self._handle(reply, reason)

    def _handle(self, reply: Reply, reason: str) -> None:
        with self._turn:
            write = self._unanswered[0] if self._unanswered else self._current
            if write is None or write.sequence != reply.sequence or (reply.status is Status.DONE and not write.sent):
                raise BadFrameError(
                    f"reply {reply.status.name} to batch {reply.sequence}, which is not waiting for one"
                )
            if self._unanswered:
                self._unanswered.popleft()
            if reply.status is Status.RESEND and write.mode is Mode.COPY and write.sent:
                log.info("%s cannot read our memory (%s): batches travel through the socket", self._peer.link, reason)
                self._mode = Mode.SEND
                self._queue.appendleft(write)
                return
            if write is self._current:
                # Refused while its payload was still being sent. A new connection is cheaper than the rest of the
                # payload, and memory must not be read after its transfer has ended.
                self._current = None
                self._disconnect()
        # Not in the turn: whoever is told of the end may submit the next batch.
        if reply.status is Status.DONE:
            write.succeed()
        else:
            write.fail(f"the receiver answered {reply.status.name.lower()}: {reason}", settled=True)
        write.release()

    def _give_up(self, reason: str, *, ended: bool) -> None:
        """Drop the connection, and fail its transfers."""
        with self._turn:
            self._open = False
        ended = ended or self._drain()
        with self._turn:
            failed = [*self._unanswered, *([self._current] if self._current is not None else [])]
            self._unanswered.clear()
            self._current = None
        unsettled = [write for write in failed if write.exposed and not ended]
        for write in failed:
            # Nothing more is sent. The socket holds a copy, which may still land. In mode COPY, the receiver may still
            # read.
            alone = write.mode is Mode.SEND and Side.SOURCE
            write.fail(reason, settled=alone if write in unsettled else True)
            write.release()
        if unsettled and self._stream is not None:
            self._lingering.add(Linger(self._stream, unsettled))
            self._stream = None
        self._disconnect()

    def _drain(self) -> bool:
        """Tell the receiver to stop, and wait for its confirmation. Replies still count."""
        deadline = time.monotonic() + self._options.drain_timeout
        try:
            if self._stream is not None:
                self._stream.shut()
            while self._stream is not None and (
                self._unanswered or (self._current is not None and self._current.exposed)
            ):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._stream.await_input(left)
                self._take_replies(self._stream)
        except (Lost, BadFrameError) as error:
            return isinstance(error, Lost) and error.ended
        return True

    def _disconnect(self) -> None:
        self._open = False
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _fail_queue(self, reason: str) -> None:
        """Fail batches that were not sent."""
        while self._queue:
            write = self._queue.popleft()
            write.fail(reason, settled=True)
            write.release()
