"""The port of an engine, and calls that hold the interpreter's lock as the library's do."""

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

POLLOUT = 4

_locked = ctypes.PyDLL(None)  # unlike CDLL, a call of it does not let other Python threads run


class Server:
    """Takes connections, and says nothing: what stands for the control plane reads memory."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(256)
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()


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
            said = f"errno={errno.EAGAIN} ({os.strerror(errno.EAGAIN)})"
            raise RuntimeError(f"ReadMessageHeader(type) failed: expected 1 byte(s), received 0, {said}")
        _locked.usleep(left)
    return found
