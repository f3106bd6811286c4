"""Encodes messages as frames and decodes them. Every bad frame raises the same error.

Each kind of message has a largest size: decoding takes time and memory, and the sender chooses the size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from statelink.backend import MAX_DESCRIPTOR
from statelink.errors import PeerError, WireError
from statelink.state import state_types
from statelink.state._effort import SpentError, bounded
from statelink.state._inventory import MAX_EFFORT

from ._messages import (
    KINDS,
    MAX_INDICES,
    Attach,
    Chunk,
    Failed,
    Few,
    Finished,
    Handshake,
    Hello,
    ItemList,
    Message,
    Name,
    Note,
    Refuse,
    Request,
    Welcome,
)
from ._rendezvous import RENDEZVOUS_KINDS, Browsed, Resolved

__all__ = [
    "INDEX",
    "MAX_EFFORT",
    "MAX_FRAME",
    "MAX_HANDSHAKE",
    "MAX_INVENTORY",
    "SMALL_MESSAGE_BYTES",
    "decode",
    "encode",
    "limit_of",
    "read_handshake",
    "unpack_items",
    "write_handshake",
]

MAX_FRAME = 256 << 10
"""Most bytes of one frame. ZeroMQ disconnects a peer that sends a larger one. Larger messages are sent in parts."""
SMALL_MESSAGE_BYTES = 16 << 10
"""Most bytes of a message without a list. A peer that has not introduced itself may send only `Hello` beyond this."""
MAX_INVENTORY = 4 << 20
"""Most bytes of an encoded inventory."""
MAX_HANDSHAKE = MAX_INVENTORY + MAX_DESCRIPTOR + (1 << 20)
"""Most bytes of an encoded handshake."""

_LIMITS: dict[type[Message], int] = {
    Hello: MAX_HANDSHAKE + SMALL_MESSAGE_BYTES,
    Welcome: MAX_HANDSHAKE + SMALL_MESSAGE_BYTES,
    Attach: 2 * MAX_INVENTORY,  # it names at most as many buffers as an inventory has
    Request: 8 * MAX_INDICES + (4 << 20),
    # A line for each component, or a reason at its longest.
    Chunk: 2 << 20,
    Finished: 2 << 20,
    Failed: 2 << 20,
    Refuse: 2 << 20,
    Note: 128 << 10,
    Resolved: 8 << 20,
    Browsed: 8 << 20,  # names may be longer in bytes than in characters
}

_encoder = msgspec.msgpack.Encoder()
_kind_of = {type_: kind for kind, type_ in {**KINDS, **RENDEZVOUS_KINDS}.items()}
_decoders = {type_: msgspec.msgpack.Decoder(type_) for type_ in _kind_of}
INDEX = np.dtype("<i8")
"""What the array of an `ItemList` consists of."""
_native = np.dtype(np.int64) == INDEX
"""Whether this machine keeps indices as messages have them."""


def limit_of(kind: type[Message]) -> int:
    """Most bytes of the body of a message of a kind."""
    return _LIMITS.get(kind, SMALL_MESSAGE_BYTES)


def encode(message: Message) -> list[bytes]:
    """Encode a message as two frames: its kind and its body.

    Raises:
        WireError: The message is larger than its kind may be.
    """
    type_ = type(message)
    if type_ is Failed or type_ is Refuse:
        assert isinstance(message, (Failed, Refuse))
        message = msgspec.structs.replace(message, reason=message.reason.clipped())
    kind = _kind_of[type_]
    try:
        body = _encoder.encode(message)
    except Exception as error:
        raise WireError(
            f"a {kind.decode()} message cannot be encoded", cause=_first_line(error), code="wire.encode"
        ) from error
    if len(body) > SMALL_MESSAGE_BYTES:
        _check_size(kind, type_, body)
    return [kind, body]


def _check_size(kind: bytes, type_: type[Message], body: bytes) -> None:
    """Refuse a body that is too large. No limit is lower than `SMALL_MESSAGE_BYTES`."""
    limit = limit_of(type_)
    if len(body) > limit:
        raise WireError(
            f"a {kind.decode()} message of {len(body)} bytes", cause=f"it may have at most {limit}", code="wire.size"
        )


def decode(frames: Sequence[bytes], kinds: Mapping[bytes, type[Message]] = KINDS) -> Message:
    """Decode the two frames of a message.

    Args:
        frames: Its kind and its body.
        kinds: The kinds that may come. No other is decoded.

    Raises:
        WireError: The frames are no message. The code tells an unknown kind (``wire.kind``) from a body that is too
            large (``wire.size``) or malformed (``wire.body``).
    """
    try:
        kind, body = frames
    except ValueError:
        raise WireError("a message has two frames", cause=f"got {len(frames)}", code="wire.frames") from None
    type_ = kinds.get(kind)
    if type_ is None:
        raise WireError("unknown kind of message", cause=repr(kind[:32]), code="wire.kind")
    if len(body) > SMALL_MESSAGE_BYTES:
        _check_size(kind, type_, body)
    try:
        message: Message = _decoders[type_].decode(body)
    except Exception as error:
        # Besides its own errors, the decoder passes on what the checks of our structs raise.
        raise WireError(
            f"malformed {kind.decode()} message",
            cause=_first_line(error),
            code="wire.body",
        ) from error
    return message


class _Named(msgspec.Struct):
    """A state type of which only the name is read. A later version may define it with words that are unknown here."""

    name: Name


class _Introduction(msgspec.Struct):
    """The part of a handshake that can be decoded without knowing any state type."""

    link: Name
    version: Name
    kinds: Annotated[tuple[_Named, ...], Few]
    inventory: msgspec.Raw


_introductions = msgspec.msgpack.Decoder(_Introduction)
_handshakes = msgspec.msgpack.Decoder(Handshake)


def write_handshake(ours: Handshake) -> msgspec.Raw:
    """Encode a handshake as `Hello` and `Welcome` carry it.

    Raises:
        WireError: The handshake is larger than peers take.
    """
    for what, nbytes, most in (
        ("this rank's inventory", len(_encoder.encode(ours.inventory)), MAX_INVENTORY),
        (f"what backend {ours.backend!r} says of how it is reached", len(ours.descriptor), MAX_DESCRIPTOR),
    ):
        if nbytes > most:
            raise WireError(f"{what} is {nbytes} bytes long", cause=f"at most {most} are sent", code="wire.size")
    return msgspec.Raw(_encoder.encode(ours))


def read_handshake(raw: msgspec.Raw, effort: int = MAX_EFFORT) -> Handshake:
    """Decode the handshake that a peer sent. The time grows with its length and with the effort.

    Args:
        raw: The handshake.
        effort: Limit for the cost of checking its layouts. The default is the limit of one inventory.

    Raises:
        PeerError: It names a state type that is not known here.
        WireError: It is malformed or too large, or it costs more to check than the effort (``wire.effort``).
    """
    if len(memoryview(raw)) > MAX_HANDSHAKE:
        cause = f"it is {len(memoryview(raw))} bytes long; at most {MAX_HANDSHAKE} are read"
        raise WireError("a peer's description is malformed", cause=cause, code="wire.handshake")
    try:
        introduction = _introductions.decode(raw)
        size = len(memoryview(introduction.inventory))
        if size > MAX_INVENTORY:
            raise ValueError(f"its inventory is {size} bytes long; at most {MAX_INVENTORY} are read")
        known = {kind.name for kind in state_types()}
        for kind in introduction.kinds:
            if kind.name not in known:
                raise PeerError(
                    f"a peer holds state of type {kind.name!r:.80}, which is not known here",
                    cause=f"known types: {', '.join(sorted(known))}",
                    hint="install the package that brings the type on this side too, or, if it is built in there, "
                    f"the peer's version of statelink, {introduction.version!r:.80}",
                    code="peer.state_type",
                    peer=introduction.link,
                )
        with bounded(effort):
            theirs = _handshakes.decode(raw)
    except PeerError:
        raise
    except Exception as error:
        what, cause = "a peer's description is malformed", _first_line(error)
        if isinstance(error.__cause__, SpentError):
            raise WireError(what, cause=cause, code="wire.effort") from error
        raise WireError(what, cause=cause, code="wire.handshake") from error
    return theirs


def unpack_items(items: ItemList) -> npt.NDArray[np.int64]:
    """The indices in an `ItemList`; read-only.

    Raises:
        WireError: The array ends inside an element.
    """
    try:
        ids = np.frombuffer(items.ids, INDEX)
    except ValueError:  # the length is no multiple of an element's
        raise WireError("a list of indices is cut inside an element", cause=f"{len(items.ids)} bytes") from None
    return ids if _native else ids.astype(np.int64)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0][:300] if lines else type(error).__name__
