"""Says where an array's bytes are. Arrays of torch, numpy and others, and raw pointers become the same `Memory`."""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import msgspec
import numpy as np

from statelink._arguments import shown, text
from statelink.errors import StateError

from ._inventory import MAX_KIND, Region
from ._layout import MAX_DTYPE
from ._shares import as_int, ints, settle_ints

__all__ = ["Foreign", "Memory", "foreign", "name_of", "size_of"]

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

_STRIDED = "torch.strided"
FLAGS = (
    ("is_quantized", "quantised", "pass tensor.int_repr(), and the scale and zero point in a format tag"),
    ("is_conj", "conjugated on access", "pass tensor.resolve_conj()"),
    ("is_neg", "negated on access", "pass tensor.resolve_neg()"),
)
"""What makes equal bytes of two tensors of one type stand for different values, in torch's and in plain words."""


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


def name_of(dtype: np.dtype[Any]) -> str:
    """The name by which both sides compare an element type.

    For a plain type it is numpy's own, such as ``float32``, or with the byte order if that is not the machine's own,
    such as ``>f4``. For a structured type it has the name, type and offset of each field, in the order of their
    offsets, and the size: ``{'a': uint8 at 0, 'b': uint16 at 1; 3 bytes}``. A field of an array has its shape, as in
    ``float32[2, 3]``.

    Raises:
        StateError: The type has Python objects. These have no bytes of their own.
    """
    if dtype.hasobject:
        raise StateError("an array of Python objects has no state to move", cause=f"its dtype is {dtype}")
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return f"{name_of(base)}[{', '.join(map(str, shape))}]"
    if dtype.fields is None:
        return str(dtype.name if dtype.isnative else dtype.str)
    fields = sorted((dtype.fields[name][1], name, name_of(dtype.fields[name][0])) for name in dtype.names or ())
    said = ", ".join(f"{name!r}: {kind} at {offset}" for offset, name, kind in fields)
    return f"{{{said}; {dtype.itemsize} bytes}}"


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """An array in memory: address, shape, strides and type.

    Engines with raw pointers build it themselves. `Memory.of` reads it from a tensor or array. Nothing is copied and no
    reference is kept, so the owner of the memory must keep it alive while a link uses it.

    Attributes:
        address: Address of the first element, unsigned 64-bit.
        shape: Number of elements on each axis.
        strides: For each axis, bytes between neighbouring elements.
        dtype: Element type by its usual name.
        itemsize: Bytes of one element.
        region: The allocation that contains it. This is what gets registered.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    region: Region

    def __post_init__(self) -> None:
        settle_ints(self, "an array", "address", "itemsize")
        for field in ("shape", "strides"):
            given = getattr(self, field)
            found = ints(given, f"the {field} of an array")
            if found is not given:
                msgspec.structs.force_setattr(self, field, found)
        text(self.dtype, "the element type of an array", most=MAX_DTYPE)
        if not isinstance(self.region, Region):
            raise StateError(f"the region of an array is {shown(self.region)}", cause="a Region is expected")
        if min(self.shape, default=1) < 0 or self.itemsize < 1 or len(self.strides) != len(self.shape):
            raise StateError(
                "an array has an extent of zero or more and a stride on each axis, and elements of a byte or more",
                cause=f"shape {self.shape}, strides {self.strides}, elements of {self.itemsize} bytes",
            )

    @classmethod
    def of(cls, array: Any) -> Memory:
        """Describe a torch tensor, a numpy array, or a `Memory` (returned as it is).

        Other arrays are described by ``__dlpack__``, as of CuPy and JAX, or ``__cuda_array_interface__``, as of Numba.
        Then the region is the array's own extent. Nothing is waited for.

        Raises:
            StateError: It is none of these, or its bytes have no address.
        """
        if isinstance(array, Memory):
            return array
        if isinstance(array, np.ndarray):
            return _of_numpy(array)
        if callable(getattr(array, "data_ptr", None)) and callable(getattr(array, "untyped_storage", None)):
            return _of_tensor(array)
        found = foreign(array)
        if found is not None:
            address, shape, strides, dtype, itemsize, kind = found
            return cls.pointer(address, shape, dtype, itemsize, strides=strides, kind=kind)
        raise StateError(
            f"cannot read memory from a {type(array).__module__}.{type(array).__qualname__}",
            hint="pass a tensor of torch, an array of numpy, one with DLPack, or Memory.pointer(address, shape, ...)",
        )

    @classmethod
    def pointer(
        cls,
        address: int,
        shape: tuple[int, ...],
        dtype: str,
        itemsize: int,
        *,
        strides: tuple[int, ...] | None = None,
        region: Region | None = None,
        kind: str = "dram",
    ) -> Memory:
        """Describe memory of which only the address is known.

        Args:
            address: Address of the first element.
            shape: Number of elements on each axis.
            dtype: Element type by the name that numpy or torch gives it, such as ``bfloat16``, ``float8_e4m3fn`` or
                ``uint8``. It is compared verbatim with the other side's. Other names are allowed.
            itemsize: Bytes of one element.
            strides: For each axis, bytes between neighbouring elements; the default is dense and row-major.
            region: The allocation around it; the default is the array's own extent.
            kind: Memory kind of that extent, such as ``dram`` or ``cuda:0``.

        Raises:
            StateError: The numbers describe no array, or elements of that type have another size.
        """
        address, itemsize = as_int(address, "the address of an array"), as_int(itemsize, "the size of an element")
        shape = ints(shape, "the shape of an array")
        strides = None if strides is None else ints(strides, "the strides of an array")
        text(dtype, "the element type of an array", most=MAX_DTYPE)
        text(kind, "the memory kind of an array", most=MAX_KIND)
        if region is not None and not isinstance(region, Region):
            raise StateError(f"the region of an array is {shown(region)}", cause="a Region is expected")
        if min(shape, default=1) < 0 or itemsize < 1 or (strides is not None and len(strides) != len(shape)):
            raise StateError(
                "an array has an extent of zero or more and a stride on each axis, and elements of a byte or more",
                cause=f"shape {shape}, strides {strides}, elements of {itemsize} bytes",
            )
        known = size_of(dtype)
        if known not in (None, itemsize):
            raise StateError(
                f"an element of type {dtype!r} has {known} bytes",
                cause=f"{itemsize} were passed as the size of an element",
                hint="packed types are described as 'uint8', with a format tag",
            )
        if not math.prod(shape):
            return _empty(shape, dtype, itemsize, region.kind if region else kind)
        if strides is None:
            strides = tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        if region is None:
            span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + itemsize
            region = Region(address, span, kind)
        return cls(address=address, shape=shape, strides=strides, dtype=dtype, itemsize=itemsize, region=region)

    @property
    def offset(self) -> int:
        """Bytes from the start of the region to the first element."""
        return self.address - self.region.address


def size_of(dtype: object) -> int | None:
    """Bytes of one element of a type of numpy or torch, given by its usual name; ``None`` if the name is of neither."""
    if not isinstance(dtype, str):
        return None
    if dtype == "bfloat16":
        return 2
    if dtype.startswith("float8"):
        return 1
    try:
        known = np.dtype(dtype)
    except (TypeError, ValueError):
        return None
    return known.itemsize if known.kind in "biufc" else None


def _of_numpy(array: np.ndarray[Any, Any]) -> Memory:
    root: Any = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    low, high = np.lib.array_utils.byte_bounds(root)
    if array.dtype.hasobject:
        raise StateError("an array of Python objects has no state to move", cause=f"its dtype is {array.dtype}")
    if isinstance(array, np.ma.MaskedArray):
        raise StateError(
            "an array with a mask cannot be described",
            cause="a mask says which elements count, and only bytes move",
            hint="pass array.data if all elements count",
        )
    dtype = name_of(array.dtype)
    if not array.size:
        return _empty(array.shape, dtype, array.itemsize, "dram")
    return Memory(
        address=array.__array_interface__["data"][0],
        shape=array.shape,
        strides=array.strides,
        dtype=dtype,
        itemsize=array.itemsize,
        region=Region(low, high - low),
    )


def _of_tensor(tensor: Any) -> Memory:
    layout = str(getattr(tensor, "layout", _STRIDED))
    if layout != _STRIDED:
        raise StateError(
            "only a tensor with strides can be described",
            cause=f"the layout of this one is {layout}",
            hint="pass the pool as the engine's kernels use it",
        )
    for flag, words, hint in FLAGS:
        asked = getattr(tensor, flag, False)
        if asked() if callable(asked) else asked:
            raise StateError(
                f"a tensor that is {words} cannot be described",
                cause=f"its bytes alone do not say its values: `{flag}` of the tensor is true",
                hint=hint,
            )
    itemsize = int(tensor.element_size())
    dtype = str(tensor.dtype).removeprefix("torch.")
    kind = str(tensor.device) if tensor.device.type != "cpu" else "dram"
    shape = tuple(int(n) for n in tensor.shape)
    if not tensor.numel():
        return _empty(shape, dtype, itemsize, kind)
    storage = tensor.untyped_storage()
    if tensor.device.type == "meta" or not storage.data_ptr():
        raise StateError("a tensor without memory cannot be described", cause=f"its device is {kind!r}")
    if tensor.device.type != "cpu" and tensor.device.index is None:
        raise StateError(f"a tensor on {kind!r} does not say on which device", hint="move it to, say, 'cuda:0'")
    return Memory(
        address=int(tensor.data_ptr()),
        shape=shape,
        strides=tuple(int(s) * itemsize for s in tensor.stride()),
        dtype=dtype,
        itemsize=itemsize,
        region=Region(int(storage.data_ptr()), int(storage.nbytes()), kind),
    )


def _empty(shape: tuple[int, ...], dtype: str, itemsize: int, kind: str) -> Memory:
    """An array without elements. It is listed in its component, and has no memory to register."""
    strides = tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return Memory(address=1, shape=shape, strides=strides, dtype=dtype, itemsize=itemsize, region=Region(1, 1, kind))
