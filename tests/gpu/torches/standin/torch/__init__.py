"""A stand-in for torch over the stand-in GPU: what `statelink.staged` and the benchmarks call, and no more.

Its tensors are memory of a device, and give their bytes to the host only by a copy. As with the real one, each thread
has a current device, which is the first one until something chooses another; and to leave a stream makes the device
current again that was so before, which makes a context there.
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

uint8, int16, int64, float32 = map(np.dtype, (np.uint8, np.int16, np.int64, np.float32))

_driver = ctypes.CDLL("libcuda.so.1")
_driver.cuInit(0)
_thread = threading.local()


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_driver, name)(*arguments)
    if status:
        raise RuntimeError(f"{name}: CUDA error {status}")


def _current_device() -> int:
    """The device of the thread's context; the first one if it has none, as CUDA's runtime has it."""
    found = c_int()
    return found.value if _driver.cuCtxGetDevice(byref(found)) == 0 else 0


def _use(index: int) -> None:
    """Make a device current, and its context with it."""
    context = c_void_p()
    _call("cuDevicePrimaryCtxRetain", byref(context), c_int(index))
    _call("cuCtxSetCurrent", context)


def _dense(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class device:
    def __init__(self, kind: object) -> None:
        self.type, _, index = str(kind).partition(":")
        self.index = int(index or 0)

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"


class _Storage:
    """The allocation of a tensor. It is freed when nobody has it any more."""

    def __init__(self, nbytes: int, on: device) -> None:
        _use(on.index)
        address = c_uint64()
        _call("cuMemAlloc_v2", byref(address), c_size_t(max(1, nbytes)))
        self._address, self._nbytes = address.value, nbytes

    def data_ptr(self) -> int:
        return self._address

    def nbytes(self) -> int:
        return self._nbytes

    def __del__(self) -> None:
        _driver.cuMemFree_v2(c_uint64(self._address))


class _Host:
    """Numbers in host memory, on their way to or from a device."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def to(self, where: Any) -> Any:
        if isinstance(where, np.dtype):
            return _Host(self._array.astype(where))
        array = np.ascontiguousarray(self._array)
        made = _made(array.shape, array.dtype, device(where))
        return made.copy_(_Host(array))

    def reshape(self, shape: tuple[int, ...]) -> _Host:
        return _Host(self._array.reshape(shape))

    def numpy(self) -> Any:
        return self._array


class Tensor:
    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: Any,
        on: device,
        storage: Any = None,
    ) -> None:
        self.address, self.shape, self.strides = address, shape, strides
        self.dtype, self.device, self._storage = np.dtype(dtype), on, storage

    def data_ptr(self) -> int:
        return self.address

    def untyped_storage(self) -> Any:
        return self._storage

    def element_size(self) -> int:
        return int(self.dtype.itemsize)

    def stride(self) -> tuple[int, ...]:
        return tuple(each // self.dtype.itemsize for each in self.strides)

    def numel(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return self.numel() * self.element_size()

    def __getitem__(self, part: Any) -> Any:
        if isinstance(part, Tensor):
            return self, part
        first, end, _ = part.indices(self.shape[0])
        at = self.address + first * self.strides[0]
        return Tensor(at, (end - first, *self.shape[1:]), self.strides, self.dtype, self.device, self._storage)

    def __setitem__(self, ids: Any, taken: Any) -> None:
        if isinstance(ids, slice):
            self.copy_(_Host(np.full(self[ids].shape, taken, self.dtype)))
            return
        source, rows = taken
        width = self.nbytes // len(self)
        for target, row in zip(ids.cpu().numpy().tolist(), rows.cpu().numpy().tolist(), strict=True):
            places = (self.address + target * width, source.address + row * width)
            _call("cuMemcpyAsync", *map(c_uint64, places), c_size_t(width), _stream())

    def view(self, *shape: Any) -> Tensor:
        if isinstance(shape[0], np.dtype):
            assert len(self.shape) == 1
            width = shape[0].itemsize
            assert self.address % width == 0 == self.nbytes % width
            full, dtype = (self.nbytes // width,), shape[0]
        else:
            known = math.prod(each for each in shape if each != -1)
            full = tuple(self.numel() // known if each == -1 else each for each in shape)
            dtype = self.dtype
        return Tensor(self.address, full, _dense(full, dtype.itemsize), dtype, self.device, self._storage)

    def copy_(self, source: _Host) -> Tensor:
        array = np.ascontiguousarray(source.numpy())
        assert (array.shape, array.dtype) == (self.shape, self.dtype)
        _use(self.device.index)
        _call("cuMemcpyHtoD_v2", c_uint64(self.address), c_void_p(array.ctypes.data), c_size_t(array.nbytes))
        return self

    def cpu(self) -> _Host:
        array = np.empty(self.shape, self.dtype)
        _use(self.device.index)
        _call("cuMemcpyDtoH_v2", c_void_p(array.ctypes.data), c_uint64(self.address), c_size_t(array.nbytes))
        return _Host(array)

    def index_copy_(self, dim: int, rows: Tensor, source: Tensor) -> None:
        _rows("scatter", self, dim, rows, source)


def _made(shape: tuple[int, ...], dtype: Any, on: device) -> Tensor:
    dtype = np.dtype(dtype)
    storage = _Storage(math.prod(shape) * dtype.itemsize, on)
    return Tensor(storage.data_ptr(), tuple(shape), _dense(tuple(shape), dtype.itemsize), dtype, on, storage)


def from_numpy(array: Any) -> _Host:
    return _Host(array)


def arange(count: int, device: Any) -> _Host:
    return _Host(np.arange(count))


def empty(nbytes: int, dtype: Any, device: device) -> Tensor:
    return _made((nbytes,), dtype, device)


def zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> Tensor:
    return _Host(np.zeros(shape, dtype)).to(device)  # type: ignore[no-any-return]


def zeros_like(tensor: Tensor) -> Tensor:
    return zeros(tensor.shape, tensor.dtype, tensor.device)


def as_tensor(array: Any, device: Any) -> Tensor:
    said = getattr(array, "__cuda_array_interface__", None)
    if said is None:
        return _Host(array).to(device)  # type: ignore[no-any-return]
    return Tensor(said["data"][0], said["shape"], said["strides"], np.dtype(said["typestr"]), device)


def index_select(tensor: Tensor, dim: int, rows: Tensor, out: Tensor) -> None:
    _rows("gather", tensor, dim, rows, out)


def _stream() -> Any:
    return getattr(_thread, "stream", c_void_p(0))


def _rows(what: str, tensor: Tensor, dim: int, rows: Tensor, packed: Tensor) -> None:
    assert dim == 1
    assert tensor.dtype == packed.dtype
    _use(packed.device.index)
    width = tensor.shape[2] * tensor.dtype.itemsize
    for array in range(tensor.shape[0]):
        for place, row in enumerate(rows.cpu().numpy().tolist()):
            assert 0 <= row < tensor.shape[1]
            there = tensor.address + array * tensor.strides[0] + row * tensor.strides[1]
            here = packed.address + array * packed.strides[0] + place * packed.strides[1]
            target, source = (here, there) if what == "gather" else (there, here)
            _call("cuMemcpyAsync", c_uint64(target), c_uint64(source), c_size_t(width), _stream())


class cuda:
    @staticmethod
    def is_available() -> bool:
        """What is not part of this stand-in takes the driver itself."""
        return False

    @staticmethod
    def synchronize() -> None:
        _call("cuCtxSynchronize")

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
