"""Vectored system calls on raw memory, without a Python object per block.

``sendmsg`` and ``readv`` move bytes between a socket and memory. ``process_vm_readv`` moves them from another process's
memory to this one's. A wrong address gives an error and never a crash.

A call that may move much lets go of the interpreter. One that moves at most `MOST_PROMPT_BYTES` bytes keeps it: it
takes a few microseconds, and beside a thread that computes, it could take 5 ms to get the interpreter back.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

__all__ = [
    "MOST_PROMPT_BYTES",
    "NO_SIGNAL",
    "U64",
    "Vectors",
    "can_copy",
    "copy",
    "happened",
    "is_mapped",
    "permit_ptrace",
    "read_memory",
    "receive",
    "receive_at",
    "receive_into",
    "send",
    "send_bytes",
]

U64 = npt.NDArray[np.uint64]

IOV_MAX: Final = 1024
"""Most vectors that the kernel takes in one call."""

VECTOR: Final = 16
"""Bytes of a vector: an address and a length."""

WORTH_JOINING: Final = 64
"""Of more vectors than this, those that continue each other are joined. The kernel takes so few as they are."""

MOST_PROMPT_BYTES: Final = 128 << 10
"""Most bytes that a call moves while it keeps the interpreter."""

PR_SET_PTRACER: Final = 0x59616D61
PR_SET_PTRACER_ANY: Final = ctypes.c_ulong(-1)


class _Message(ctypes.Structure):
    """``struct msghdr``."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("vectors", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Watched(ctypes.Structure):
    """``struct pollfd``."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("happened", ctypes.c_short))


class _Calls:
    """The system calls of a C library. Those that are missing raise `OSError`: only Linux has ``process_vm_readv``."""

    def __init__(self, libc: ctypes.CDLL) -> None:
        number, pointer, size, long = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ulong
        self.sendmsg = self._function(libc, "sendmsg", number, pointer, number)
        self.readv = self._function(libc, "readv", number, pointer, number)
        self.send = self._function(libc, "send", number, pointer, size, number)
        self.recv = self._function(libc, "recv", number, pointer, size, number)
        self.poll = self._function(libc, "poll", pointer, long, number)
        self.memmove = self._function(libc, "memmove", pointer, pointer, size)
        self.process_vm_readv = self._function(libc, "process_vm_readv", number, pointer, long, pointer, long, long)

    @staticmethod
    def _function(libc: ctypes.CDLL, name: str, *arguments: Any) -> Callable[..., int]:
        found = getattr(libc, name, None)
        if found is None:
            return _missing
        found.restype, found.argtypes = ctypes.c_ssize_t, arguments
        return cast("Callable[..., int]", found)


def _missing(*arguments: int) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


_libc = ctypes.CDLL(None, use_errno=True)
_letting_go = _Calls(_libc)
_keeping = _Calls(ctypes.PyDLL(None, use_errno=True))

# A lost peer must not end the process, whatever the application does with SIGPIPE.
NO_SIGNAL: Final[int] = getattr(socket, "MSG_NOSIGNAL", 0)


class Vectors:
    """Ranges of memory, one after the other, in the form that the kernel takes.

    The array itself never changes. If a call moves fewer bytes than asked, the next call starts at a byte position,
    with a new window. A window is valid until the next one is made, so only one thread at a time may use an object. The
    object does not keep the memory alive.

    Attributes:
        total: Bytes of all ranges together.
    """

    __slots__ = ("_address", "_ends", "_vectors", "_whole", "_window", "total")

    def __init__(self, addresses: U64, nbytes: U64) -> None:
        self._ends: U64 | None = None
        """Where each range ends, as a number of bytes. Of few ranges, only a window has to know."""
        if len(nbytes) > WORTH_JOINING:
            addresses, nbytes = _merge(addresses, nbytes)
            self._ends = np.add.accumulate(nbytes)
        self._vectors = vectors = np.empty((len(nbytes), 2), np.uint64)
        vectors[:, 0], vectors[:, 1] = addresses, nbytes
        self._whole: int = vectors.__array_interface__["data"][0]
        self._window: U64 | None = None
        self._address = 0
        """Where the window is, once it is made."""
        self.total = int(np.add.reduce(nbytes))

    def twin(self) -> Vectors:
        """The same ranges, for another thread."""
        made = object.__new__(Vectors)
        made._vectors, made._whole, made.total = self._vectors, self._whole, self.total
        made._ends, made._window = self._ends, None
        return made

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Address and length of each range."""
        return zip(self._vectors[:, 0].tolist(), self._vectors[:, 1].tolist(), strict=True)

    def window(self, position: int, limit: int) -> tuple[int, int]:
        """Make a window: address and number of the vectors for at most ``limit`` bytes from byte ``position`` on."""
        count = len(self._vectors)
        if position == 0 and self.total <= limit and count <= IOV_MAX:
            return self._whole, count
        if self._ends is None:
            self._ends = np.add.accumulate(self._vectors[:, 1])
        if self._window is None:
            self._window = np.empty((min(count, IOV_MAX), 2), np.uint64)
            self._address = self._window.ctypes.data
        ends = self._ends
        # Neither `searchsorted` nor a copy by numpy: they let go of the interpreter.
        first = bisect_right(ends, position)
        stop = min(bisect_left(ends, position + limit) + 1, first + IOV_MAX, count)
        window = self._window[: stop - first]
        _keeping.memmove(self._address, self._whole + first * VECTOR, (stop - first) * VECTOR)
        surplus = int(ends[stop - 1]) - (position + limit)
        if surplus > 0:
            window[-1, 1] = int(window[-1, 1]) - surplus
        skipped = position - int(ends[first - 1]) if first else position
        if skipped:
            window[0] = (int(window[0, 0]) + skipped, int(window[0, 1]) - skipped)
        return self._address, stop - first


