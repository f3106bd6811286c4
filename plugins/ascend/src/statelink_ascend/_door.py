"""Whether a peer's process answers, asked before the library connects, which may take two minutes and hold others up.

A port that accepts proves little: the kernel accepts for a process that stands still, and another process may have the
port by now. So each decode has a door, where its own thread says who it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time

__all__ = ["Door", "unanswered"]

MARK = 16
"""Bytes of what a door says."""
PAUSE = 0.2
"""Seconds without accepting after the system refused to, for want of descriptors as a rule."""


def mark(link: str) -> bytes:
    """What the door of a link says; its name stays untold."""
    return hashlib.blake2b(link.encode(), digest_size=MARK).digest()


class Door:
    """A port that says to whoever connects which link this is, and reads nothing. It has a thread of its own.

    Args:
        host: Where it listens, an IP literal.
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
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._answer, name="statelink-ascend-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; returns when the thread has ended. May be called twice."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        self._thread.join()
        self._socket.close()

    def _answer(self) -> None:
        """Runs on the thread."""
        while not self._closed.is_set():
            try:
                visitor = self._socket.accept()[0]
            except OSError:
                self._closed.wait(PAUSE)
                continue
            with visitor, contextlib.suppress(OSError):
                visitor.setblocking(False)  # a new connection takes these few bytes
                visitor.send(self._says)


def unanswered(host: str, door: int, engine: int, link: str, seconds: float) -> str:
    """Why a decode's engine should not be asked to connect, as a clause; empty where it answers. Blocks, any thread.

    Args:
        host: Where it is.
        door: Port of its door.
        engine: Port of its engine.
        link: Name of its link.
        seconds: How long it may take.
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
