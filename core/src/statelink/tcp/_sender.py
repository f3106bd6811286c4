"""The sending side: for each peer a queue, and a thread with one connection."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from statelink.backend import Side, logger
from statelink.errors import TransferError

from ._frames import MOST_AGAIN, REPLY, BadFrameError, Mode, Reply, Status, unpack_reply
from ._handshake import Welcome, dial, take
from ._lingering import Linger
from ._stream import MORE_THREADS, POLLIN, POLLOUT, Interrupted, Lost, Stream, Waker
from ._write import Write

if TYPE_CHECKING:
    from statelink.backend import Batch, EventLoop

    from ._descriptor import Descriptor
    from ._lingering import Lingering
    from ._options import Options

__all__ = ["Sender"]

log = logger("statelink.tcp")

TRANSPORTS: Final = {Mode.COPY: "process_vm", Mode.SEND: "socket"}
"""The transports: the receiver reads this side's memory, or the connection carries the payload."""
AGAIN_SECONDS: Final = 0.1
"""Seconds until batches are sent again whose receiver ended the connection. It may be about to take another one."""
DRAIN_SECONDS: Final = 1.0
"""How long to wait, when a connection is given up, until the receiver confirms that it has stopped. Transfers without a
confirmation fail and are *not* settled."""
MOST_OFFERED_PIECES: Final = 4
"""Most pieces that `Sender.submit` offers to the socket."""


