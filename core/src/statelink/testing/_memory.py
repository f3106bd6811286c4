"""Memory that several processes see at once, so that bytes are looked at without asking a backend about them."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

__all__ = ["MIB", "POISON", "Arena", "Array", "view"]

Array = npt.NDArray[np.uint8]

MIB = 1 << 20
POISON = 0xA5
"""What memory holds that nobody should have written to."""


def view(path: str) -> Array:
    """All of an arena's memory, in the calling process; shared with everyone who has it."""
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


class Arena:
    """Anonymous shared memory. It takes no space before it is touched, and goes with the process that made it.

    Args:
        nbytes: Its size.

    Attributes:
        path: Where another process of this user finds it, for as long as this one keeps it open.
        bytes: All of it.
    """

    def __init__(self, nbytes: int) -> None:
        self._file = os.memfd_create("statelink-testing")
        os.ftruncate(self._file, nbytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._map = mmap.mmap(self._file, 0)
        self.bytes: Array = np.frombuffer(self._map, np.uint8)

    def discard(self, nbytes: int) -> None:
        """Give the first pages back; they read as zeros."""
        self._map.madvise(mmap.MADV_REMOVE, 0, nbytes)

    def close(self) -> None:
        """Let go of it; whoever has mapped it keeps it."""
        os.close(self._file)
