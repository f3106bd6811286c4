"""Packs the bytes of a move one after the other, in an order that both sides compute.

A *parcel* is packed as one block. It consists of *tiles*. A tile is some granules of some buffers of one geometry. Its
bytes are ordered by buffer, then by granule, then by run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from statelink.errors import RoomError

if TYPE_CHECKING:
    from ._component_plan import Group
    from ._positions import Pairs

__all__ = ["Places", "Tile", "mark", "parcels", "places"]

MAX_TILES = 256
"""Most tiles of a parcel. The list of them is sent in one message."""

Bools = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


class Tile(NamedTuple):
    """Some granules of some buffers of one geometry.

    Attributes:
        group: Number of the geometry.
        buffers: ``[first, last)`` of those of its buffers whose layers move.
        granules: ``[first, last)`` of the granules that are due.
    """

    group: int
    buffers: tuple[int, int]
    granules: tuple[int, int]


class Places(NamedTuple):
    """Where the bytes of a tile are on one side, in the order in which they are packed.

    Attributes:
        addresses: For each buffer, the address of item 0; uint64.
        rows: Rows of ``width`` bytes, counted from item 0, the same for every buffer; int64.
        width: Bytes of a row.
    """

    addresses: U64
    rows: I64
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tile."""
        return len(self.addresses) * len(self.rows) * self.width


def parcels(groups: tuple[Group, ...], pairs: Pairs, limit: int) -> Iterator[tuple[Tile, ...]]:
    """Cut the move of ``pairs`` into parcels of at most ``limit`` bytes. A granule of one buffer is never cut.

    Raises:
        RoomError: A granule of one buffer is larger than ``limit``.
    """
    parcel: list[Tile] = []
    room = limit
    for number, group in enumerate(groups):
        width, count = group.runs.total, len(group.source)
        if width > limit:
            raise RoomError(
                "a piece of a component can never fit into its staging memory",
                cause=f"{width} bytes cannot be divided, and a parcel has {limit} at most",
                hint="make the staging memory of both sides larger, or leave the component out of staging",
                code="room.staging",
            )
        for low, high in _spans(pairs) if count else ():
            while low < high:
                rows = min(high - low, room // (width * count))
                if rows:
                    parcel.append(Tile(number, (0, count), (low, low + rows)))
                    room -= rows * width * count
                    low += rows
                elif parcel and width * count <= limit:
                    room = 0
                else:  # one granule of all buffers does not fit into a parcel
                    first = 0
                    while first < count:
                        last = min(count, first + room // width)
                        if last > first:
                            parcel.append(Tile(number, (first, last), (low, low + 1)))
                            room -= (last - first) * width
                        if last < count or len(parcel) == MAX_TILES:
                            yield tuple(parcel)
                            parcel, room = [], limit
                        first = last
                    low += 1
                if parcel and (not room or len(parcel) >= MAX_TILES):
                    yield tuple(parcel)
                    parcel, room = [], limit
    if parcel:
        yield tuple(parcel)


def places(group: Group, pairs: Pairs, tile: Tile, side: Literal["source", "target"]) -> Places:
    """Where a tile's bytes are on one side.

    Raises:
        RoomError: The tile names buffers or granules that ``pairs`` and ``group`` do not have.
    """
    low, high = _found(group, pairs, tile)
    runs = group.runs
    if side == "source":
        items, parts, stride = pairs.source, pairs.source_part, group.source_stride
        starts, steps, addresses = runs.source, runs.source_step, group.source
    else:
        items, parts, stride = pairs.target, pairs.target_part, group.target_stride
        starts, steps, addresses = runs.target, runs.target_step, group.target
    # Rows of equal width, so that one call gathers or scatters all of them.
    width = int(np.gcd.reduce(np.concatenate((runs.nbytes, starts, steps, [stride]))))
    each = runs.nbytes // width
    within = np.arange(int(each.sum())) - np.repeat(np.cumsum(each) - each, each)
    rows = (items[low:high] * (stride // width))[:, None] + (np.repeat(starts // width, each) + within)
    if parts is not None:
        rows += parts[low:high, None] * np.repeat(steps // width, each)
    return Places(addresses[slice(*tile.buffers)], rows.ravel(), width)


def mark(group: Group, pairs: Pairs, tile: Tile, marks: Bools) -> None:
    """Record in ``marks`` which granules a tile brings. It has a row for each buffer of the component.

    Raises:
        RoomError: The tile names something that ``pairs`` and ``group`` lack, or that was recorded before.
    """
    low, high = _found(group, pairs, tile)
    numbers = group.numbers[slice(*tile.buffers)]
    if marks[numbers, low:high].any():
        raise RoomError("a tile names what has come before", cause=str(tile), code="room.staging")
    marks[numbers, low:high] = True


def _found(group: Group, pairs: Pairs, tile: Tile) -> tuple[int, int]:
    """Which of ``pairs`` a tile names. A peer may have sent the tile."""
    first, last = tile.granules
    known = pairs.due
    if isinstance(known, slice):
        low, high = first - known.start, last - known.start
        there = 0 <= low < high <= len(pairs)
    else:
        low, high = (int(at) for at in np.searchsorted(known, (first, last)))
        there = low < high and high - low == last - first and int(known[low]) == first
    if not there or not 0 <= tile.buffers[0] < tile.buffers[1] <= len(group.source):
        raise RoomError("a tile names what is not due", cause=str(tile), code="room.staging")
    return low, high


def _spans(pairs: Pairs) -> list[tuple[int, int]]:
    """The granules that move, as ranges of those that are due."""
    known = pairs.due
    if isinstance(known, slice):
        return [(known.start, known.stop)]
    if not len(known):
        return []
    ends = np.flatnonzero(np.diff(known) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(known, ends)]
