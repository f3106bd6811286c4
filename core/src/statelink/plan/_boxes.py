"""Boxes of global coordinates, and the byte runs that two strided views of a box have in common.

Nothing here has a position axis. How positions pair up is known only when a request comes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from statelink.errors import MismatchError

if TYPE_CHECKING:
    from statelink.state import Layout, Slab

__all__ = ["Box", "Runs", "cells", "intersect", "merge_boxes", "runs_of", "slab_box"]

I64 = npt.NDArray[np.int64]

MAX_CELLS = 1 << 12
"""Most pieces into which the edges of source slabs may cut a destination slab."""
MAX_RUNS = 1 << 20
"""Most runs of one pair of items. A peer's description must not make this side allocate without limit."""
MAX_COMPARED = 1 << 17
"""Most comparisons of boxes and slabs for one pair of items."""


class Box(msgspec.Struct, frozen=True, order=True):
    """``[start, stop)`` on every axis but the position axis, in global coordinates."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements; of one position, if items stand for positions."""
        return reduce(int.__mul__, (b - a for a, b in zip(self.start, self.stop, strict=True)), 1)


class Runs(NamedTuple):
    """Contiguous byte runs of one granule of a pair of items, ordered by destination.

    A granule is the largest range of positions that both sides keep inside one item. Without a position axis it is the
    whole item.

    Attributes:
        source: Offset in the source's item at granule 0, bytes; int64.
        target: Offset in the destination's item at granule 0, bytes; int64.
        nbytes: Length, bytes; int64.
        source_step: Bytes from one granule to the next in the source's item, per run; int64.
        target_step: The same in the destination's item.
    """

    source: I64
    target: I64
    nbytes: I64
    source_step: I64
    target_step: I64

    @property
    def total(self) -> int:
        """Bytes of one granule."""
        return int(self.nbytes.sum())

    def shifted(self, source: int, target: int) -> Runs:
        """The same runs at other offsets in both items."""
        return self._replace(source=self.source + source, target=self.target + target)

    @classmethod
    def union(cls, parts: Sequence[Runs]) -> Runs:
        """All runs of ``parts``, ordered by destination. Runs that are contiguous on both sides are merged."""
        joined = cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        order = np.argsort(joined.target, kind="stable")
        joined = cls(*(array[order] for array in joined))
        stop = joined.nbytes[:-1]
        glued = (
            (joined.source[1:] == joined.source[:-1] + stop)
            & (joined.target[1:] == joined.target[:-1] + stop)
            & (joined.source_step[1:] == joined.source_step[:-1])
            & (joined.target_step[1:] == joined.target_step[:-1])
        )
        first = np.flatnonzero(np.concatenate(([True], ~glued)))
        nbytes = np.add.reduceat(joined.nbytes, first) if len(first) else joined.nbytes
        return joined._replace(
            source=joined.source[first],
            target=joined.target[first],
            nbytes=nbytes,
            source_step=joined.source_step[first],
            target_step=joined.target_step[first],
        )


def slab_box(layout: Layout, slab: Slab) -> Box:
    """The box that a slab holds."""
    return Box(_drop(slab.start, layout.position), _drop(slab.stop, layout.position))


