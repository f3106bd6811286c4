"""Encodes lists of memory descriptors as other connectors do. It is strict on input.

It is part of the plugin API, because backends need it whose library returns such descriptors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import msgspec

from statelink.errors import WireError

__all__ = ["pack_descriptors", "unpack_descriptors"]


def pack_descriptors(nested: Sequence[Sequence[bytes | None]] | Sequence[bytes]) -> bytes:
    """Descriptors as a msgpack array of bin, or of arrays of bin and nil. Nil stands for a buffer without one.

    An empty outer list is encoded as zero bytes.

    Raises:
        WireError: An entry has another type.
    """
    if not isinstance(nested, (list, tuple)):
        raise WireError("a list of descriptors is expected", cause=f"got {nested!r:.80}", code="wire.list")
    deep = any(isinstance(each, (list, tuple)) for each in nested)
    for number, each in enumerate(nested):
        if isinstance(each, (list, tuple)):
            good = all(item is None or isinstance(item, bytes) for item in each)
        else:
            good = not deep and isinstance(each, bytes)
        if not good:
            raise WireError(
                f"entry {number} is no descriptor",
                cause=f"{each!r:.80}: bytes, or a list of bytes or None where all entries are lists",
                code="wire.list",
            )
    return msgspec.msgpack.encode(nested) if len(nested) else b""


_nested = msgspec.msgpack.Decoder(list[list[bytes | None]])
_flat = msgspec.msgpack.Decoder(list[bytes])


@overload
def unpack_descriptors(data: bytes, *, nested: Literal[True]) -> list[list[bytes | None]]: ...
@overload
def unpack_descriptors(data: bytes, *, nested: Literal[False]) -> list[bytes]: ...
@overload
def unpack_descriptors(data: bytes, *, nested: bool) -> list[list[bytes | None]] | list[bytes]: ...
def unpack_descriptors(data: bytes, *, nested: bool) -> list[list[bytes | None]] | list[bytes]:
    """The inverse of `pack_descriptors`.

    Raises:
        WireError: The bytes are not such an array.
    """
    if not data:
        return []
    try:
        found = _nested.decode(data) if nested else _flat.decode(data)
    except msgspec.MsgspecError as error:
        raise _malformed(str(error)) from error
    if not found:
        raise _malformed("an empty array; an empty list is zero bytes")
    return found


def _malformed(cause: str) -> WireError:
    return WireError("a malformed list of descriptors", cause=cause, code="wire.list")
