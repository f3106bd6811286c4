"""The data port: one thread accepts connections and authenticates them, whatever they send."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from statelink.backend import Ports, Tally, close_in_children, logger

from ._handshake import MAX_FRAME, PREFIX, Challenge, Hello, Proof, challenge, decode, frame, verify
from ._receiver import Caller
from ._stream import Lost, Waker, prepare

if TYPE_CHECKING:
    from ._options import Options
    from ._streams import Receivers

__all__ = ["Known", "Listener", "listen"]

log = logger("statelink.tcp")

BACKLOG: Final = 128
HANDSHAKE_SECONDS: Final = 5.0
"""How long an incoming connection may take to authenticate before it is dropped."""
MOST_PENDING: Final = 32
"""Most incoming connections that have not authenticated. If there are more, the oldest is dropped."""
ACCEPT_PAUSE_SECONDS: Final = 0.2
"""Seconds without accepting after the system refused a connection, usually because descriptors ran out."""


class Known(NamedTuple):
    """What is known about a peer that may connect."""

    key: bytes
    receivers: Receivers


class _Pending:
    """A connection that has not authenticated."""

    __slots__ = ("_buffer", "_needed", "challenge", "deadline", "hello", "sock")

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline
        self.hello: Hello | None = None
        self.challenge: Challenge | None = None
        self._buffer = b""
        self._needed = PREFIX

    def read(self) -> bytes | None:
        """The next frame, once it is complete. Never reads beyond it.

        Raises:
            Lost: The connection ended, or the bytes are no frame.
            OSError: The connection broke.
        """
        while True:
            try:
                more = self.sock.recv(self._needed - len(self._buffer))
            except BlockingIOError:
                return None
            if not more:
                raise Lost("it closed the connection", ended=True)
            self._buffer += more
            if len(self._buffer) < self._needed:
                continue
            if self._needed > PREFIX:
                raw, self._buffer, self._needed = self._buffer[PREFIX:], b"", PREFIX
                return raw
            length = int.from_bytes(self._buffer, "little")
            if not 0 < length <= MAX_FRAME:
                raise Lost(f"a frame of {length} bytes")
            self._needed += length


def listen(host: str, ports: Ports) -> socket.socket:
    """Open a data port: the first free one of a range.

    Raises:
        OSError: It cannot be opened.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = ports.first_free(lambda port: socket.create_server((host, port), family=family, backlog=BACKLOG))
    sock.setblocking(False)
    close_in_children(sock)
    return sock