class Sender:
    """Moves batches to one peer over one connection, in order.

    ``submit`` queues a batch, and sends what is queued itself, if there is a connection, nobody else is sending and the
    socket takes it. The first batch starts a thread, which connects, sends what is left, and takes the replies. Several
    batches can be under way before the peer replies. If the connection is lost, these fail, and the next batch opens a
    new one. But if the receiver ended it and had not answered any on it, they are sent again once, over another one; if
    it lets nobody in, for up to ``connect_timeout``. It may have connected this side anew, have waited too long
    for the proof, or have no thread left. They keep their numbers, by which the receiver knows what it has.

    If the payload does not travel through the connection, a link's control thread takes the replies (`attend`), so that
    a transfer ends on the thread that waits for it. It leaves everything unusual to this object's own thread.

    A failed batch is *settled* only if the receiver has replied, or has closed the connection, which it does only after
    the last byte that it copied. Without this, bytes could still land from a socket's buffer. On the source's side, a
    batch is then settled only if this thread has sent it. The connection is kept until the receiver closes its end,
    which settles the batch later.

    Args:
        own: This side's descriptor.
        peer: The peer's descriptor.
        key: The pair's key.
        number: Number of the connection between the two.
        options: The backend's options.
        lingering: Takes connections whose receivers have not confirmed that they stopped.
        loop: The control thread of the link, if there is one.

    Attributes:
        round_trip: Seconds of a round trip when the last connection was made; 0 before the first one.
    """

    def __init__(
        self,
        own: Descriptor,
        peer: Descriptor,
        key: bytes,
        number: int,
        options: Options,
        lingering: Lingering,
        loop: EventLoop | None,
    ) -> None:
        self._own = own
        self._peer = peer
        self._key = key
        self._number = number
        self._options = options
        self._lingering = lingering
        self._loop = loop
        self._lock = threading.Lock()
        """Guards `_queue` against batches after `stop`, and the start of the thread. Held for a moment only."""
        self._waker = Waker()
        self._queue: deque[Write] = deque()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._turn = threading.Lock()
        """Guards what follows, up to `_trouble`. The thread may hold it for long; nobody else waits for it."""
        self._open = False
        """Whether batches may be sent over `_stream`."""
        self._stream: Stream | None = None
        self._mode = Mode.SEND
        self._welcomed = False
        self._answered = False
        """Whether the receiver has answered a batch on this connection."""
        self._again = ""
        """Why the last connection ended, if its batches are sent again."""
        self._patience = 0.0
        """Until when they are sent again over one more connection where the receiver has not welcomed the last one."""
        self._sequence = time.monotonic_ns()
        """Number of the last batch: greater than all numbers of this process's earlier connections to the peer."""
        self._current: Write | None = None
        self._unanswered: deque[Write] = deque()
        self._progress = 0.0
        self._replies = bytearray()
        self._answers = memoryview(bytearray(4096))
        self._attended = False
        """Whether the control thread takes the replies."""
        self._trouble: Exception | None = None
        """What it met, for the thread to handle."""
        self._missed = False
        """Whether it left replies to the thread, which held the turn."""
        self._known = False
        """Whether the receiver has welcomed a connection: one may be made that it cannot serve. Any thread reads it."""
        self.round_trip = 0.0
        self._dialled = threading.Event()
        """Set once the first connection was made or given up; `find_out` waits for it."""
        self._wanted = False
        """Whether to connect without a batch. Any thread asks for it; the thread takes it back once it has tried."""

    @property
    def waiting(self) -> int:
        """Batches that have not ended, about. Callable from any thread."""
        return len(self._queue) + len(self._unanswered) + (self._current is not None)

    @property
    def transport(self) -> str:
        """The transport of the last connection; empty before the first one. Callable from any thread."""
        return TRANSPORTS[self._mode] if self._known else ""

    def find_out(self) -> None:
        """Connect now, so that `transport` is known if the peer can be reached. Blocks up to ``connect_timeout``.

        Raises:
            TransferError: The system starts no thread that could connect.
        """
        with self._lock:
            if self._stopping:
                return
            self._start("it cannot be found out how batches travel")
            self._wanted = True
        self._waker.wake()
        self._dialled.wait(self._options.connect_timeout + 1.0)

    def want(self) -> None:
        """Connect soon, if there was no connection, so that `transport` is known later. Any thread; does not block."""
        with self._lock:
            if self._stopping or self._known or self._wanted:
                return
            try:
                self._start("it cannot be found out how batches travel")
            except TransferError as error:  # whoever asks for the transport again has this try again
                log.debug("%s", error)
                return
            self._wanted = True
        self._waker.wake()

    def pace(self, rate: float) -> None:
        """Send at most so many bytes in a second over the connection that there is. See `Stream.pace`."""
        stream = self._stream
        if stream is not None:
            stream.pace(rate)

    def submit(self, batch: Batch) -> Write:
        """Send a batch, or queue it. Callable from any thread; never blocks.

        Raises:
            TransferError: The peer is being disconnected, or the system starts no thread that could send.
        """
        write = Write(batch)
        with self._lock:
            if self._stopping:
                raise TransferError("a batch cannot be sent", cause="the peer is disconnected", peer=self._peer.link)
            self._start("a batch cannot be sent")  # before the batch is queued: without a thread, nobody would end it
            self._queue.append(write)
        if not self._sends():
            self._waker.wake()
        return write

    def _sends(self) -> bool:
        """Send what is queued, if nobody else does. Whether nothing is left, so that the thread need not be woken."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            return self._flush(MOST_OFFERED_PIECES)
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
        """Wait for the thread, at most about `DRAIN_SECONDS`, and free everything. Call it after `stop`."""
        if self._thread is not None:
            self._thread.join()
        self._waker.close()

    def _start(self, failed: str) -> None:
        """Start the thread, unless it runs. Under the lock.

        Raises:
            TransferError: The system starts none. It says that ``failed``, and the next call tries again.
        """
        if self._thread is not None:
            return
        name = f"tcp-send-{self._peer.link}" + (f"-{self._number}" if self._number else "")
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise TransferError(
                failed,
                cause=f"no thread can be started: {error}",
                hint=MORE_THREADS,
                backend="tcp",
                peer=self._peer.link,
            ) from error
        self._thread = thread  # not before it runs: `join` waits for it

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
            trouble, self._trouble = self._trouble, None
            if trouble is not None:
                raise trouble
            if not self._open:  # the receiver refused a batch that was still being sent
                self._disconnect()
                return
            idle = self._flush(1)
            deadline, attended = self._deadline(), self._attended
        events = 0 if attended else POLLIN
        if not idle:
            events |= POLLOUT
        if self._missed:
            self._missed = False
            ready = POLLIN
        elif attended:
            ready = self._stream.wait(events, None, self._until(deadline))
        else:
            # While this waits without a deadline, `submit` may send a batch: look again before that one's deadline.
            ready = self._stream.wait(events, deadline, self._options.stall_timeout)
        if ready & ~POLLOUT:
            self._take_replies(self._stream)

    def _until(self, deadline: float | None) -> float:
        """Seconds until the thread looks at the deadline again, which moves while the control thread takes replies.

        Raises:
            Lost: The deadline is over.
        """
        if deadline is None:
            return self._options.stall_timeout
        left = deadline - time.monotonic()
        if left <= 0:
            raise Lost("it made no progress in time")
        return left

    def _connect(self) -> None:
        try:
            # A receiver that let this side in and left either takes it in again at once, or will not.
            patient = not (self._again and self._welcomed)
            stream, near = dial(
                self._own, self._peer, self._key, self._number, self._options, self._waker, self._check, patient=patient
            )
            with self._turn:
                self._stream, self._open = stream, True
                self._mode = Mode.COPY if near else Mode.SEND
                self._welcomed, self._answered = near is not None, False
                self._known = self._known or self._welcomed
                self.round_trip = stream.round_trip()
                self._replies.clear()
                self._trouble, self._missed = None, False
                if near and self._loop is not None:
                    with contextlib.suppress(OSError):  # the system watches no more descriptors
                        self._loop.add_reader(stream.fileno(), self.attend)
                        self._attended = True
        except Lost as lost:
            self._fail_queue(self._again or str(lost))
            self._again = ""
            return
        finally:
            self._wanted = False
            self._dialled.set()

    def _begin(self, write: Write) -> None:
        if not write.sequence:
            self._sequence += 1
            write.sequence = self._sequence
        self._current = write
        if not self._unanswered:
            self._progress = time.monotonic()
        write.begin(self._mode)

    def _deadline(self) -> float | None:
        waiting = self._current is not None or self._unanswered
        return self._progress + self._options.stall_timeout if waiting and self._options.stall_timeout else None

    def attend(self) -> None:
        """Take replies, and leave what is unusual to the thread. Called on the control thread; never blocks."""
        if not self._turn.acquire(blocking=False):
            self._missed = True
            self._waker.wake()
            return
        ended: list[tuple[Write, str]] = []
        try:
            if self._attended and self._stream is not None and self._trouble is None:
                self._receive(self._stream, ended)
        except (Lost, BadFrameError) as error:
            self._trouble = error
        finally:
            leaves = self._trouble is not None or not self._open or not self._attended
            self._turn.release()
        if leaves:
            self._waker.wake()
        _end(ended)

    def _take_replies(self, stream: Stream) -> None:
        """Receive and handle replies.

        Raises:
            Lost: The receiver closed the connection. Replies before that have been handled.
            BadFrameError: So did those before a bad reply.
        """
        ended: list[tuple[Write, str]] = []
        try:
            with self._turn:
                self._receive(stream, ended)
        finally:
            _end(ended)

    def _receive(self, stream: Stream, ended: list[tuple[Write, str]]) -> None:
        """Handle all that has come, and add the batches that have ended to ``ended``. In one's turn.

        Raises:
            Lost: The stream ended.
            BadFrameError: A reply is malformed, or no batch waits for it.
        """
        while received := stream.receive(self._answers):
            self._replies += self._answers[:received]
            self._handle_all(ended)

    def _handle_all(self, ended: list[tuple[Write, str]]) -> None:
        if not self._welcomed:
            if take(self._replies, Welcome) is None:
                return
            self._welcomed = self._known = True
        while len(self._replies) >= REPLY.size:
            reply = unpack_reply(self._replies[: REPLY.size])
            end = REPLY.size + reply.length
            if len(self._replies) < end:
                return
            reason = self._replies[REPLY.size : end].decode("utf-8", "replace") if reply.length else ""
            del self._replies[:end]
            self._progress = time.monotonic()
            self._handle(reply, reason, ended)

    def _handle(self, reply: Reply, reason: str, ended: list[tuple[Write, str]]) -> None:
        write = self._unanswered[0] if self._unanswered else self._current
        if write is None or write.sequence != reply.sequence or (reply.status is Status.DONE and not write.sent):
            raise BadFrameError(f"reply {reply.status.name} to batch {reply.sequence}, which is not waiting for one")
        self._answered, self._again = True, ""
        if self._unanswered:
            self._unanswered.popleft()
        if reply.status is Status.RESEND and write.mode is Mode.COPY and write.sent:
            log.info("%s cannot read our memory (%s): batches travel through the socket", self._peer.link, reason)
            self._mode = Mode.SEND
            self._leave()
            write.sequence = 0  # it follows those that came behind it and may have landed: a number below theirs is old
            self._queue.appendleft(write)
            return
        if write is self._current:
            # Refused while its payload was still being sent. A new connection is cheaper than the rest of the
            # payload, and memory must not be read after its transfer has ended. The thread closes this one.
            self._current = None
            self._open = False
        done = reply.status is Status.DONE
        ended.append((write, "" if done else f"the receiver answered {reply.status.name.lower()}: {reason}"))

    def _leave(self) -> None:
        """Let the thread take the replies from now on. In one's turn."""
        if self._attended and self._loop is not None and self._stream is not None:
            self._loop.remove_reader(self._stream.fileno())
        self._attended = False

    def _give_up(self, reason: str, *, ended: bool) -> None:
        """Drop the connection, and fail its transfers."""
        with self._turn:
            self._open = False
            self._leave()
        ended = ended or self._drain()
        with self._turn:
            failed = [*self._unanswered, *([self._current] if self._current is not None else [])]
            self._unanswered.clear()
            self._current = None
            again = 0 < len(failed) <= MOST_AGAIN and ended and not (self._answered or self._stopping)
            if not self._again:
                self._patience = time.monotonic() + self._options.connect_timeout
            else:
                again = again and not self._welcomed and time.monotonic() < self._patience
            self._again = reason if again else ""
            if again:
                self._queue.extendleft(reversed(failed))
                failed = []
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
        if again:
            self._waker.wait(AGAIN_SECONDS)

    def _drain(self) -> bool:
        """Tell the receiver to stop, and wait for its confirmation. Replies still count."""
        deadline = time.monotonic() + DRAIN_SECONDS
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
        self._leave()
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


def _end(ended: list[tuple[Write, str]]) -> None:
    """Say how batches have ended. Not in the turn: whoever is told may submit the next batch."""
    for write, failure in ended:
        if failure:
            write.fail(failure, settled=True)
        else:
            write.succeed()
        write.release()
