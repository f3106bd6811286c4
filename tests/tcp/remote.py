"""A backend in a process of its own, whose memory the test sees, and whose C library it can meddle with."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from statelink_conformance import RemoteBackend

PATIENCE = 20.0


def map_file(path: str) -> npt.NDArray[np.uint8]:
    """A whole file, shared with everybody who maps it."""
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


class Remote(RemoteBackend):
    """A `Node` in a process of its own; its methods are called as ``remote.do("name", ...)``, and those of `Reads`."""

    def __init__(self, nbytes: int) -> None:
        super().__init__("tcp", "node", ((nbytes,),), patience=3 * PATIENCE)
        self.address: int = self.do("where")

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        return self.arrays[0]

    def do(self, name: str, *arguments: Any, **options: Any) -> Any:
        return self.worker(call, self.worker.arena.path, len(self.memory), name, arguments, options)


class Reads:
    """What puts bytes in place: the C library's ``process_vm_readv`` and ``readv``."""

    def __init__(self) -> None:
        self._free = threading.Event()
        self._inside = threading.Event()
        self.reads()

    def reads(self, pause: float = 0.0, *, most: int = 0, held: bool = False, forbidden: bool = False) -> None:
        """From now on, every read takes so many seconds more, or waits for the next call of this.

        Args:
            pause: Seconds.
            most: Bytes that one read moves at most; 0 for as many as the kernel likes.
            held: Whether reads wait.
            forbidden: Whether no other process may be read, as where processes may not trace each other.
        """
        self._pause, self._most, self._forbidden = pause, most, forbidden
        self._inside.clear()
        if held:
            self._free.clear()
        else:
            self._free.set()

    def in_a_read(self) -> bool:
        """Whether one has begun, and perhaps waits, since that was said."""
        return self._inside.is_set()

    def change(self, library: Any) -> None:
        """Have a C library read as this says."""
        readv, copy = library.readv, library.process_vm_readv
        for function, arguments in ((readv, 3), (copy, 6)):
            function.restype, function.argtypes = ctypes.c_ssize_t, (ctypes.c_ulong,) * arguments

        def receive(fd: int, vectors: int, count: int) -> int:
            self._begin()
            return int(readv(fd, *self._first(vectors, count)))

        def read(pid: int, ours: int, many: int, theirs: int, more: int, flags: int) -> int:
            self._begin()
            if self._forbidden:
                ctypes.set_errno(errno.EPERM)
                return -1
            return int(copy(pid, *self._first(ours, many), theirs, more, flags))

        library.readv, library.process_vm_readv = receive, read

    def _begin(self) -> None:
        self._inside.set()
        self._free.wait(PATIENCE)
        time.sleep(self._pause)

    def _first(self, vectors: int, count: int) -> tuple[Any, int]:
        """The vectors, or a part of the first one. The kernel reads no more than there is room for."""
        if not self._most:
            return vectors, count
        address, nbytes = (ctypes.c_ulong * 2).from_address(vectors)
        self._part = (ctypes.c_ulong * 2)(address, min(nbytes, self._most))
        return ctypes.addressof(self._part), 1


_node: list[Any] = []
"""In the process of a `Remote`: its `Reads` and its `Node`."""


def call(host: Any, path: str, nbytes: int, name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Runs in that process: call a method of its node, or of its `Reads`."""
    _node[:] = _node or _import_node(path, nbytes)
    reads, node = _node
    if name == "close_all":
        reads.reads()
    return getattr(reads if hasattr(reads, name) else node, name)(*arguments, **options)


def _library(kind: Callable[..., Any], own: Any, name: str | None, **named: Any) -> Any:
    """Load a library, unless it is the process itself."""
    return kind(name, **named) if name else own


def _import_node(path: str, nbytes: int) -> tuple[Reads, Any]:
    """Import the backend over a C library that the test controls."""
    kinds = "CDLL", "PyDLL"
    own: dict[str, Any] = {kind: getattr(ctypes, kind)(None, use_errno=True) for kind in kinds}
    reads = Reads()
    with contextlib.ExitStack() as patches:
        for kind in kinds:
            reads.change(own[kind])
            patches.enter_context(patch.object(ctypes, kind, partial(_library, getattr(ctypes, kind), own[kind])))
        from .node import Node
    return reads, Node(map_file(path)[:nbytes])
