"""A non-blocking socket. One thread uses it, and any thread can interrupt that one."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from statelink.backend import close_in_children

from . import _iovec

if TYPE_CHECKING:
    from ._iovec import Vectors
    from ._options import Options

__all__ = [
    "MORE_CONGESTION",
    "MORE_THREADS",
    "POLLIN",
    "POLLOUT",
    "Interrupted",
    "Lost",
    "Stream",
    "Waker",
    "prepare",
    "why_not",
]

POLLIN, POLLOUT = select.POLLIN, select.POLLOUT
MORE_THREADS = "raise the limit of threads (ulimit -u, pids.max of the container), or look for what starts so many"
"""The hint where the system refuses to start a thread."""
MAX_PACING_RATE = 47
"""Linux' ``SO_MAX_PACING_RATE``, for which Python has no name: bytes in a second, in eight bytes."""
PACED_ANEW = 1 / 8
"""A rate that differs by less is left as it is."""
ROUND_TRIP_AT = 68
"""Where ``tcpi_rtt`` is in ``struct tcp_info``: microseconds, in four bytes."""
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
MORE_CONGESTION = f"load the module tcp_<name>, and add the name to {ALLOWED}"
"""The hint where the kernel does not allow a congestion control."""
_HUNG_UP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


class Lost(Exception):
    """The connection cannot be used any longer.

    Attributes:
        ended: Whether the other end has certainly closed it. Receivers do so only after their last copy.
    """

    def __init__(self, reason: str, *, ended: bool = False) -> None:
        super().__init__(reason)
        self.ended = ended


class Interrupted(Exception):
    """The owner of the thread wants it to stop."""


