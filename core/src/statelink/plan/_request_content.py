"""The content of a request: a short digest with which both sides see that they hold the same request."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from statelink._arguments import shown
from statelink.errors import RoomError

__all__ = ["MAX_CONTENT", "checked_content", "content_of"]

MAX_CONTENT = 64
"""Most bytes of a content."""
DIGEST = 16
"""Bytes of the digest that `content_of` returns."""
FORMAT = b"statelink content 1\n"
"""What the hashed bytes begin with. Another format has another number, so that equal digests mean equal formats."""

Value = str | bytes


def content_of(tokens: Any, **extras: Value | Sequence[Value] | None) -> bytes:
    """The content of a request: 16 bytes, equal on both sides exactly if the request is the same.

    The digest is the first 16 bytes of SHA-256 over these bytes, so that an engine in any language can make it. Every
    number is little endian, and has eight bytes:

    1. the ASCII text ``statelink content 1`` and a line feed
    2. the number of token ids, and each id, signed
    3. for each extra, in the order of the bytes of its name: the length of the name in bytes, the name in UTF-8, the
       number of its values, and for each value its length in bytes and the value, texts in UTF-8

    Call it from any thread. It reads ``tokens`` and keeps nothing.

    Args:
        tokens: The ids of the positions whose state moves: anything one-dimensional and integral, also a torch tensor
            in host memory.
        extras: What else decides the state of these positions, each a text, bytes, or several of these in their order.
            An extra that is ``None`` or an empty list counts as not given. Use these names, so that different engines
            agree: ``adapter`` for the name of a LoRA adapter, ``items`` for the hashes of multimodal items in the order
            of their positions, ``salt`` for a cache salt, ``embeddings`` for the SHA-256 of embeddings that a client
            gave instead of token ids, as little-endian float32.

    Raises:
        RoomError: The tokens are no list of whole numbers below 2^63, or an extra is neither text nor bytes
            (``room.content``).
    """
    ids = _ids(tokens)
    digest = hashlib.sha256(FORMAT)
    digest.update(_number(len(ids)))
    digest.update(ids.data)
    encoded = sorted((_encoded(name, name), _values(name, given)) for name, given in extras.items())
    for name, values in encoded:
        if values:
            digest.update(_number(len(name)) + name + _number(len(values)))
            for value in values:
                digest.update(_number(len(value)) + value)
    return digest.digest()[:DIGEST]


def checked_content(content: Any) -> bytes:
    """A content that an engine states; empty for ``None``.

    Raises:
        RoomError: It is neither ``None`` nor 1 to `MAX_CONTENT` bytes.
    """
    if content is None:
        return b""
    if type(content) is bytes and 0 < len(content) <= MAX_CONTENT:
        return content
    raise RoomError(
        f"the content of a request is {shown(content)}",
        cause=f"1 to {MAX_CONTENT} bytes are expected",
        hint="statelink.content_of() makes them",
        code="room.content",
    )


def _ids(tokens: Any) -> npt.NDArray[np.int64]:
    try:
        given = np.asarray(tokens)
        if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
            raise ValueError(f"it has {given.ndim} dimensions, and elements of type {given.dtype}")
        if given.dtype.kind == "u" and given.size and int(given.max()) >= 1 << 63:
            raise ValueError("one is 2^63 or more")
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise RoomError(
            f"the token ids of a request are {shown(tokens)}",
            cause=str(error),
            hint="give one-dimensional whole numbers, in host memory",
            code="room.content",
        ) from error
    return np.ascontiguousarray(given, "<i8")


def _values(name: str, given: Any) -> list[bytes]:
    if given is None:
        return []
    if isinstance(given, (str, bytes)):
        return [_encoded(name, given)]
    if not isinstance(given, (list, tuple)):
        raise _wrong(name, given)
    return [_encoded(name, each) for each in given]


def _encoded(name: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise _wrong(name, value)
    # A lone surrogate is no text of UTF-8, but a client can write one into JSON.
    return value.encode("utf-8", "surrogatepass")


def _wrong(name: str, value: Any) -> RoomError:
    return RoomError(
        f"the extra {name!r} of a request's content is {shown(value)}",
        cause="a text, bytes, or a list of these is expected",
        code="room.content",
    )


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
