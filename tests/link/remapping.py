"""Takes the memory of a link's pools away from its process, and brings it back at the same addresses."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.helpers.worker import Host

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
FIXED = 0x10
"""MAP_FIXED: at this address, and nowhere else."""
NOTHING = 0
"""PROT_NONE: whoever reads or writes there ends with a fault."""


def unmap(host: Host, key: str) -> None:
    """Nothing is at the addresses of a link's pools from here on. They stay reserved, so that nobody else gets them."""
    _map(host, key, NOTHING, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)


def map_again(host: Host, key: str) -> None:
    """The file of a link's pools is where it was before."""
    with host.memories[key].path.open("r+b") as file:
        _map(host, key, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file.fileno())


def _map(host: Host, key: str, may: int, how: int, file: int) -> None:
    memory = host.memories[key]
    where = memory.bytes.ctypes.data
    if _libc.mmap(where, memory.nbytes, may, how | FIXED, file, 0) != where:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
