"""Reads memory of a device of CUDA from the host, through the driver."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from statelink.errors import TransferError

__all__ = ["CudaReader"]

BUFFER_BYTES = 16 << 20
"""Pinned memory of one reader."""
NON_BLOCKING = 1
"""A stream that does not wait for the default one."""

Bytes = npt.NDArray[np.uint8]


class CudaReader:
    """Copies stretches of memory of one device to pinned memory of the host. Thread-safe; blocks.

    The stream and the pinned memory are made when something is read first, and are kept as long as the process lives.

    Args:
        library: ``libcuda``, loaded and started.
        device: The device's number in this process.
    """

    def __init__(self, library: Any, device: int) -> None:
        self._library = library
        self._device = device
        self._lock = threading.Lock()
        """One thread at a time uses the pinned memory."""
        self._context = ctypes.c_void_p()
        self._stream = ctypes.c_void_p()
        self._buffer: Bytes | None = None

    def read(self, addresses: Sequence[int], nbytes: int) -> Iterator[Bytes]:
        """The bytes of stretches of one length, in order and without gaps.

        Yields them in pieces of at most `BUFFER_BYTES`. Each piece counts until the next one is asked for.

        Args:
            addresses: Where each stretch begins, on the device.
            nbytes: Bytes of each.

        Raises:
            TransferError: The driver reports an error.
        """
        with self._lock:
            buffer = self._buffer if self._buffer is not None else self._opened()
            used = 0
            for address in addresses:
                at, end = address, address + nbytes
                while at < end:
                    size = min(end - at, BUFFER_BYTES - used)
                    target = ctypes.c_void_p(int(buffer.ctypes.data) + used)
                    self._inside(
                        "cuMemcpyDtoHAsync_v2", target, ctypes.c_uint64(at), ctypes.c_size_t(size), self._stream
                    )
                    at, used = at + size, used + size
                    if used == BUFFER_BYTES:
                        self._inside("cuStreamSynchronize", self._stream)
                        yield buffer
                        used = 0
            if used:
                self._inside("cuStreamSynchronize", self._stream)
                yield buffer[:used]

    def _opened(self) -> Bytes:
        number, memory = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(self._device))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)
        self._inside("cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(NON_BLOCKING))
        self._inside("cuMemHostAlloc", ctypes.byref(memory), ctypes.c_size_t(BUFFER_BYTES), ctypes.c_uint(0))
        array = (ctypes.c_uint8 * BUFFER_BYTES).from_address(int(memory.value or 0))
        self._buffer = found = np.ctypeslib.as_array(array)
        return found

    def _inside(self, name: str, *arguments: Any) -> None:
        """Call the driver with the device's context, and leave the thread's own as it was."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(name, *arguments)
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            what = f"memory of device {self._device} could not be read"
            raise TransferError(what, cause=f"{name}: CUDA error {status}")
