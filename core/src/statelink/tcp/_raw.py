"""A plain TCP connection: what the ``tcp`` backend is measured against."""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from statelink.backend import Region

    Rows = npt.NDArray[np.uint64]

__all__ = ["RawSocket"]

MOST_VECTORS = 1024
"""Most blocks of one system call."""
TOKEN_BYTES = 16
STEP_SECONDS = 30.0
INTRODUCTION_SECONDS = 5.0
"""Seconds in which whoever has connected must show the token. It is shorter than `STEP_SECONDS`, for which the source
waits while a stranger is silent."""
COUNT = struct.Struct("!Q")


class RawSocket:
    """One connection. The source writes all blocks with ``sendmsg``, and the target reads them into place.

    The target is told once where the blocks are. It refuses blocks outside of its own memory, and connections without
    the token in its address.

    Args:
        host: Where the target listens.
        regions: Memory of this process.
    """

    def __init__(self, host: str, regions: Sequence[Region]) -> None:
        self._regions = regions
        self._token = secrets.token_bytes(TOKEN_BYTES)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family)
        self._socket: socket.socket | None = None
        self._accepted: socket.socket | None = None
        """The source's connection. The target's thread sets it."""
        self._blocks: list[memoryview] = []
        self._thread: threading.Thread | None = None

    def address(self) -> bytes:
        """Listen for the source, on a thread of its own."""
        if self._thread is None:
            thread = threading.Thread(target=self._receive, name="statelink-raw", daemon=True)
            thread.start()
            self._thread = thread  # not before it runs: `close` waits for it
        host, port = self._listening.getsockname()[:2]
        return self._token + f"{host} {port}".encode()

    def connect(self, peer: bytes, source: Rows, target: Rows) -> None:
        """Connect, and say where the blocks go."""
        if self._socket is not None:
            self._socket.close()
        host, port = peer[TOKEN_BYTES:].decode().split()
        self._socket = socket.create_connection((host, int(port)), timeout=STEP_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rows = np.ascontiguousarray(target, np.uint64)
        self._socket.sendall(peer[:TOKEN_BYTES] + COUNT.pack(len(rows)) + rows.tobytes())
        self._blocks = self._views(source)
        self._answered()

    def move(self) -> float:
        """Send every block, and wait for one byte from the target."""
        assert self._socket is not None, "connect() comes first"
        began = time.perf_counter()
        _send(self._socket, self._blocks)
        self._answered()
        return time.perf_counter() - began

    def close(self) -> None:
        """Close the connections, and end the target's thread. Not before `address` and `connect` have returned."""
        # A thread that waits at a socket does not notice `close` alone.
        for each in (self._listening, self._accepted):
            if each is not None:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        if self._socket is not None:
            self._socket.close()
        if self._thread is not None:
            self._thread.join(STEP_SECONDS)

    def _answered(self) -> None:
        assert self._socket is not None
        if not self._socket.recv(1):
            raise ConnectionError("the target has closed the connection")

    def _views(self, rows: Rows) -> list[memoryview]:
        """The blocks as memory of this process.

        Raises:
            OSError: One is outside of the regions.
        """
        wholes = [(each.address, _memory(each)) for each in self._regions]
        found = []
        for address, nbytes in rows.tolist():
            for start, whole in wholes:
                if start <= address and address + nbytes <= start + len(whole):
                    found.append(whole[address - start : address - start + nbytes])
                    break
            else:
                raise PermissionError(f"a block of {nbytes} bytes is outside of the memory")
        return found

    def _receive(self) -> None:
        """Target: take one source, and read every round that it sends until it closes. Runs on the target's thread."""
        with contextlib.suppress(OSError):  # the source's connection or the listening socket was closed
            while True:
                made, _ = self._listening.accept()
                with made:
                    self._accepted = made
                    if self._knows_token(made):
                        self._serve(made)
                        return

    def _knows_token(self, made: socket.socket) -> bool:
        """Whether it is the source that has connected. Others may hang up or stay silent; the source comes later."""
        made.settimeout(INTRODUCTION_SECONDS)
        try:
            return hmac.compare_digest(_exactly(made, TOKEN_BYTES), self._token)
        except OSError:
            return False

    def _serve(self, made: socket.socket) -> None:
        made.settimeout(STEP_SECONDS)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        (count,) = COUNT.unpack(_exactly(made, COUNT.size))
        if count > sum(each.nbytes for each in self._regions):
            raise PermissionError("there are more blocks than bytes")
        rows = np.frombuffer(_exactly(made, count * 16), np.uint64).reshape(count, 2)
        blocks = self._views(rows)
        made.sendall(b"k")
        made.settimeout(None)
        while True:
            _fill(made, blocks)
            made.sendall(b"k")


def _memory(region: Region) -> memoryview:
    return memoryview((ctypes.c_uint8 * region.nbytes).from_address(region.address)).cast("B")


def _exactly(made: socket.socket, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    _fill(made, [memoryview(data)])
    return bytes(data)


def _send(made: socket.socket, blocks: Sequence[memoryview]) -> None:
    for first in range(0, len(blocks), MOST_VECTORS):
        part = list(blocks[first : first + MOST_VECTORS])
        while part:
            part = _rest(part, made.sendmsg(part))


def _fill(made: socket.socket, blocks: Sequence[memoryview]) -> None:
    for first in range(0, len(blocks), MOST_VECTORS):
        part = list(blocks[first : first + MOST_VECTORS])
        while part:
            nbytes = made.recvmsg_into(part)[0]
            if not nbytes:
                raise ConnectionError("the source has closed the connection")
            part = _rest(part, nbytes)


def _rest(part: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of some blocks after so many bytes of them."""
    for number, block in enumerate(part):
        if nbytes < len(block):
            return [block[nbytes:], *part[number + 1 :]]
        nbytes -= len(block)
    return []