class Listener:
    """Listens at the data port and, after `start`, hands authenticated connections to the receivers of their peers.

    Two peers connect in any order. So a caller that this side does not know yet is kept until it does, but no longer
    than `HANDSHAKE_SECONDS`, like every caller.

    Args:
        link: Name of this link.
        host: Where to listen.
        options: The backend's options.
        find: Looks up a peer by name. Called on the listener's thread.

    Attributes:
        port: The port at which it listens.
        dropped: Number of connections that were dropped before they authenticated, by reason.

    Raises:
        OSError: The port cannot be opened.
    """

    def __init__(self, link: str, host: str, options: Options, find: Callable[[str], Known | None]) -> None:
        self._link = link
        self._options = options
        self._find = find
        self.dropped = Tally()
        self._accept_again: float | None = None
        self._pending: dict[socket.socket, _Pending] = {}  # oldest first
        self._stopping = False
        with contextlib.ExitStack() as undo:
            self._sock = undo.enter_context(listen(host, options.ports))
            self.port: int = self._sock.getsockname()[1]
            self._waker = undo.enter_context(contextlib.closing(Waker()))
            self._selector = undo.enter_context(selectors.DefaultSelector())
            self._selector.register(self._waker, selectors.EVENT_READ)
            self._selector.register(self._sock, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._run, name="tcp-listen", daemon=True)
            undo.pop_all()

    def start(self) -> None:
        """Start the thread. If this raises, nothing is left.

        Raises:
            RuntimeError: The system starts no thread.
        """
        try:
            self._thread.start()
        except Exception:  # it does not run
            self._close_all()
            raise
        except BaseException:  # an interrupt: if it runs, or is about to, it closes everything
            self._stopping = True
            self._waker.wake()
            raise

    def look_again(self) -> None:
        """Look again at the callers, because a peer has become known. Callable from any thread; never blocks."""
        self._waker.wake()

    def close(self) -> None:
        """Close the port and all connections that no receiver has, and end the thread."""
        self._stopping = True
        self._waker.wake()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._step()
            except Exception:
                log.exception("defect: in the thread that listens")
                time.sleep(ACCEPT_PAUSE_SECONDS)
        for pending in list(self._pending.values()):
            self._drop(pending, "closing", "this side is closing")
        self._close_all()

    def _close_all(self) -> None:
        self._selector.close()
        self._sock.close()
        self._waker.close()

    def _step(self) -> None:
        for key, _ in self._selector.select(self._timeout()):
            if key.fileobj is self._waker:
                self._waker.clear()
                for pending in list(self._pending.values()):
                    self._guard(pending, self._greet)
            elif key.fileobj is self._sock:
                self._accept()
            elif isinstance(key.data, _Pending) and key.data.sock in self._pending:
                self._guard(key.data, self._advance)
        now = time.monotonic()
        for pending in [pending for pending in self._pending.values() if pending.deadline <= now]:
            if pending.hello is not None and pending.challenge is None:  # its side connects ahead; this one may not
                self._drop(pending, "unknown", f"this side has not connected to {pending.hello.sender!r:.80}")
            else:
                self._drop(pending, "slow", "it did not authenticate in time")
        if self._accept_again is not None and self._accept_again <= now:
            self._accept_again = None
            self._selector.register(self._sock, selectors.EVENT_READ)

    def _timeout(self) -> float | None:
        times = [pending.deadline for pending in self._pending.values()]
        if self._accept_again is not None:
            times.append(self._accept_again)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Trying again at once would only keep a core busy.
            log.warning("no connection can be accepted for %s s: %s", ACCEPT_PAUSE_SECONDS, error)
            self._selector.unregister(self._sock)
            self._accept_again = time.monotonic() + ACCEPT_PAUSE_SECONDS
            return
        if len(self._pending) >= MOST_PENDING:
            oldest = next(iter(self._pending.values()))
            self._drop(oldest, "many", "too many connections have not authenticated")
        pending = _Pending(sock, time.monotonic() + HANDSHAKE_SECONDS)
        self._pending[sock] = pending
        self._selector.register(sock, selectors.EVENT_READ, pending)
        self._guard(pending, lambda pending: prepare(pending.sock, self._options))

    def _guard(self, pending: _Pending, step: Callable[[_Pending], None]) -> None:
        """Take a step with one connection. If it fails, only this connection is dropped."""
        try:
            step(pending)
        except (Lost, OSError) as error:
            ended = isinstance(error, OSError) or error.ended
            self._drop(pending, "ended" if ended else "refused", str(error))
        except Exception:
            log.exception("defect: a connection is dropped")
            self._drop(pending, "defect", "a defect")

    def _advance(self, pending: _Pending) -> None:
        raw = pending.read()
        if raw is None:
            return
        if pending.hello is None:
            pending.hello = decode(raw, Hello)
            if pending.hello.receiver != self._link:
                raise Lost(f"it is looking for {pending.hello.receiver!r:.80}")
            self._greet(pending)
        elif pending.challenge is not None:
            self._admit(pending, pending.hello, pending.challenge, decode(raw, Proof))
        else:
            raise Lost("it did not wait to be challenged")

    def _greet(self, pending: _Pending) -> None:
        """Challenge a caller, once it has sent its name and is known."""
        if pending.hello is None or pending.challenge is not None:
            return
        known = self._find(pending.hello.sender)
        if known is None:
            return
        pending.challenge = challenge(known.key, pending.hello)
        message = frame(pending.challenge)
        if pending.sock.send(message) < len(message):
            raise Lost("it does not read")  # this never blocks, because an empty socket buffer holds far more

    def _admit(self, pending: _Pending, hello: Hello, made: Challenge, proof: Proof) -> None:
        known = self._find(hello.sender)
        if known is None or not verify(known.key, hello, made.nonce, proof):
            raise Lost(f"it is not {hello.sender!r:.80}")
        self._forget(pending)
        known.receivers.offer(Caller(pending.sock, known.key, hello, made.nonce, proof))

    def _forget(self, pending: _Pending) -> None:
        if self._pending.pop(pending.sock, None) is not None:
            self._selector.unregister(pending.sock)

    def _drop(self, pending: _Pending, kind: str, reason: str) -> None:
        # A caller that hangs up, or that this side does not need, is no reason for a warning.
        loud = self.dropped.note(kind) and kind not in ("closing", "ended", "unknown")
        level, seen = logging.WARNING if loud else logging.DEBUG, self.dropped[kind]
        log.log(level, "dropped an incoming connection (%d so): %s", seen, reason)
        self._forget(pending)
        with contextlib.suppress(OSError):
            pending.sock.close()
