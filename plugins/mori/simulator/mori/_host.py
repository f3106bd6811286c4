"""The simulated machine: what it has, how it copies, and how the library ends a process on it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

IOV_MAX = 1024
WIDEST = 1 << 28

_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("process_vm_readv", "process_vm_writev"):
    _call = getattr(_libc, _name)
    _call.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)
    _call.restype = ctypes.c_ssize_t

PR_SET_PTRACER = 0x59616D61
_libc.prctl(PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)  # other processes stand for the NIC that reads our memory


def gpus() -> int:
    return int(os.environ.get("MORI_SIM_GPUS", "2"))


def active_ports() -> int:
    return int(os.environ.get("MORI_SIM_PORTS", "1"))


def numa_nodes() -> int:
    return int(os.environ.get("MORI_SIM_NUMA_NODES", "1"))


def memlock() -> float:
    """Bytes that this process may pin."""
    return float(os.environ.get("MORI_SIM_MEMLOCK", "inf"))


def lacks() -> list[str]:
    return [name for name in os.environ.get("MORI_SIM_LACKS", "").split(",") if name]


def max_msg() -> int:
    """What one request carries, as the port says."""
    return int(os.environ.get("MORI_SIM_MAX_MSG", str(1 << 30)))


def control_timeout() -> int:
    """How long a peer may take to answer, in milliseconds."""
    return int(os.environ.get("MORI_IO_CP_TIMEOUT_MS", "5000"))


def delay() -> float:
    """After how many seconds the bytes of an operation move."""
    return float(os.environ.get("MORI_SIM_DELAY_MS", "0.3")) / 1000


def file_of(variable: str) -> bool:
    """Whether a file exists that the environment names."""
    path = os.environ.get(variable, "")
    return bool(path) and os.path.exists(path)


def broken() -> bool:
    """Whether the NIC reports errors."""
    return file_of("MORI_SIM_BREAK")


def fault() -> bool:
    """Whether the NIC breaks connections by itself."""
    return file_of("MORI_SIM_FAULT")


def held() -> bool:
    """Whether no byte may move."""
    return file_of("MORI_SIM_HOLD")


def abort(why: str) -> NoReturn:
    """What a C++ ``assert`` does."""
    print(f"mori simulator: {why}", file=sys.stderr, flush=True)
    os.abort()


def leave(why: str) -> NoReturn:
    """What the library's ``exit(-1)`` does."""
    print(f"mori simulator: {why}", flush=True)  # its logs go to stdout
    os._exit(255)


def copy(pid: int, here: U64, there: U64, nbytes: U64, *, write: bool) -> str:
    """Copy blocks to (``write``) or from the memory of a process: what went wrong, empty if nothing did."""
    call = _libc.process_vm_writev if write else _libc.process_vm_readv
    for near, far, sizes in _pieces(here, there, nbytes):
        local = np.ascontiguousarray(np.column_stack((near, sizes)))
        remote = np.ascontiguousarray(np.column_stack((far, sizes)))
        moved = call(pid, local.ctypes.data, len(sizes), remote.ctypes.data, len(sizes), 0)
        if moved != int(sizes.sum()):
            return os.strerror(ctypes.get_errno()) if moved < 0 else "Bad address"
    return ""


def read(pid: int, address: int, nbytes: int) -> bytes:
    """Memory of a process, empty if it cannot be read."""
    buffer = np.zeros(nbytes, np.uint8)
    problem = copy(pid, _one(buffer.ctypes.data), _one(address), _one(nbytes), write=False)
    return b"" if problem else buffer.tobytes()


def mapped(pid: int, address: int, nbytes: int) -> bool:
    """Whether memory of a process is there, as far as its first and last byte tell."""
    return all(read(pid, each, 1) for each in (address, address + nbytes - 1))


def _one(value: int) -> U64:
    return np.array([value], np.uint64)


def _pieces(here: U64, there: U64, nbytes: U64) -> Iterator[tuple[U64, U64, U64]]:
    """At most as many blocks, and blocks of at most as many bytes, as one system call copies whole."""
    for first in range(0, len(nbytes), IOV_MAX):
        part = slice(first, first + IOV_MAX)
        if int(nbytes[part].sum()) <= WIDEST:
            yield here[part], there[part], nbytes[part]
            continue
        for near, far, size in zip(here[part].tolist(), there[part].tolist(), nbytes[part].tolist(), strict=True):
            for at in range(0, size, WIDEST):
                yield _one(near + at), _one(far + at), _one(min(WIDEST, size - at))
