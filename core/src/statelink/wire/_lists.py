"""The field's codecs for lists of buffers and of integer lists, to the byte, without their blind spots.

The layout: an empty list is zero bytes; any other is ``u32 n``, ``u32 length[0..n)``, then the payloads one after the
other, all little endian. A list of integer lists is such a list of little-endian arrays. Unlike the usual decoders,
these reject every input that was cut, padded, or announces other lengths than it has.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from statelink.errors import WireError

__all__ = [
    "pack_int_lists",
    "pack_list_of_buffers",
    "unpack_int_lists",
    "unpack_list_of_buffers",
]

ElementCode = Literal["i", "I", "Q"]
"""Element of an integer list: signed 32, unsigned 32, unsigned 64 bits."""

_TYPES: dict[str, npt.DTypeLike] = {"i": "<i4", "I": "<u4", "Q": "<u8"}
MAX_LISTS = 1 << 20
"""Most inner lists that are decoded."""
MAX_LENGTH = (1 << 32) - 1


def pack_list_of_buffers(buffers: Sequence[bytes | bytearray | memoryview]) -> bytes:
    """Join buffers; ``[]`` is zero bytes, and differs from ``[b""]``.

    Raises:
        WireError: It is no list, there are more than 2^20, or one is longer than 2^32 - 1 bytes.
    """
    buffers = _listed(buffers, "buffers")
    if not buffers:
        return b""
    try:
        views = [memoryview(buffer).cast("B") if len(buffer) else memoryview(b"") for buffer in buffers]
    except TypeError as error:
        raise WireError("a list holds what is no contiguous buffer", cause=str(error), code="wire.list") from error
    if len(views) > MAX_LISTS:
        raise WireError(f"{len(views)} buffers in a list", cause=f"at most {MAX_LISTS}", code="wire.list")
    sizes = [view.nbytes for view in views]
    if max(sizes) > MAX_LENGTH:
        raise WireError(f"a buffer of {max(sizes)} bytes in a list", cause=f"at most {MAX_LENGTH}", code="wire.list")
    header = np.array([len(views), *sizes], "<u4").tobytes()
    return b"".join([header, *views])


def unpack_list_of_buffers(data: bytes | bytearray | memoryview) -> list[memoryview]:
    """The inverse of `pack_list_of_buffers`. The views share ``data``'s memory.

    Raises:
        WireError: The header is cut, the count is zero or too large, or the lengths do not add up to the rest.
    """
    try:
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else view
    except TypeError as error:
        raise WireError("a packed list is no contiguous buffer", cause=str(error), code="wire.list") from error
    if not view.nbytes:
        return []
    if view.nbytes < 4:
        raise _malformed(f"a header of {view.nbytes} bytes")
    count = int.from_bytes(view[:4], "little")
    if count == 0:
        raise _malformed("a count of zero; an empty list is zero bytes")
    if count > MAX_LISTS or 4 + 4 * count > view.nbytes:
        raise _malformed(f"a count of {count} in {view.nbytes} bytes")
    sizes = np.frombuffer(view, "<u4", count, 4).astype(np.int64)
    ends = np.cumsum(sizes) + 4 + 4 * count
    if int(ends[-1]) != view.nbytes:
        raise _malformed(f"lengths that end at byte {int(ends[-1])} of {view.nbytes}")
    starts = (ends - sizes).tolist()
    return [view[a:b] for a, b in zip(starts, ends.tolist(), strict=True)]


def pack_int_lists(lists: Sequence[Any], code: ElementCode) -> bytes:
    """Join lists of integers (Python's, or one-dimensional integer arrays); ``None`` is an empty list.

    Raises:
        WireError: It is no list of lists; or a list is not one-dimensional, not integral, or holds a value that the
            element cannot.
    """
    given = _listed(lists, "lists of integers")
    return pack_list_of_buffers([_array(each, number, code).tobytes() for number, each in enumerate(given)])


def unpack_int_lists(data: bytes | bytearray | memoryview, code: ElementCode) -> list[npt.NDArray[np.integer[Any]]]:
    """The inverse of `pack_int_lists`: little-endian arrays, read-only, sharing ``data``'s memory.

    Raises:
        WireError: As `unpack_list_of_buffers`; or a list is cut inside an element.
    """
    kind = np.dtype(_element(code))
    found = unpack_list_of_buffers(data)
    for number, view in enumerate(found):
        if view.nbytes % kind.itemsize:
            raise _malformed(f"list {number} of {view.nbytes} bytes, with elements of {kind.itemsize}")
    arrays = [np.frombuffer(view, kind) for view in found]
    for array in arrays:
        array.flags.writeable = False
    return arrays


def _listed(given: Any, what: str) -> list[Any]:
    try:
        return list(given)
    except TypeError as error:
        raise WireError(f"a list of {what} is expected", cause=f"got {given!r:.80}", code="wire.list") from error


def _array(values: Any, number: int, code: ElementCode) -> npt.NDArray[np.integer[Any]]:
    kind = np.dtype(_element(code))
    if values is None:
        # A component without indices: the layout has no other way to say it, and it keeps its place.
        return np.empty(0, kind)
    if isinstance(values, range):
        values = np.arange(values.start, values.stop, values.step)
    try:
        # Python integers above 2^63 and below zero in one list have no integer type in common: try the target's own.
        raw = np.asarray(values) if isinstance(values, np.ndarray) or not len(values) else _from_list(values, kind)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"list {number} does not fit element {code!r}", cause=str(error), code="wire.list") from error
    if raw.ndim != 1 or (raw.size and raw.dtype.kind not in "iu"):
        raise WireError(
            f"list {number} is not a list of integers", cause=f"shape {raw.shape} of {raw.dtype}", code="wire.list"
        )
    limits = np.iinfo(kind)
    if raw.size and (int(raw.min()) < limits.min or int(raw.max()) > limits.max):
        raise WireError(
            f"list {number} has a value outside element {code!r}",
            cause=f"{int(raw.min())} to {int(raw.max())}; it holds {limits.min} to {limits.max}",
            code="wire.list",
        )
    return np.ascontiguousarray(raw, kind)


def _from_list(values: Any, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    numbers = []
    for value in values:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError("a bool is not an integer here")
        numbers.append(operator.index(value))
    limits = np.iinfo(kind)
    if numbers and (min(numbers) < limits.min or max(numbers) > limits.max):
        raise OverflowError(f"{min(numbers)} to {max(numbers)}; it holds {limits.min} to {limits.max}")
    return np.array(numbers, kind)


def _element(code: ElementCode) -> npt.DTypeLike:
    if code not in _TYPES:
        raise WireError(f"no element code {code!r}", hint="'i', 'I' or 'Q'", code="wire.list")
    return _TYPES[code]


def _malformed(cause: str) -> WireError:
    return WireError("a malformed list of buffers", cause=cause, code="wire.list")
