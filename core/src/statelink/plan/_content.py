"""What moved, as bytes of logical places: the same on both sides, wherever items lie and in however many pushes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ._compile import Group
    from ._pairing import Pairs

__all__ = ["Content", "contents"]

MAX_SCRATCH = 1 << 20
"""Bytes of one buffer that are looked at together, unless a single granule has more: they stay in the cache."""

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


class Content(NamedTuple):
    """Some granules of some buffers of one geometry, as they lie on one side.

    The bytes of one granule of one buffer are its pieces in order. Numbers and grains name them, and are computed alike
    on both sides; addresses and offsets say where they are on this one.

    Attributes:
        numbers: Per buffer, its place in the assignment; int64.
        addresses: Per buffer, the address of item 0; uint64.
        grains: Per granule, its place among the granules that are due; int64.
        offsets: ``[granules, pieces]`` bytes from item 0; int64.
        piece: Bytes of each piece.
    """

    numbers: I64
    addresses: U64
    grains: I64
    offsets: I64
    piece: int


def contents(groups: tuple[Group, ...], pairs: Pairs, side: Literal["source", "target"]) -> Iterator[Content]:
    """Every byte that ``pairs`` move, each once, in batches of bounded size.

    Args:
        groups: Buffers as they are in the assignment, not joined.
        pairs: Granules on both sides; only this side's items are looked at.
        side: Which side.
    """
    places = np.arange(pairs.due.start, pairs.due.stop) if isinstance(pairs.due, slice) else pairs.due
    items, parts = (pairs.source, pairs.source_part) if side == "source" else (pairs.target, pairs.target_part)
    for group in groups:
        if not len(group.numbers):
            continue
        runs = group.runs
        here, steps = (runs.source, runs.source_step) if side == "source" else (runs.target, runs.target_step)
        stride = group.source_stride if side == "source" else group.target_stride
        # Runs of several lengths are cut into pieces of one, so that they can be gathered in one go.
        piece = int(np.gcd.reduce(runs.nbytes))
        each = runs.nbytes // piece
        within = np.arange(int(each.sum())) - np.repeat(np.cumsum(each) - each, each)
        starts, steps = np.repeat(here, each) + within * piece, np.repeat(steps, each)
        width = max(1, MAX_SCRATCH // runs.total)
        for first in range(0, len(items), width):
            chosen = slice(first, first + width)
            offsets = (items[chosen] * stride)[:, None] + starts
            if parts is not None:
                offsets += parts[chosen, None] * steps
            addresses = group.source if side == "source" else group.target
            yield Content(group.numbers, addresses, places[chosen], offsets, piece)
