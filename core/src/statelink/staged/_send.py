"""The prefill side of a staged component."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from statelink.backend import Blocks, SendContext, SendHook
from statelink.errors import RoomError, WireError

from ._messages import Ask, Granted, RingAddress, Written, read, read_ring_address, write

if TYPE_CHECKING:
    from statelink.plan import Move, Places, Tile

    from ._ring import Ring

__all__ = ["StagedSend"]

WINDOW = 4
"""Most parcels of a push for which space is asked or granted at once, and that are not written."""


class _Parcel(NamedTuple):
    tiles: tuple[Tile, ...]
    places: list[Places]
    nbytes: int


class StagedSend(SendHook):
    """One component of one room, for one destination.

    Args:
        rings: Component to this side's ring for it. Components whose memory cannot be staged are absent.
        parcel_bytes: Most bytes of a parcel.
    """

    def __init__(self, rings: Mapping[str, Ring], parcel_bytes: int) -> None:
        self._rings = rings
        self._ring: Ring | None = None
        self._parcel_bytes = parcel_bytes
        self._there: RingAddress | None = None
        self._lock = threading.Lock()
        self._number = 0
        self._wanted: dict[int, int] = {}
        self._ready: dict[int, tuple[int, int]] = {}
        self._held: set[int] = set()
        self._over = False

    def open(self, context: SendContext, prepared: bytes) -> None:
        """Learn whether decode wants the component staged, and where decode's ring is."""
        if prepared:
            self._there = read_ring_address(prepared)
            self._ring = self._rings.get(context.component)

    def blocks(self, context: SendContext, move: Move) -> Iterable[Blocks | None]:
        """Yield one block for each parcel, from ring to ring."""
        if self._there is None:
            return move.blocks()
        if self._ring is None:
            raise RoomError(
                f"component {context.component!r} cannot be staged on prefill",
                cause="its buffers are in memory of several kinds, or of one that staging does not reach",
                hint="leave it out of staging on both sides",
                component=context.component,
                code="room.staging",
            )
        return self._parcels(context, move, self._there, self._ring)

    def _parcels(self, context: SendContext, move: Move, there: RingAddress, ring: Ring) -> Iterator[Blocks | None]:
        parcels = self._cut(move, there)
        asked: dict[int, _Parcel] = {}
        written: list[tuple[int, int, _Parcel]] = []
        more = True
        while more or asked:
            while more and len(asked) < WINDOW:
                tiles = next(parcels, None)
                if tiles is None:
                    more = False
                else:
                    number, parcel = self._ask(context, move, tiles)
                    asked[number] = parcel
            for number, here, offset in self._granted(asked):
                parcel = asked.pop(number)
                ring.memory.pack(parcel.places, here)
                written.append((number, here, parcel))
                yield _block(ring, here, there, offset, parcel.nbytes)
            if written or asked:
                yield None
            for number, here, parcel in written:  # they are visible there, because the core asked for more
                context.message(write(Written(number, move.layers, list(parcel.tiles))))
                with self._lock:
                    self._held.discard(here)
                ring.give(here)
            written.clear()

    def _cut(self, move: Move, there: RingAddress) -> Iterator[tuple[Tile, ...]]:
        """Cut parcels that fit into both rings.

        Raises:
            RoomError: A piece that cannot be divided does not fit.
        """
        try:
            yield from move.parcels(min(self._parcel_bytes, there.nbytes))
        except RoomError as error:
            ours = f"staging's parcel_bytes and ring_bytes on prefill allow {self._parcel_bytes}"
            better = "make what is too small larger, or leave the component out of staging on both sides"
            hint = f"{ours}, decode's ring {there.nbytes}: {better}"
            raise RoomError.of(msgspec.structs.replace(error.reason, hint=hint)) from None

    def _ask(self, context: SendContext, move: Move, tiles: tuple[Tile, ...]) -> tuple[int, _Parcel]:
        places = [move.places(tile, "source") for tile in tiles]
        parcel = _Parcel(tiles, places, sum(each.nbytes for each in places))
        with self._lock:
            number = self._number
            self._number += 1
            self._wanted[number] = parcel.nbytes
        context.message(write(Ask(number, parcel.nbytes)))
        return number, parcel

    def _granted(self, asked: dict[int, _Parcel]) -> list[tuple[int, int, int]]:
        """The parcels that have space on both sides, and where."""
        with self._lock:
            return [(number, *self._ready.pop(number)) for number in asked if number in self._ready]

    def message(self, context: SendContext, payload: bytes) -> None:
        """Decode grants space. Only now take space in this side's ring, so that nobody waits while holding it."""
        said = read(payload)
        if not isinstance(said, Granted) or self._ring is None:
            raise WireError(f"decode says {type(said).__name__.lower()!r} of a staged component")
        with self._lock:
            if self._over:
                return
            nbytes = self._wanted.pop(said.number, 0)
        if not nbytes:
            raise WireError("decode grants space that nobody asked for", cause=str(said))
        self._ring.ask(self, nbytes, lambda at: self._placed(context, said.number, at, said.offset), peer=context.peer)

    def _placed(self, context: SendContext, number: int, at: int, offset: int) -> None:
        assert self._ring is not None
        with self._lock:
            over = self._over
            if not over:
                self._ready[number] = at, offset
                self._held.add(at)
        if over:
            self._ring.give(at)
        else:
            context.wake()

    def waits(self) -> str:
        """It waits for space on decode, and then on this side."""
        with self._lock:
            wanted = sum(self._wanted.values())
        theirs = f"{wanted} bytes of decode's staging ring of {self._there.nbytes}" if wanted and self._there else ""
        return " and ".join(filter(None, (theirs, self._ring.waits(self) if self._ring is not None else "")))

    def abort(self, context: SendContext) -> None:
        """Give back space that was not used. Other space may still be read."""
        with self._lock:
            self._over = True
            unused = [at for at, _ in self._ready.values()]
            self._ready.clear()
            self._held.difference_update(unused)
        if self._ring is not None:
            for at in unused:
                self._ring.give(at)
            self._ring.drop(self)

    def released(self, context: SendContext) -> None:
        """Nothing reads this side's ring for this room. Give its space back."""
        with self._lock:
            self._over = True
            held, self._held = self._held, set()
        if self._ring is not None:
            for at in held:
                self._ring.give(at)


def _block(ring: Ring, here: int, there: RingAddress, offset: int, nbytes: int) -> Blocks:
    """The block of a parcel. The core checks it against both region tables."""
    if offset + nbytes > there.nbytes:
        raise WireError("decode grants space beyond its ring", cause=f"{nbytes} bytes at {offset} of {there.nbytes}")
    wide = np.array([ring.memory.address + here, there.address + offset, nbytes], np.uint64)
    narrow = np.array([ring.region, there.region], np.uint32)
    return Blocks(wide[0:1], wide[1:2], wide[2:3], narrow[0:1], narrow[1:2])
