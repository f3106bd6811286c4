"""The messages between the two hooks of a staged component."""

from __future__ import annotations

from typing import Annotated

import msgspec

from statelink.errors import WireError
from statelink.plan import Tile

__all__ = ["Ask", "Granted", "Message", "RingAddress", "Written", "read", "read_ring_address", "write"]

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Range = tuple[Number, Number]


class RingAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where decode's ring is. It is sent with the request.

    Attributes:
        region: Number of the ring in decode's region table.
        address: Address of its first byte.
        nbytes: Its size.
    """

    region: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    address: int
    nbytes: Number


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Prefill asks for space for a parcel."""

    number: Number
    nbytes: Number


class Granted(msgspec.Struct, frozen=True, array_like=True, tag="granted"):
    """Decode grants space for a parcel, ``offset`` bytes into its ring."""

    number: Number
    offset: Number


class Written(msgspec.Struct, frozen=True, array_like=True, tag="written"):
    """A parcel is in decode's ring. Its tiles say where its bytes belong."""

    number: Number
    layers: tuple[int, int] | None
    tiles: Annotated[list[tuple[Number, Range, Range]], msgspec.Meta(max_length=256)]

    def parts(self) -> list[Tile]:
        """The tiles."""
        return [Tile(*each) for each in self.tiles]


Message = Ask | Granted | Written

_encode = msgspec.msgpack.Encoder().encode
_message = msgspec.msgpack.Decoder(Message)
_ring_address = msgspec.msgpack.Decoder(RingAddress)


def write(message: Message | RingAddress) -> bytes:
    """Encode a message."""
    return _encode(message)


def read(payload: bytes) -> Message:
    """Decode a message.

    Raises:
        WireError: The bytes are no message.
    """
    try:
        said: Message = _message.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # also for invalid text and deep nesting
        raise WireError("a staging message cannot be read", cause=str(error)) from error
    return said


def read_ring_address(payload: bytes) -> RingAddress:
    """Decode the address of decode's ring.

    Raises:
        WireError: The bytes are none.
    """
    try:
        ring = _ring_address.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # also for invalid text and deep nesting
        raise WireError("a staging ring cannot be read", cause=str(error)) from error
    if not 0 <= ring.address <= (1 << 64) - ring.nbytes:  # a bound that msgspec cannot express
        raise WireError("a staging ring cannot be read", cause=f"{ring.nbytes} bytes at {ring.address:#x}")
    return ring