def send(fd: int, vectors: Vectors, position: int, limit: int) -> int:
    """Send up to ``limit`` bytes from ``position`` on over a non-blocking socket; 0 if it takes none now.

    Raises:
        OSError: The socket's error.
    """
    address, count = vectors.window(position, limit)
    message = _Message(vectors=address, count=count)
    calls = _calls(min(limit, vectors.total - position))
    return _moved(calls.sendmsg(fd, ctypes.addressof(message), NO_SIGNAL))


def receive(fd: int, vectors: Vectors, position: int, limit: int) -> int | None:
    """Receive up to ``limit`` bytes to ``position`` on from a non-blocking socket; 0 if it has none now.

    ``None`` is the end of the stream.

    Raises:
        OSError: The socket's error.
    """
    address, count = vectors.window(position, limit)
    moved = _calls(min(limit, vectors.total - position)).readv(fd, address, count)
    return None if moved == 0 else _moved(moved)


def send_bytes(fd: int, data: bytes | memoryview) -> int:
    """As `send`, for one piece of Python's memory."""
    if len(data) > MOST_PROMPT_BYTES:
        data = memoryview(data)[:MOST_PROMPT_BYTES]
    return _moved(_keeping.send(fd, bytes(data), len(data), NO_SIGNAL))


def receive_into(fd: int, view: memoryview) -> int | None:
    """As `receive`, into one piece of Python's memory."""
    return receive_at(fd, ctypes.addressof((ctypes.c_char * len(view)).from_buffer(view)), len(view))


def receive_at(fd: int, address: int, nbytes: int) -> int | None:
    """As `receive`, into one piece of memory, which the caller keeps."""
    moved = (_keeping if nbytes <= MOST_PROMPT_BYTES else _letting_go).recv(fd, address, nbytes, 0)
    if moved > 0:
        return moved
    return None if moved == 0 else _moved(moved)


def happened(fd: int, events: int) -> bool:
    """Whether one of these events of `select.poll` has happened. Does not wait."""
    watched = _Watched(fd, events, 0)
    return _keeping.poll(ctypes.addressof(watched), 1, 0) > 0 and bool(watched.happened)


def copy(pid: int, source: Vectors, target: Vectors, position: int, limit: int) -> int:
    """Copy at least one and at most ``limit`` bytes at ``position`` from memory of process ``pid`` to this one's.

    The two lists may have different ranges. The kernel stops at the end of the shorter window.

    Raises:
        OSError: The kernel refuses, the process is gone, or an address is not mapped.
    """
    there, there_count = source.window(position, limit)
    here, here_count = target.window(position, limit)
    calls = _calls(min(limit, target.total - position))
    moved = calls.process_vm_readv(pid, here, here_count, there, there_count, 0)
    if moved < 1:
        number = ctypes.get_errno() if moved < 0 else errno.EFAULT
        raise OSError(number, os.strerror(number))
    return moved


def read_memory(pid: int, address: int, nbytes: int) -> bytes:
    """Read a few bytes of another process's memory.

    Raises:
        OSError: As `copy`.
    """
    buffer = np.zeros(nbytes, np.uint8)
    length = np.array([nbytes], np.uint64)
    source = Vectors(np.array([address], np.uint64), length)
    target = Vectors(np.array([buffer.ctypes.data], np.uint64), length)
    position = 0
    while position < nbytes:
        position += copy(pid, source, target, position, nbytes)
    return buffer.tobytes()


def is_mapped(vectors: Vectors) -> bool:
    """Whether the first and the last byte of each range can be read, in this process. For errors; it takes a while."""
    try:
        for address, nbytes in vectors.ranges():
            for place in (address, address + nbytes - 1):
                read_memory(os.getpid(), place, 1)
    except OSError:
        return False
    return True


def can_copy() -> bool:
    """Whether this machine has `copy`. The kernel may still refuse it for a process."""
    known = np.frombuffer(b"statelink", np.uint8)
    try:
        return read_memory(os.getpid(), known.ctypes.data, known.nbytes) == known.tobytes()
    except OSError:
        return False


def permit_ptrace() -> None:
    """Let any process of this user read this process's memory, although Yama is set. Does nothing without Yama."""
    if sys.platform == "linux":
        _libc.prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)


def _merge(addresses: U64, nbytes: U64) -> tuple[U64, U64]:
    """Join each range with the next ones in the list, if they continue it in memory."""
    if len(addresses) < 2:
        return addresses, nbytes
    apart = addresses[1:] != addresses[:-1] + nbytes[:-1]
    if np.logical_and.reduce(apart):  # all of them; `ndarray.all` calls the same through a function in Python
        return addresses, nbytes
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return addresses[first], np.add.reduceat(nbytes, first)


def _calls(nbytes: int) -> _Calls:
    return _keeping if nbytes <= MOST_PROMPT_BYTES else _letting_go


def _moved(result: int) -> int:
    if result >= 0:
        return result
    number = ctypes.get_errno()
    if number in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR):
        return 0
    raise OSError(number, os.strerror(number))
