"""Memory of a worker on a device: the worker serves it, and other processes read and write it as an array."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from statelink._devices import DeviceMemory, allocate

from . import _memory

if TYPE_CHECKING:
    from ._memory import Arena, Array
    from ._worker import Host

__all__ = ["DONE", "ORDER", "READ", "WRITE", "DeviceArena", "Store", "Window", "hold", "serve", "view"]

ORDER = struct.Struct("<cQQ")
"""A request to a worker: read or write, offset, and number of bytes."""
READ, WRITE, DONE = b"r", b"w", b"d"
COPY_SECONDS = 60.0
"""Seconds for one copy."""


def view(path: str) -> Array:
    """The whole memory of a worker, in the calling process. It is shared with other processes."""
    return cast("Array", Window(Store(path))) if path.startswith("@") else _memory.view(path)


class Store:
    """Memory that a worker holds on a device, seen from another thread or process.

    Args:
        path: The address at which it is served.
    """

    def __init__(self, path: str) -> None:
        name, slash, rest = path[1:].partition("/")
        self._mirror = _memory.view(slash + rest)
        self.nbytes = len(self._mirror)
        self._turn = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(COPY_SECONDS)
        self._socket.connect(f"\0{name}")

    def read(self, at: int, nbytes: int) -> Array:
        """A copy of what is there."""
        with self._turn:
            self._ask(READ, at, nbytes)
            found: Array = self._mirror[at : at + nbytes].copy()
            return found

    def write(self, at: int, data: Array) -> None:
        """Put bytes there."""
        with self._turn:
            self._mirror[at : at + data.size] = data.reshape(-1)
            self._ask(WRITE, at, data.size)

    def close(self) -> None:
        """Let go of it."""
        self._socket.close()

    def __del__(self) -> None:
        self._socket.close()  # called for views, too

    def _ask(self, what: bytes, at: int, nbytes: int) -> None:
        try:
            self._socket.sendall(ORDER.pack(what, at, nbytes))
            done = self._socket.recv(1)
        except OSError as error:
            raise ConnectionError(f"the process that holds this memory does not answer: {error}") from error
        if done != DONE:
            raise ConnectionError("the process that holds this memory has ended")


class Window(NDArrayOperatorsMixin):
    """Bytes of a device. To a clause, they are an array whose items are bytes or rows of bytes.

    It compares and converts as numpy's arrays do. A slice is a window again, and what is picked otherwise is a copy.

    Args:
        store: The memory.
        start: Offset of the first byte.
        shape: Number of items, and bytes of each if more than one; the whole memory by default.
    """

    def __init__(self, store: Store, start: int = 0, shape: tuple[int, ...] = ()) -> None:
        self._store = store
        self.start = start
        self.shape = shape or (store.nbytes,)

    @property
    def size(self) -> int:
        """Bytes."""
        return int(np.prod(self.shape))

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        found = self._store.read(self.start, self.size).reshape(self.shape)
        return found if dtype is None else found.astype(dtype)

    def __array_ufunc__(self, function: np.ufunc, method: str, *inputs: Any, **named: Any) -> Any:
        given = [np.asarray(each) if isinstance(each, Window) else each for each in inputs]
        return getattr(function, method)(*given, **named)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return self._part(key)
        rows = np.asarray(key)
        picked = [np.asarray(self._part(slice(row, row + 1)))[0] for row in rows.ravel().tolist()]
        return np.array(picked, np.uint8).reshape(rows.shape + self.shape[1:])

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, slice):
            part = self._part(key)
            data = np.empty(part.shape, np.uint8)
            data[...] = value
            self._store.write(part.start, data)
            return
        rows = np.asarray(key)
        values = np.broadcast_to(np.asarray(value, np.uint8), rows.shape + self.shape[1:])
        for row, each in zip(rows.ravel().tolist(), values.reshape(-1, *self.shape[1:]), strict=True):
            self[row : row + 1] = each

    def copy(self) -> np.ndarray[Any, Any]:
        """The current bytes."""
        return np.asarray(self)

    def any(self) -> bool:
        """Whether some byte is not zero."""
        return bool(np.asarray(self).any())

    def reshape(self, *shape: int) -> Window:
        """The same bytes in other rows; one extent may be -1."""
        known = int(np.prod([each for each in shape if each >= 0]))
        return Window(self._store, self.start, tuple(each if each >= 0 else self.size // known for each in shape))

    def _part(self, key: slice) -> Window:
        first, last, step = key.indices(len(self))
        if step != 1:
            raise IndexError("a window has every item between two")
        width = int(np.prod(self.shape[1:]))
        return Window(self._store, self.start + first * width, (max(last - first, 0), *self.shape[1:]))


class DeviceArena:
    """A worker's memory on a device, like `Arena` for host memory. It is freed with the worker.

    Args:
        path: The address at which the worker serves it.
        arena: Host memory through which the worker exchanges bytes.

    Attributes:
        path: The address for other processes.
        bytes: The whole memory.
    """

    def __init__(self, path: str, arena: Arena) -> None:
        self.path = path
        self._arena = arena
        self._store = Store(path)
        self.bytes: Array = cast("Array", Window(self._store))

    def discard(self, nbytes: int) -> None:
        """Give back the host memory that was used for the exchange."""
        self._arena.discard(nbytes)

    def close(self) -> None:
        """Let go of it."""
        self._store.close()
        self._arena.close()


def hold(host: Host, kind: str, by: str, path: str) -> tuple[int, str]:
    """Put the memory of a worker on a device. Returns its address, and where it is served. Runs in the worker.

    Args:
        host: This process.
        kind: The device.
        by: Allocates it, as for `statelink._devices.allocate`.
        path: The arena of this worker. Bytes are exchanged through it.
    """
    memory, served = serve(kind, by, path)
    host.on(kind, memory.address, lambda nbytes: allocate(kind, nbytes, by))
    return memory.address, served


def serve(kind: str, by: str, path: str) -> tuple[DeviceMemory, str]:
    """Allocate memory as large as a file, and serve it from threads. Returns it, and an address for `_window.view`.

    Args:
        kind: The device.
        by: Allocates it.
        path: Absolute path of the file. Bytes are exchanged through it.
    """
    mirror = _memory.view(path)
    memory = allocate(kind, len(mirror), by)
    name = f"statelink-testing-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")  # a socket without a file, because a killed process would leave a file behind
    listener.listen()

    def accept() -> None:
        while True:
            client = listener.accept()[0]
            threading.Thread(target=_answer, args=(client, memory, mirror), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return memory, f"@{name}{path}"


def _answer(client: socket.socket, memory: DeviceMemory, mirror: Array) -> None:
    """Copy bytes for one client. Runs on a thread of its own."""
    with client:
        while len(order := client.recv(ORDER.size, socket.MSG_WAITALL)) == ORDER.size:
            what, at, nbytes = ORDER.unpack(order)
            copy = memory.read if what == READ else memory.write
            copy(at, mirror[at : at + nbytes])
            client.sendall(DONE)
