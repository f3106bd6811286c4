"""A backend in a process of its own, whose memory the test sees, and whose C library it can meddle with."""

from __future__ import annotations

import ctypes
import errno
import mmap
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Remote", "make_file", "map_file", "wait_for"]

PATIENCE = 20.0


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of ``condition``."""
    end = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.002)
    return value


def map_file(path: str) -> npt.NDArray[np.uint8]:
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


def make_file(nbytes: int) -> str:
    handle, path = tempfile.mkstemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None, prefix="statelink-tcp-")
    os.ftruncate(handle, nbytes)
    os.close(handle)
    return path


class Remote:
    """A `Node` in a process of its own; its methods are called as ``remote.do("name", ...)``, and those of `Reads`."""

    def __init__(self, nbytes: int) -> None:
        self.path = make_file(nbytes)
        self.memory = map_file(self.path)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.path), daemon=True)
        self.process.start()
        theirs.close()
        self.address, self.pid = self.do("facts")

    def do(self, name: str, *arguments: Any, **options: Any) -> Any:
        self._pipe.send((name, arguments, options))
        assert self._pipe.poll(3 * PATIENCE), f"{name} did not return"
        ok, result = self._pipe.recv()
        if not ok:
            raise RuntimeError(result)
        return result

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            wait_for(lambda: _state(self.pid) == "T", "stopping")

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()
        os.unlink(self.path)


class Reads:
    """The C library's ``process_vm_readv``, with which one process reads another's memory."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._free = threading.Event()
        self._inside = threading.Event()
        self.let_reads_go()

    def slow_down(self) -> None:
        """Make every read take a millisecond more, so that a test can get in between."""
        self._pause = 0.001

    def hold_reads(self) -> None:
        self._free.clear()
        self._inside.clear()

    def in_a_read(self) -> bool:
        """Whether one waits in a read since they are held."""
        return self._inside.is_set()

    def forbid_reads(self) -> None:
        """As the kernel does where the processes may not trace each other."""
        self._forbidden = True

    def let_reads_go(self) -> None:
        """All is as usual."""
        self._pause, self._forbidden = 0.0, False
        self._free.set()

    def __call__(self, *arguments: Any) -> int:
        self._inside.set()
        self._free.wait(PATIENCE)
        time.sleep(self._pause)
        if self._forbidden:
            ctypes.set_errno(errno.EPERM)
            return -1
        return int(self._real(*arguments))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("argtypes", "restype"):
            setattr(self._real, name, value)
        else:
            super().__setattr__(name, value)


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def _serve(pipe: Any, path: str) -> None:
    """Be that process. The backend is imported here, over a C library that the test controls."""
    library = ctypes.CDLL
    made: list[Reads] = []

    def load(name: Any, *arguments: Any, **named: Any) -> Any:
        loaded = library(name, *arguments, **named)
        if name is None:
            made[:] = made or [Reads(loaded.process_vm_readv)]
            setattr(loaded, "process_vm_readv", made[0])  # noqa: B010 - it is no attribute that the type knows
        return loaded

    setattr(ctypes, "CDLL", load)  # noqa: B010 - as above
    from .node import Node

    setattr(ctypes, "CDLL", library)  # noqa: B010 - as above
    reads, node = made[0], Node(path)
    while True:
        try:
            name, arguments, options = pipe.recv()
        except EOFError:
            return
        try:
            if name == "close_all":
                reads.let_reads_go()
            called = getattr(reads if hasattr(reads, name) else node, name)
            pipe.send((True, called(*arguments, **options)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
