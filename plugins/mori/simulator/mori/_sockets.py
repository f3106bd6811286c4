"""Ports with threads behind them, and calls that hold the interpreter's lock as the library's do."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

LONGEST = 1 << 22
POLLOUT = 4

_locked = ctypes.PyDLL(None)  # unlike CDLL, a call of it does not let other Python threads run


class DropError(Exception):
    """Close the connection at once."""


class Server:
    """Answers the messages of each connection one by one, or each on a thread of its own."""

    def __init__(
        self,
        host: str,
        port: int,
        answer: Callable[[Any], Any],
        *,
        parallel: bool = False,
    ) -> None:
        self._answer = answer
        self._parallel = parallel
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(256)
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with self._lock:
            connections, self._open = self._open, set()
        for each in (self._socket, *connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with self._lock:
                    self._open.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        lock = threading.Lock()
        with contextlib.suppress(OSError, DropError):
            while True:
                message = receive(connection)
                if self._parallel:
                    threading.Thread(target=self._reply, args=(connection, lock, message), daemon=True).start()
                else:
                    self._reply(connection, lock, message)
        with self._lock:
            self._open.discard(connection)
        connection.close()

    def _reply(self, connection: socket.socket, lock: threading.Lock, message: Any) -> None:
        try:
            reply = self._answer(message)
            if reply is not None:
                with lock:
                    send(connection, reply)
        except DropError:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


def send(connection: socket.socket, message: Any) -> None:
    raw = msgspec.msgpack.encode(message)
    connection.sendall(struct.pack("<I", len(raw)) + raw)


def receive(connection: socket.socket) -> Any:
    (size,) = struct.unpack("<I", _exactly(connection, 4))
    if size > LONGEST:
        raise DropError
    return msgspec.msgpack.decode(_exactly(connection, size))


def reach_with_the_lock(host: str, port: int, answer: Callable[[], Any], timeout_ms: int) -> Any:
    """Connect, and ask until there is an answer; no other Python thread runs meanwhile.

    Raises:
        RuntimeError: Nobody listens there, or answers in time (0 waits for ever).
    """
    deadline = time.monotonic() + timeout_ms / 1000 if timeout_ms else float("inf")
    with socket.socket() as connection:
        connection.setblocking(False)
        connection.connect_ex((host, port))
        entry = ctypes.create_string_buffer(struct.pack("<ihh", connection.fileno(), POLLOUT, 0))
        _locked.poll(entry, 1, timeout_ms or -1)
        problem = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        raise RuntimeError(f"connect({host}:{port}): {os.strerror(problem)}")
    while (found := answer()) is None:
        left = int((min(deadline, time.monotonic() + 0.2) - time.monotonic()) * 1e6)
        if left <= 0:
            raise RuntimeError(f"ReadMessageHeader(type) failed from {host}:{port} errno={errno.EAGAIN}")
        _locked.usleep(left)
    return found


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            raise DropError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
