"""What the two hooks of a staged component say to each other."""

from __future__ import annotations

from typing import Annotated

import msgspec

from statelink.errors import WireError
from statelink.plan import Tile

__all__ = ["Ask", "Lent", "Message", "Place", "Written", "read", "read_place", "write"]

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Range = tuple[Number, Number]


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Travels with the request: decode's ring.

    Attributes:
        region: Its number in decode's region table.
        address: Its first byte.
        nbytes: Its size.
    """

    region: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    address: int
    nbytes: Number


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Prefill has a parcel to move."""

    number: Number
    nbytes: Number


class Lent(msgspec.Struct, frozen=True, array_like=True, tag="lent"):
    """Decode lends space for it, ``offset`` bytes into the ring."""

    number: Number
    offset: Number


class Written(msgspec.Struct, frozen=True, array_like=True, tag="written"):
    """It is there; what it is made of says where its bytes belong."""

    number: Number
    layers: tuple[int, int] | None
    tiles: Annotated[list[tuple[Number, Range, Range]], msgspec.Meta(max_length=256)]

    def parts(self) -> list[Tile]:
        """The tiles."""
        return [Tile(*each) for each in self.tiles]


Message = Ask | Lent | Written

_encode = msgspec.msgpack.Encoder().encode
_message = msgspec.msgpack.Decoder(Message)
_place = msgspec.msgpack.Decoder(Place)


def write(message: Message | Place) -> bytes:
    """A message as bytes."""
    return _encode(message)


def read(payload: bytes) -> Message:
    """Bytes as a message.

    Raises:
        WireError: They are none.
    """
    try:
        said: Message = _message.decode(payload)
    except msgspec.DecodeError as error:
        raise WireError("a staging message cannot be read", cause=str(error)) from error
    return said


def read_place(payload: bytes) -> Place:
    """Bytes as decode's ring.

    Raises:
        WireError: They are none.
    """
    try:
        place = _place.decode(payload)
    except msgspec.DecodeError as error:
        raise WireError("a staging ring cannot be read", cause=str(error)) from error
    if not 0 <= place.address <= (1 << 64) - place.nbytes:  # a bound that msgspec cannot express
        raise WireError("a staging ring cannot be read", cause=f"{place.nbytes} bytes at {place.address:#x}")
    return place
