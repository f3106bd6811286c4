"""A stand-in for torch over the stand-in GPU: what `statelink.staged` calls, and no more.

Its tensors are memory of a device, and never give their bytes to the host. As with the real one, each thread has a
current device, which is the first one until something chooses another; and to leave a stream makes the device current
again that was so before, which makes a context there.
"""

from __future__ import annotations

import ctypes
import math
import threading
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from types import TracebackType

uint8, int64 = np.dtype(np.uint8), np.dtype(np.int64)
calls: list[str] = []
"""The name of the thread and of each kernel or view."""

_driver = ctypes.CDLL("libcuda.so.1")
_thread = threading.local()


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_driver, name)(*arguments)
    if status:
        raise RuntimeError(f"{name}: CUDA error {status}")


def _note(what: str) -> None:
    calls.append(f"{threading.current_thread().name}: {what}")


def _current_device() -> int:
    """The device of the thread's context; the first one if it has none, as CUDA's runtime has it."""
    found = c_int()
    return found.value if _driver.cuCtxGetDevice(byref(found)) == 0 else 0


def _use(index: int) -> None:
    """Make a device current, and its context with it."""
    context = c_void_p()
    _call("cuDevicePrimaryCtxRetain", byref(context), c_int(index))
    _call("cuCtxSetCurrent", context)


class device:
    def __init__(self, kind: object) -> None:
        self.type, _, index = str(kind).partition(":")
        self.index = int(index or 0)


class Tensor:
    def __init__(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, where: device
    ) -> None:
        self.address, self.shape, self.strides, self.dtype, self.device = (
            address,
            shape,
            strides,
            np.dtype(dtype),
            where,
        )
        self.host: Any = None

    def data_ptr(self) -> int:
        return self.address

    def __getitem__(self, part: slice) -> Tensor:
        (length,), (stride,) = self.shape, self.strides
        first, end, _ = part.indices(length)
        return Tensor(self.address + first * stride, (end - first,), (stride,), self.dtype, self.device)

    def view(self, *shape: Any) -> Tensor:
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        if isinstance(shape[0], np.dtype):
            assert len(self.shape) == 1
            width = shape[0].itemsize
            assert self.address % width == 0 == nbytes % width
            return Tensor(self.address, (nbytes // width,), (width,), shape[0], self.device)
        known = math.prod(each for each in shape if each != -1)
        full = tuple(nbytes // self.dtype.itemsize // known if each == -1 else each for each in shape)
        strides = tuple(self.dtype.itemsize * math.prod(full[axis + 1 :]) for axis in range(len(full)))
        return Tensor(self.address, full, strides, self.dtype, self.device)

    def index_copy_(self, dim: int, rows: Tensor, source: Tensor) -> None:
        _rows("scatter", self, dim, rows, source)


class _Host:
    def __init__(self, array: Any) -> None:
        self.array = array

    def to(self, where: device) -> Tensor:
        made = Tensor(0, self.array.shape, (), self.array.dtype, where)
        made.host = np.array(self.array)
        return made


def from_numpy(array: Any) -> _Host:
    return _Host(array)


def empty(nbytes: int, dtype: Any, device: device) -> Tensor:
    _use(device.index)
    address = c_uint64()
    _call("cuMemAlloc_v2", byref(address), c_size_t(nbytes))
    return Tensor(address.value, (nbytes,), (1,), dtype, device)


def as_tensor(array: Any, device: device) -> Tensor:
    _note("view")
    said = array.__cuda_array_interface__
    return Tensor(said["data"][0], said["shape"], said["strides"], np.dtype(said["typestr"]), device)


def index_select(tensor: Tensor, dim: int, rows: Tensor, out: Tensor) -> None:
    _rows("gather", tensor, dim, rows, out)


def _rows(what: str, tensor: Tensor, dim: int, rows: Tensor, packed: Tensor) -> None:
    assert dim == 1
    assert tensor.dtype == packed.dtype
    _note(what)
    _use(packed.device.index)
    width = tensor.shape[2] * tensor.dtype.itemsize
    for array in range(tensor.shape[0]):
        for place, row in enumerate(rows.host.tolist()):
            assert 0 <= row < tensor.shape[1]
            there = tensor.address + array * tensor.strides[0] + row * tensor.strides[1]
            here = packed.address + array * packed.strides[0] + place * packed.strides[1]
            target, source = (here, there) if what == "gather" else (there, here)
            stream = getattr(_thread, "stream", c_void_p(0))
            _call("cuMemcpyAsync", c_uint64(target), c_uint64(source), c_size_t(width), stream)


class cuda:
    @staticmethod
    def is_available() -> bool:
        """What is not part of this stand-in takes the driver itself."""
        return False

    class Stream:
        def __init__(self, where: device) -> None:
            _use(where.index)
            self.device, self.handle = where, c_void_p()
            _call("cuStreamCreate", byref(self.handle), c_int(1))

        def synchronize(self) -> None:
            _call("cuStreamSynchronize", self.handle)

    class stream:
        def __init__(self, stream: cuda.Stream) -> None:
            self._stream = stream

        def __enter__(self) -> None:
            self._device = _current_device()
            _use(self._stream.device.index)
            _thread.stream = self._stream.handle

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            del _thread.stream
            _use(self._device)
