"""Arrays of libraries that this process does not have, as their protocols show them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from statelink import state
from statelink.errors import StateError

torch: Any = pytest.importorskip("torch")


class Shown:
    """An array that only has DLPack."""

    def __init__(self, array: Any, device: tuple[int, int] | None = None) -> None:
        self._array, self._device = array, device
        self.streams: list[int | None] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device or tuple(self._array.__dlpack_device__())

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self.streams.append(stream)
        return self._array.__dlpack__()


class Interface:
    """An array that only has CUDA's array interface."""

    def __init__(self, **said: Any) -> None:
        self.__cuda_array_interface__ = {"version": 3, "strides": None, **said}


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "float64", "complex64", "bool"])
def test_an_array_of_numpy_is_the_same_by_dlpack(dtype: str) -> None:
    whole: npt.NDArray[Any] = np.zeros((6, 4, 8), dtype)
    for array in (whole, whole[1:5, ::2]):
        shown, own = state.Memory.of(Shown(array)), state.Memory.of(array)
        assert (shown.address, shown.shape, shown.strides, shown.dtype, shown.itemsize) == (
            own.address,
            own.shape,
            own.strides,
            own.dtype,
            own.itemsize,
        )
        assert shown.region.kind == "dram"
        assert shown.region.address == array.__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16"])
def test_a_tensor_of_torch_is_the_same_by_dlpack(dtype: str) -> None:
    tensor = torch.zeros(4, 16, 8, dtype=getattr(torch, dtype))[:, 2:]
    shown, own = state.Memory.of(Shown(tensor)), state.Memory.of(tensor)
    assert (shown.address, shown.shape, shown.strides, shown.dtype) == (own.address, own.shape, own.strides, own.dtype)


@pytest.mark.parametrize(("device", "kind"), [((2, 1), "cuda:1"), ((10, 0), "cuda:0"), ((3, 0), "dram")])
def test_devices(device: tuple[int, int], kind: str) -> None:
    """Nobody waits for a stream of the device."""
    array = Shown(np.zeros((4, 8), np.float32), device)
    assert state.Memory.of(array).region.kind == kind
    assert array.streams == ([-1] if kind.startswith("cuda") else [None])


def test_what_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StateError, match=r"device that has no name here.*is 4"):
        state.Memory.of(Shown(np.zeros(4), (4, 0)))
    capsule = np.zeros(4, np.uint8).__dlpack__()
    point = ctypes.pythonapi.PyCapsule_GetPointer
    point.restype, point.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    code = ctypes.c_uint8.from_address(int(point(capsule, b"dltensor") or 0) + 20)
    code.value = 17  # a type of four bits
    shown = Shown(np.zeros(4, np.uint8))
    monkeypatch.setattr(Shown, "__dlpack__", lambda *_, **__: capsule)
    with pytest.raises(StateError, match=r"elements of a type that has no name here.*17 of 8 bits"):
        state.Memory.of(shown)


def test_the_interface_of_cuda() -> None:
    """It does not say on which device the array is: the driver knows."""
    dense = state.Memory.of(Interface(data=(4096, False), shape=(4, 16, 8), typestr="<f4"))
    assert (dense.address, dense.shape, dense.strides, dense.dtype) == (4096, (4, 16, 8), (512, 32, 4), "float32")
    assert dense.region == state.Region(4096, 4 * 16 * 8 * 4, "cuda")
    sparse = state.Memory.of(Interface(data=(4096, False), shape=(4, 8), strides=(64, 2), typestr="<i2"))
    assert (sparse.strides, sparse.region.nbytes) == ((64, 2), 3 * 64 + 8 * 2)
    with pytest.raises(StateError, match="mask"):
        state.Memory.of(Interface(data=(4096, False), shape=(4,), typestr="|u1", mask=object()))


def test_what_has_neither_is_refused() -> None:
    with pytest.raises(StateError, match=r"cannot read memory from a builtins\.list"):
        state.Memory.of([1, 2])