class Waker:
    """Wakes the one thread that waits for it. Callable from any thread, even after `close`."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._read, POLLIN)

    def fileno(self) -> int:
        """To wait on."""
        return self._read.fileno()

    def wake(self) -> None:
        """End the current wait, or the next one."""
        # An error means that the pipe is full, so that the thread is awake, or that it is closed.
        with contextlib.suppress(OSError):
            _iovec.send_bytes(self._write.fileno(), b"\0")

    def clear(self) -> None:
        """Forget all wakes so far. The caller looks for work after this, never before, so that no wake is lost."""
        with contextlib.suppress(OSError):
            while self._read.recv(4096):
                pass

    def wait(self, timeout: float | None = None) -> None:
        """Wait to be woken."""
        self._poll.poll(None if timeout is None else timeout * 1000)
        self.clear()

    def close(self) -> None:
        """Close both descriptors."""
        self._write.close()
        self._read.close()


class Stream:
    """A connected socket and its thread's waker.

    Args:
        sock: The socket. This object owns it.
        waker: Ends every wait.
        check: Called after each wake; raises `Interrupted` if the connection is to be given up.
    """

    def __init__(self, sock: socket.socket, waker: Waker, check: Callable[[], None]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        self._waker = waker
        self._poll = select.poll()
        self._poll.register(waker, POLLIN)
        self._events = 0
        self._paced = 0.0
        self._poll.register(sock, self._events)
        self.check = check

    def fileno(self) -> int:
        """To wait on."""
        return self._fd

    def wait(self, events: int, deadline: float | None = None, most: float | None = None) -> int:
        """Wait for events of the socket, a wake, or the deadline. Return the socket's events, if there are any.

        Args:
            events: What to wait for.
            deadline: When the connection counts as lost.
            most: Without a deadline: most seconds to wait; 0 and ``None`` for any time.

        Raises:
            Interrupted: As ``check`` says.
            Lost: The deadline is over.
        """
        self.check()
        if events != self._events:
            self._poll.modify(self._fd, events)
            self._events = events
        timeout = _milliseconds(deadline) if deadline is not None or not most else most * 1000
        found = 0
        for fd, happened in self._poll.poll(timeout):
            if fd == self._fd:
                found = happened
            else:
                self._waker.clear()
                self.check()
        if not found and deadline is not None and time.monotonic() >= deadline:
            raise Lost("it made no progress in time")
        return found

    def receive(self, view: memoryview) -> int:
        """Receive into ``view``; 0 if there is nothing now.

        Raises:
            Lost: The stream ended.
        """
        try:
            received = _iovec.receive_into(self._fd, view)
        except OSError as error:
            raise _lost(error) from error
        if received is None:
            raise Lost("it closed the connection", ended=True)
        return received

    def receive_at(self, address: int, nbytes: int) -> int:
        """Like `receive`, into one piece of memory, which the caller keeps."""
        try:
            received = _iovec.receive_at(self._fd, address, nbytes)
        except OSError as error:
            raise _lost(error) from error
        if received is None:
            raise Lost("it closed the connection", ended=True)
        return received

    def send(self, data: bytes | memoryview) -> int:
        """Send some of ``data``; 0 if the socket takes nothing now.

        Raises:
            Lost: The stream ended.
        """
        try:
            return _iovec.send_bytes(self._fd, data)
        except OSError as error:
            raise _lost(error) from error

    def receive_vectors(self, vectors: Vectors, position: int, limit: int) -> int:
        """Like `receive`, but directly to several ranges of memory."""
        try:
            received = _iovec.receive(self._fd, vectors, position, limit)
        except OSError as error:
            raise _lost(error) from error
        if received is None:
            raise Lost("it closed the connection", ended=True)
        return received

    def send_vectors(self, vectors: Vectors, position: int, limit: int) -> int:
        """Like `send`, but directly from several ranges of memory."""
        try:
            return _iovec.send(self._fd, vectors, position, limit)
        except OSError as error:
            raise _lost(error) from error

    def read(self, view: memoryview, deadline: float | None = None) -> None:
        """Fill ``view``."""
        while view:
            received = self.receive(view)
            if not received:
                self.wait(POLLIN, deadline)
            view = view[received:]

    def write(self, data: bytes, deadline: float | None = None) -> None:
        """Send all of ``data``."""
        sent = self.send(data)
        while sent < len(data):
            more = self.send(memoryview(data)[sent:])
            if not more:
                self.wait(POLLOUT, deadline)
            sent += more

    def round_trip(self) -> float:
        """Seconds of a round trip, as the kernel has measured it; 0 if it does not say."""
        if not hasattr(socket, "TCP_INFO"):
            return 0.0
        found = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ROUND_TRIP_AT + 4)
        return float(int.from_bytes(found[ROUND_TRIP_AT:], sys.byteorder)) / 1e6

    def pace(self, rate: float) -> None:
        """Send so many bytes in a second at most, where the kernel can do that. Any thread.

        Args:
            rate: Bytes in a second; 0 changes nothing.
        """
        if not rate or abs(rate - self._paced) < PACED_ANEW * self._paced or sys.platform != "linux":
            return
        self._paced = rate
        with contextlib.suppress(OSError):  # it is closed, or an old kernel does not pace
            self._sock.setsockopt(socket.SOL_SOCKET, MAX_PACING_RATE, struct.pack("=Q", int(rate)))

    def hung_up(self) -> bool:
        """Whether the peer has closed its end, even if there is still something to receive."""
        return _iovec.happened(self._fd, _HUNG_UP)

    def shut(self) -> None:
        """Tell the peer that this side sends nothing more."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def await_input(self, timeout: float) -> None:
        """Wait for something to receive, or for the timeout. Nothing interrupts it."""
        poll = select.poll()
        poll.register(self._fd, POLLIN)
        poll.poll(timeout * 1000)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


def prepare(sock: socket.socket, options: Options) -> None:
    """Set the options that both ends of every data connection use."""
    sock.setblocking(False)
    close_in_children(sock)  # its end is what proves to the other side that this process has ended
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # With these, also a side that only listens notices in about a minute that a machine has vanished.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if options.congestion:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, options.congestion.encode())


def why_not(congestion: str) -> str:
    """Why sockets cannot have this congestion control; empty if they can."""
    if not congestion:
        return ""
    if not hasattr(socket, "TCP_CONGESTION"):
        return f"this system does not let a socket choose its congestion control, {congestion!r}"
    try:
        with socket.socket() as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    except OSError as error:
        try:
            allowed = ALLOWED.read_text().strip()
        except OSError:
            allowed = "no others that could be listed"
        return (
            f"the kernel does not allow the congestion control {congestion!r} ({error.strerror}); it allows {allowed}"
        )
    return ""


def _lost(error: OSError) -> Lost:
    # A reset comes from a socket that is closed, or from a machine that has restarted. A timeout proves nothing.
    return Lost(f"the connection broke ({error})", ended=isinstance(error, ConnectionResetError | BrokenPipeError))


def _milliseconds(deadline: float | None) -> int | None:
    return None if deadline is None else max(0, math.ceil((deadline - time.monotonic()) * 1000))
