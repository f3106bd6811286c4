"""Memory that several processes share, so that bytes are compared without a backend."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

__all__ = ["MIB", "POISON", "Arena", "Array", "view"]

Array = npt.NDArray[np.uint8]

MIB = 1 << 20
POISON = 0xA5
"""The byte in memory to which nobody should write."""


def view(path: str) -> Array:
    """The whole memory of an arena, in the calling process. It is shared with other processes."""
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


class Arena:
    """Anonymous shared memory. It takes no space before it is touched, and is freed with the process that made it.

    Args:
        nbytes: Its size.

    Attributes:
        path: A path with which another process of this user opens it, while this process keeps it open.
        bytes: The whole memory.
    """

    def __init__(self, nbytes: int) -> None:
        self._file = os.memfd_create("statelink-testing")
        os.ftruncate(self._file, nbytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._map = mmap.mmap(self._file, 0)
        self.bytes: Array = np.frombuffer(self._map, np.uint8)

    def discard(self, nbytes: int) -> None:
        """Give the first pages back. They are then zeros."""
        self._map.madvise(mmap.MADV_REMOVE, 0, nbytes)

    def close(self) -> None:
        """Close it. Processes that have mapped it keep it."""
        os.close(self._file)
