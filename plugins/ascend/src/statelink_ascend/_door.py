"""Checks that a peer's process answers before the library connects.

The library may take two minutes to connect, and delays others. A port that accepts connections proves little: the
kernel also accepts for a stopped process, and another process may have the port. So each decode has a *door*: a port at
which a thread of its own says who it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time

from statelink.backend import close_in_children

__all__ = ["Door", "unanswered"]

MARK = 16
"""Number of bytes that a door sends."""
PAUSE_SECONDS = 0.2
"""Seconds without accepting after the system refused a connection, usually because descriptors ran out."""


def mark(link: str) -> bytes:
    """The bytes that the door of a link sends. They do not reveal its name."""
    return hashlib.blake2b(link.encode(), digest_size=MARK).digest()


class Door:
    """A port that tells every caller which link this is, and reads nothing. It has a thread of its own.

    Args:
        host: IP address at which it listens.
        link: The link's name.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(self, host: str, link: str) -> None:
        self._says = mark(link)
        self._closed = threading.Event()
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            self._socket.bind((host, 0))
            self._socket.listen(128)
            close_in_children(self._socket)
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._answer, name="statelink-ascend-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Returns when the thread has ended. May be called twice."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # this wakes the thread
        self._thread.join()
        self._socket.close()

    def _answer(self) -> None:
        """Runs on the thread."""
        while not self._closed.is_set():
            try:
                visitor = self._socket.accept()[0]
            except OSError:
                self._closed.wait(PAUSE_SECONDS)
                continue
            with visitor, contextlib.suppress(OSError):
                visitor.setblocking(False)  # never blocks, because a new connection takes these few bytes
                visitor.send(self._says)


def unanswered(host: str, door: int, engine: int, link: str, seconds: float) -> str:
    """Why the library should not connect to decode's engine, as a clause; empty if its process answers.

    Blocks. Any thread.

    Args:
        host: Its host.
        door: Port of its door.
        engine: Port of its engine.
        link: Name of its link.
        seconds: How long the check may take.
    """
    until = time.monotonic() + seconds
    try:
        with socket.create_connection((host, door), seconds) as sock:
            said = b""
            while len(said) < MARK:
                sock.settimeout(max(until - time.monotonic(), 0.001))
                more = sock.recv(MARK - len(said))
                if not more:
                    break
                said += more
    except TimeoutError:
        return f"its process did not answer at {host} port {door} within {seconds:g} s"
    except OSError as error:
        return f"its process does not answer at {host} port {door}: {error.strerror or error}"
    if said != mark(link):
        return f"somebody else answers at {host} port {door}"
    try:
        socket.create_connection((host, engine), max(until - time.monotonic(), 0.05)).close()
    except OSError as error:
        return f"its process answers, and its engine at port {engine} of {host} does not: {error.strerror or error}"
    return ""
