"""Memory of an NPU for the conformance kit, by CANN's own calls: ``--allocator npu_memory:Memory``, without torch."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

__all__ = ["Memory"]

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2


class Memory:
    """Memory of an NPU. It is kept for as long as the process lives.

    Args:
        kind: ``npu``, with or without a number.
        nbytes: Size.

    Raises:
        ValueError: The kind is another.
        OSError: CANN is not on the loader's path, or there is no such memory.
    """

    def __init__(self, kind: str, nbytes: int) -> None:
        name, _, number = kind.partition(":")
        if name != "npu":
            raise ValueError(f"CANN allocates memory of an NPU, not of kind {kind!r}")
        self._cann = ctypes.CDLL("libascendcl.so")
        self._device = int(number or 0)
        found = ctypes.c_void_p()
        self._call("aclrtMalloc", ctypes.byref(found), ctypes.c_size_t(nbytes), 0)
        self.address = found.value or 0

    def write(self, at: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy an array to an offset."""
        data = np.ascontiguousarray(data)
        self._copy(self.address + at, data.ctypes.data, data.nbytes, HOST_TO_DEVICE)

    def read(self, at: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy from an offset to an array."""
        whole = np.empty(data.nbytes, np.uint8)
        self._copy(whole.ctypes.data, self.address + at, whole.nbytes, DEVICE_TO_HOST)
        data.reshape(-1)[:] = whole

    def _copy(self, target: int, source: int, nbytes: int, way: int) -> None:
        size = ctypes.c_size_t(nbytes)
        self._call("aclrtMemcpy", ctypes.c_void_p(target), size, ctypes.c_void_p(source), size, way)

    def _call(self, name: str, *arguments: object) -> None:
        """Call CANN. It has a current NPU for each thread, so each call says which."""
        code = self._cann.aclrtSetDevice(self._device) or self._cann[name](*arguments)
        if code != 0:
            raise OSError(code, f"{name} failed with {code} on NPU {self._device}")