def intersect(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes, or ``None`` if it is empty."""
    start = tuple(map(max, a.start, b.start))
    stop = tuple(map(min, a.stop, b.stop))
    return Box(start, stop) if all(map(int.__lt__, start, stop)) else None


def cells(target: Box, sources: Iterable[Box]) -> list[Box]:
    """Cut ``target`` at every edge of ``sources``. Each source then holds a cell completely or not at all."""
    edges = [{a, b} for a, b in zip(target.start, target.stop, strict=True)]
    for source in sources:
        shared = intersect(target, source)
        if shared is not None:
            for axis, edge in enumerate(edges):
                edge.update((shared.start[axis], shared.stop[axis]))
    if math.prod(len(edge) - 1 for edge in edges) > MAX_CELLS:
        raise MismatchError(
            "the slabs of the two sides cut each other into too many pieces",
            cause=f"more than {MAX_CELLS}",
            hint="describe what a rank holds in fewer slabs",
        )
    ranges = [list(itertools.pairwise(sorted(edge))) for edge in edges]
    return [Box(tuple(a for a, _ in cell), tuple(b for _, b in cell)) for cell in itertools.product(*ranges)]


def merge_boxes(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Merge neighbouring boxes along one axis after the other. The set of coordinates stays the same."""
    kept = sorted(boxes)
    for axis in range(len(kept[0].start) if kept else 0):
        kept.sort(key=lambda box: (_drop(box.start, axis), _drop(box.stop, axis), box.start[axis]))
        joined: list[Box] = []
        for box in kept:
            last = joined[-1] if joined else None
            if (
                last is not None
                and _drop(last.start, axis) == _drop(box.start, axis)
                and _drop(last.stop, axis) == _drop(box.stop, axis)
                and last.stop[axis] == box.start[axis]
            ):
                joined[-1] = Box(last.start, box.stop)
            else:
                joined.append(box)
        kept = joined
    return tuple(sorted(kept))


def runs_of(source: Layout, target: Layout, boxes: Sequence[Box], granule: int) -> Runs | None:
    """Compile ``boxes`` into byte runs, or return ``None`` if one side does not hold all of them.

    Args:
        source: The source's item.
        target: The destination's item; same dtype, axes and position axis.
        boxes: Disjoint boxes that this source writes.
        granule: Rows of the position axis that move together; ignored if there is no such axis.
    """
    if len(boxes) * len(source.slabs) * len(target.slabs) > MAX_COMPARED:
        raise MismatchError(
            "the slabs of the two sides cut each other into too many pieces",
            cause=f"{len(boxes)} boxes of {len(source.slabs)} and {len(target.slabs)} slabs",
            hint="describe what a rank holds in fewer slabs",
        )
    parts: list[Runs] = []
    count = 0
    for box in boxes:
        moved = 0
        for theirs, ours in itertools.product(source.slabs, target.slabs):
            shared = intersect(box, slab_box(source, theirs))
            shared = shared and intersect(shared, slab_box(target, ours))
            if shared is not None:
                moved += shared.volume
                parts.append(_strided(source, theirs, target, ours, shared, granule, MAX_RUNS - count))
                count += len(parts[-1].nbytes)
        if moved != box.volume:
            return None
    return Runs.union(parts) if parts else None


def _strided(source: Layout, theirs: Slab, target: Layout, ours: Slab, box: Box, granule: int, most: int) -> Runs:
    """The runs of one box between two slabs. Refuses more than ``most``."""
    position = target.position
    counts = list(map(int.__sub__, box.stop, box.start))
    skip_s = [a - b for a, b in zip(box.start, _drop(theirs.start, source.position), strict=True)]
    skip_t = [a - b for a, b in zip(box.start, _drop(ours.start, position), strict=True)]
    strides_s, strides_t = _drop(theirs.strides, source.position), _drop(ours.strides, position)
    base_s = theirs.offset + sum(map(int.__mul__, skip_s, strides_s))
    base_t = ours.offset + sum(map(int.__mul__, skip_t, strides_t))
    axes = list(zip(counts, strides_s, strides_t, strict=True))
    step_s = step_t = 0
    if position is not None:
        pace_s, pace_t = theirs.strides[position], ours.strides[position]
        axes.append((granule, pace_s, pace_t))
        step_s, step_t = granule * pace_s, granule * pace_t
    # From the destination's innermost axis outwards: an axis that is contiguous with the run on both sides extends it.
    axes = sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[2])
    unit = target.itemsize
    while axes and axes[0][1] == axes[0][2] == unit:
        unit *= axes.pop(0)[0]
    if math.prod(axis[0] for axis in axes) > most:
        raise MismatchError(
            "a pair of items falls apart into too many runs",
            cause=f"more than {MAX_RUNS} contiguous pieces of {unit} bytes",
            hint="lay pages out in the same axis order on both sides, or use smaller items",
        )
    offset_s, offset_t = np.array([base_s], np.int64), np.array([base_t], np.int64)
    for count, stride_s, stride_t in reversed(axes):
        along = np.arange(count, dtype=np.int64)
        offset_s = (offset_s[:, None] + along * stride_s).ravel()
        offset_t = (offset_t[:, None] + along * stride_t).ravel()
    n = len(offset_s)
    return Runs(
        offset_s,
        offset_t,
        np.full(n, unit, np.int64),
        np.full(n, step_s, np.int64),
        np.full(n, step_t, np.int64),
    )


def _drop(values: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    return values if axis is None else values[:axis] + values[axis + 1 :]
