"""Memory: which of it is an NPU's, how ranges are widened, and copies between processes."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["PAGE", "Column", "are_npu", "copy", "invite", "overlap", "widened"]

PAGE = 2 << 20
Column: TypeAlias = npt.NDArray[np.uint64]
MOST = 1024
"""Most vectors in one call of the kernel."""

_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.process_vm_writev, _libc.process_vm_readv):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)


def are_npu(addresses: Sequence[int]) -> bool:
    """Whether memory is an NPU's. Here, that is a mapping of a file whose name begins with ``npu``."""
    maps = Path("/proc/self/maps").read_text()
    found = [(int(a, 16), int(b, 16)) for a, b in re.findall(r"^(\w+)-(\w+) .*[/:]npu[^/]*$", maps, re.MULTILINE)]
    return all(any(begin <= address < end for begin, end in found) for address in addresses)


def widened(addresses: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges, widened to whole pages, sorted, and merged where they then overlap; not where they only touch."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(
        (a // PAGE * PAGE, -(-(a + n) // PAGE) * PAGE) for a, n in zip(addresses, sizes, strict=True)
    ):
        if found and begin < found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def overlap(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> bool:
    """Whether any two ranges share an address."""
    return any(begin < last and first < end for begin, end in one for first, last in other)


def invite() -> None:
    """Let other processes of this user reach into this one, where the kernel asks."""
    _libc.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)


def copy(pid: int, near: Column, far: Column, sizes: Column, write: bool) -> bool:
    """Move bytes from or to another process, which need not run for it; whether all of them moved."""
    call = _libc.process_vm_writev if write else _libc.process_vm_readv
    for first in range(0, len(sizes), MOST):
        part = slice(first, first + MOST)
        here = np.stack([near[part], sizes[part]], axis=1)
        there = np.stack([far[part], sizes[part]], axis=1)
        while len(here):
            moved = call(pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
            if moved <= 0:
                return False
            here, there = _rest(here, moved), _rest(there, moved)
    return True


def _rest(vectors: Column, moved: int) -> Column:
    """What remains of vectors when so many of their bytes have moved."""
    ends = np.cumsum(vectors[:, 1])
    done = int(np.searchsorted(ends, moved, side="right"))
    rest: Column = vectors[done:].copy()
    if len(rest):
        into = np.uint64(moved - (int(ends[done - 1]) if done else 0))
        rest[0, 0] += into
        rest[0, 1] -= into
    return rest
