"""A tcp backend with memory that the test can look at from outside: in this process, or in one of its own."""

from __future__ import annotations

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

from statelink.backend import BackendContext, Batch, Blocks, Op, Outcome, Region, Transfer
from statelink.tcp import TcpBackend, _iovec

U64 = npt.NDArray[np.uint64]
EVERYTHING = (1, (1 << 64) - 1)
PATIENCE = 20.0
COPY = _iovec.copy


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


class Node:
    """One process's backends, by link name, over one piece of memory. Every argument and result can be pickled."""

    def __init__(self, path: str) -> None:
        self.memory = map_file(path)
        self.address = self.memory.ctypes.data
        self.region = (self.address, self.memory.nbytes)
        self.backends: dict[str, TcpBackend] = {}
        self._transfers: list[Transfer] = []

    def facts(self) -> tuple[int, int]:
        return self.address, os.getpid()

    def open(self, link: str, **options: Any) -> bytes:
        backend = TcpBackend(BackendContext(options=TcpBackend.Options(**options), link=link))
        backend.register([Region(*self.region)])
        self.backends[link] = backend
        return backend.descriptor()

    def descriptor(self, link: str) -> bytes:
        return self.backends[link].descriptor()

    def connect(self, link: str, peer: str, descriptor: bytes, region: tuple[int, int] = EVERYTHING) -> None:
        self.backends[link].connect(peer, descriptor, [Region(*region)])

    def grant(self, link: str, peer: str, room: int, generation: int, addresses: U64, nbytes: U64) -> None:
        self.backends[link].grant(peer, room, generation, addresses, nbytes)

    def revoke(self, link: str, peer: str, room: int, generation: int) -> int:
        return self._keep(self.backends[link].revoke(peer, room, generation))

    def write(self, link: str, peer: str, room: int, generation: int, source: U64, target: U64, nbytes: U64) -> int:
        zeros = np.zeros(len(nbytes), np.uint32)
        batch = Batch(Op.WRITE, Blocks(source, target, nbytes, zeros, zeros), room, generation)
        return self._keep(self.backends[link].submit(peer, batch))

    def outcome(self, transfer: int) -> Outcome:
        outcome: Outcome = wait_for(lambda: self._transfers[transfer].outcome, "the end of a transfer")
        return outcome

    def settled(self, link: str, transfer: int) -> Outcome:
        """The outcome of a transfer that failed, once it is settled."""
        left = self._transfers[transfer]

        def look() -> bool:
            self.backends[link].poll([left])
            return left.outcome is not None and left.outcome.settled is True

        wait_for(look, "the proof that a transfer has stopped")
        assert left.outcome is not None
        return left.outcome

    def pending(self, transfer: int) -> bool:
        return self._transfers[transfer].outcome is None

    def mode(self, link: str, peer: str) -> str:
        return self.backends[link]._peers[peer].sender._mode.name

    def slow_down(self) -> None:
        """Make every piece that is copied from now on take a millisecond more, so that a test can get in between."""
        setattr(_iovec, "copy", _slow_copy)  # noqa: B010 - replaced, not assigned: it has another type

    def disconnect(self, link: str, peer: str) -> None:
        self.backends[link].disconnect(peer)

    def close(self, link: str) -> None:
        self.backends.pop(link).close()

    def close_all(self) -> None:
        for link in list(self.backends):
            self.close(link)
        setattr(_iovec, "copy", COPY)  # noqa: B010 - as above

    def held(self) -> tuple[int, int]:
        """Threads and file descriptors of this process."""
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def do(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method as if this were a `Remote`."""
        return getattr(self, name)(*arguments, **options)

    def _keep(self, transfer: Transfer) -> int:
        self._transfers.append(transfer)
        return len(self._transfers) - 1


class Remote:
    """A `Node` in a process of its own; its methods are called as ``remote.do("name", ...)``."""

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


def _slow_copy(*arguments: Any) -> int:
    time.sleep(0.001)
    return COPY(*arguments)


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def _serve(pipe: Any, path: str) -> None:
    node = Node(path)
    while True:
        try:
            name, arguments, options = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(node, name)(*arguments, **options)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
