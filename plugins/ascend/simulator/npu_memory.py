"""An NPU's memory for the conformance kit, as the simulated ``memfabric_hybrid`` knows it: a file by its name."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

__all__ = ["Memory"]


class Memory:
    """Memory of the simulated machine.

    Args:
        kind: ``npu``, with or without a number.
        nbytes: Size.
    """

    def __init__(self, kind: str, nbytes: int) -> None:
        if kind.partition(":")[0] != "npu":
            raise ValueError("the simulated machine has NPUs")
        file = os.memfd_create("npu")
        try:
            os.ftruncate(file, nbytes)
            self._bytes = np.frombuffer(mmap.mmap(file, 0), np.uint8)
        finally:
            os.close(file)
        self.address = int(self._bytes.ctypes.data)

    def write(self, at: int, data: npt.NDArray[np.uint8]) -> None:
        self._bytes[at : at + data.size] = data.reshape(-1)

    def read(self, at: int, data: npt.NDArray[np.uint8]) -> None:
        data.reshape(-1)[:] = self._bytes[at : at + data.size]
