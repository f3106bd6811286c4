"""Arrays of other libraries, such as CuPy, JAX and Numba, by the two protocols that these have in common."""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import numpy as np

from statelink.errors import StateError

from ._dtypes import name_of

__all__ = ["Foreign", "foreign"]

CPU, CUDA, CUDA_HOST, ROCM, ROCM_HOST = 1, 2, 3, 10, 11
"""Values of DLPack's ``DLDeviceType``. torch calls ROCm's devices ``cuda``, too, and so does Statelink."""
CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
"""Values of ``DLDataTypeCode`` whose names have the bits behind them."""
EIGHT_BITS = {6: "bool", 8: "float8_e4m3", 10: "float8_e4m3fn", 11: "float8_e4m3fnuz", 12: "float8_e5m2"} | {
    13: "float8_e5m2fnuz",
    14: "float8_e8m0fnu",
}
"""Those that have 8 bits."""
NO_WAIT = -1
"""The stream of ``__dlpack__`` for a caller that waits for nothing: only addresses are wanted."""


class Foreign(NamedTuple):
    """What an array says of itself.

    Attributes:
        address: Address of the first element.
        shape: Number of elements on each axis.
        strides: For each axis, bytes between neighbouring elements.
        dtype: Element type by its usual name.
        itemsize: Bytes of one element.
        kind: Memory kind; without a number if the array does not say which device it is on.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    kind: str


class _Tensor(ctypes.Structure):
    """``DLTensor``, with which a ``DLManagedTensor`` begins."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("axes", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


def foreign(array: Any) -> Foreign | None:
    """What an array with ``__dlpack__`` or ``__cuda_array_interface__`` says of itself; ``None`` if it has neither.

    Nothing is copied, nothing is waited for, and no reference is kept.

    Raises:
        StateError: It is on a device that has no name here, or has elements that have none.
    """
    if callable(getattr(array, "__dlpack__", None)) and callable(getattr(array, "__dlpack_device__", None)):
        return _of_dlpack(array)
    said = getattr(array, "__cuda_array_interface__", None)
    return None if said is None else _of_interface(said)


def _of_interface(said: Any) -> Foreign:
    dtype = np.dtype(said["typestr"])
    shape = tuple(int(each) for each in said["shape"])
    strides = said.get("strides")
    if said.get("mask") is not None:
        raise StateError("an array with a mask cannot be described", cause="a mask says which elements count")
    return Foreign(
        int(said["data"][0] or 0),
        shape,
        _dense(shape, dtype.itemsize) if strides is None else tuple(int(each) for each in strides),
        name_of(dtype),
        dtype.itemsize,
        "cuda",
    )


def _of_dlpack(array: Any) -> Foreign:
    device_type, device = (int(each) for each in array.__dlpack_device__())
    if device_type in (CPU, CUDA_HOST, ROCM_HOST):
        kind, capsule = "dram", array.__dlpack__()
    elif device_type in (CUDA, ROCM):
        kind, capsule = f"cuda:{device}", array.__dlpack__(stream=NO_WAIT)
    else:
        cause = f"DLPack's number of its device is {device_type}"
        hint = "pass Memory.pointer(address, shape, dtype, ..., kind=...)"
        raise StateError("an array is on a device that has no name here", cause=cause, hint=hint)
    point = ctypes.pythonapi.PyCapsule_GetPointer
    point.restype, point.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = _Tensor.from_address(point(capsule, b"dltensor"))  # valid while the capsule lives
    axes, itemsize = range(tensor.axes), tensor.bits // 8
    shape = tuple(tensor.shape[axis] for axis in axes)
    strides = tuple(tensor.strides[axis] * itemsize for axis in axes) if tensor.strides else _dense(shape, itemsize)
    return Foreign((tensor.data or 0) + tensor.offset, shape, strides, _named(tensor), itemsize, kind)


def _named(tensor: _Tensor) -> str:
    code, bits = tensor.code, tensor.bits
    name = EIGHT_BITS.get(code) if bits == 8 else None
    if name is None and code in CODES and not bits % 8:
        name = f"{CODES[code]}{bits}"
    if name is None or tensor.lanes != 1:
        raise StateError(
            "an array has elements of a type that has no name here",
            cause=f"DLPack's type {code} of {bits} bits and {tensor.lanes} lanes",
            hint="pass Memory.pointer(address, shape, dtype, ...), for packed types with 'uint8' and a format tag",
        )
    return name


def _dense(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
