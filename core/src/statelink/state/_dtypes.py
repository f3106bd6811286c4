"""Names the element types of numpy, so that equal names mean that equal bytes have equal meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statelink.errors import StateError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["name_of"]


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
