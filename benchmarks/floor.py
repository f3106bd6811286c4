"""The least that moving blocks between two processes of a machine takes: the system call that copies them."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

__all__ = ["Rows", "copy", "libc", "merged"]

IOV_MAX = 1024
Rows = npt.NDArray[np.uint64]
"""Address and length of each block, one row each: an iovec array."""

libc = ctypes.CDLL(None, use_errno=True)
for _call in (libc.process_vm_readv, libc.process_vm_writev):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )


def copy(pid: int, source: Rows, target: Rows) -> None:
    """Read every block out of another process, 1,024 at once, on this thread."""
    for first in range(0, len(source), IOV_MAX):
        theirs, ours = source[first : first + IOV_MAX], target[first : first + IOV_MAX]
        wanted = int(ours[:, 1].sum())
        done = libc.process_vm_readv(pid, ours.ctypes.data, len(ours), theirs.ctypes.data, len(theirs), 0)
        if done != wanted:
            raise OSError(ctypes.get_errno(), f"process_vm_readv moved {done} of {wanted} bytes")


def merged(source: Rows, target: Rows) -> tuple[Rows, Rows]:
    """Join neighbours that are contiguous on both sides."""
    apart = np.ones(len(source), np.bool_)
    apart[1:] = False
    for rows in (source, target):
        apart[1:] |= rows[:-1, 0] + rows[:-1, 1] != rows[1:, 0]
    first = np.flatnonzero(apart)
    nbytes = np.add.reduceat(source[:, 1], first)
    return np.stack([source[first, 0], nbytes], axis=1), np.stack([target[first, 0], nbytes], axis=1)
