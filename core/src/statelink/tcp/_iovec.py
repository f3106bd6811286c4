"""Vectored system calls on raw memory, without a Python object per block.

``sendmsg`` and ``readv`` move bytes between a socket and memory. ``process_vm_readv`` moves them from another process's
memory to this one's. All three release the interpreter lock. A wrong address gives an error and never a crash.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import sys
from typing import Final

import numpy as np

from ._ranges import U64, merge

__all__ = ["NO_SIGNAL", "Vectors", "can_copy", "copy", "permit_ptrace", "read_memory", "receive", "send"]

IOV_MAX: Final = 1024
"""Most vectors that the kernel takes in one call."""

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


_libc = ctypes.CDLL(None, use_errno=True)
_sendmsg = _libc.sendmsg
_sendmsg.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_sendmsg.restype = ctypes.c_ssize_t
_readv = _libc.readv
_readv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_readv.restype = ctypes.c_ssize_t
_process_vm_readv = getattr(_libc, "process_vm_readv", None)  # only Linux has it
if _process_vm_readv is not None:
    _process_vm_readv.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
    _process_vm_readv.restype = ctypes.c_ssize_t

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

    __slots__ = ("_address", "_ends", "_vectors", "_window", "total")

    def __init__(self, addresses: U64, nbytes: U64) -> None:
        addresses, nbytes = merge(addresses, nbytes)
        self._vectors = np.empty((len(nbytes), 2), np.uint64)
        self._vectors[:, 0], self._vectors[:, 1] = addresses, nbytes
        self._ends = np.cumsum(nbytes, dtype=np.uint64)
        self._window = np.empty((min(len(nbytes), IOV_MAX), 2), np.uint64)
        self._address = self._window.ctypes.data
        self.total = int(self._ends[-1])

    def window(self, position: int, limit: int) -> tuple[int, int]:
        """Make a window: address and number of the vectors for at most ``limit`` bytes from byte ``position`` on."""
        first = int(np.searchsorted(self._ends, np.uint64(position), side="right"))
        stop = int(np.searchsorted(self._ends, np.uint64(position + limit), side="left")) + 1
        stop = min(stop, first + IOV_MAX, len(self._ends))
        window = self._window[: stop - first]
        window[:] = self._vectors[first:stop]
        surplus = int(self._ends[stop - 1]) - (position + limit)
        if surplus > 0:
            window[-1, 1] = int(window[-1, 1]) - surplus
        skipped = position - int(self._ends[first - 1]) if first else position
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
    return _moved(_sendmsg(fd, ctypes.addressof(message), NO_SIGNAL))


def receive(fd: int, vectors: Vectors, position: int, limit: int) -> int | None:
    """Receive up to ``limit`` bytes to ``position`` on from a non-blocking socket; 0 if it has none now.

    ``None`` is the end of the stream.

    Raises:
        OSError: The socket's error.
    """
    address, count = vectors.window(position, limit)
    moved = _readv(fd, address, count)
    return None if moved == 0 else _moved(moved)


def copy(pid: int, source: Vectors, target: Vectors, position: int, limit: int) -> int:
    """Copy at least one and at most ``limit`` bytes at ``position`` from memory of process ``pid`` to this one's.

    The two lists may have different ranges. The kernel stops at the end of the shorter window.

    Raises:
        OSError: The kernel refuses, the process is gone, or an address is not mapped.
    """
    if _process_vm_readv is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    there, there_count = source.window(position, limit)
    here, here_count = target.window(position, limit)
    moved = int(_process_vm_readv(pid, here, here_count, there, there_count, 0))
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


def _moved(result: int) -> int:
    if result >= 0:
        return result
    number = ctypes.get_errno()
    if number in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR):
        return 0
    raise OSError(number, os.strerror(number))
