"""What the two hooks of a staged component say to each other, as bytes of the protocol, and a ring that is filled."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from statelink.plan import Move, Tile

__all__ = ["ask", "gathered", "lent", "raw", "read", "ring_at", "written"]

Said = tuple[Any, ...]


def ask(number: int, nbytes: int) -> Said:
    """Prefill has a parcel to move."""
    return "ask", number, nbytes


def lent(number: int, offset: int) -> Said:
    """Decode lends space for it in its ring."""
    return "lent", number, offset


def written(number: int, layers: tuple[int, int] | None, tiles: Any) -> Said:
    """Prefill has written it."""
    return "written", number, layers, tiles


def ring_at(region: int, address: int, nbytes: int) -> bytes:
    """Decode's ring, as it travels with the request."""
    return raw((region, address, nbytes))


def raw(said: Said | bytes) -> bytes:
    """What is said, whatever it is, as a payload."""
    return said if isinstance(said, bytes) else msgspec.msgpack.encode(said)


def read(payload: bytes) -> Said:
    """What a payload says."""
    return tuple(msgspec.msgpack.decode(payload))


def gathered(move: Move, tiles: Iterable[Tile]) -> npt.NDArray[np.uint8]:
    """The source's bytes of a parcel, one tile after the other."""
    found = bytearray()
    for tile in tiles:
        places = move.places(tile, "source")
        for address in places.addresses.tolist():
            for row in places.rows.tolist():
                found += ctypes.string_at(address + row * places.width, places.width)
    return np.frombuffer(found, np.uint8)
