"""Messages to frames and back; every way in which a frame can be bad ends in one error."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from statelink.errors import WireError

from ._messages import KINDS, ItemList, Message

__all__ = ["MAX_FRAME", "decode", "encode", "pack_items", "unpack_items"]

MAX_FRAME = 64 << 20
"""Most bytes of one frame; the sockets enforce it too."""

_encoder = msgspec.msgpack.Encoder()
_decoders = {kind: msgspec.msgpack.Decoder(type_) for kind, type_ in KINDS.items()}
_kind_of = {type_: kind for kind, type_ in KINDS.items()}


def encode(message: Message) -> list[bytes]:
    """The frames of a message.

    Raises:
        WireError: It is larger than a frame may be.
    """
    body = _encoder.encode(message)
    kind = _kind_of[type(message)]
    if len(body) > MAX_FRAME:
        raise WireError(
            f"a {kind.decode()} message of {len(body)} bytes",
            cause=f"a frame has at most {MAX_FRAME}",
            code="wire.size",
        )
    return [kind, body]


def decode(frames: Sequence[bytes]) -> Message:
    """The message in two frames.

    Raises:
        WireError: They are not a message; its code tells an unknown kind (``wire.kind``) from a malformed body.
    """
    if len(frames) != 2:
        raise WireError("a message has two frames", cause=f"got {len(frames)}", code="wire.frames")
    kind, body = frames
    decoder = _decoders.get(kind)
    if decoder is None:
        raise WireError("unknown kind of message", cause=repr(kind[:32]), code="wire.kind")
    try:
        message: Message = decoder.decode(body)
    except Exception as error:
        # Besides its own errors, the decoder lets through what our structs' checks raise.
        raise WireError(
            f"malformed {kind.decode()} message",
            cause=str(error).splitlines()[0][:300] if str(error) else "",
            code="wire.body",
        ) from error
    return message


def pack_items(ids: npt.NDArray[np.int64], first: int) -> ItemList:
    """Indices as a little-endian array."""
    return ItemList(first, ids.astype("<i8", copy=False).tobytes())


def unpack_items(items: ItemList) -> npt.NDArray[np.int64]:
    """The indices in an `ItemList`; read-only.

    Raises:
        WireError: The array is cut inside an element.
    """
    if len(items.ids) % 8:
        raise WireError("a list of indices is cut inside an element", cause=f"{len(items.ids)} bytes")
    return np.frombuffer(items.ids, "<i8").astype(np.int64, copy=False)
