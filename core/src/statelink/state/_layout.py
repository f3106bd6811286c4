"""The shape of one item, and the boxes of it that a rank holds."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import numpy.typing as npt

from statelink.errors import StateError

__all__ = ["Layout", "Slab"]

MAX_AXES = 8
MAX_SLABS = 64
MAX_STRETCHES = 1 << 16
"""Bound on the contiguous stretches of one item that are compared for overlap."""
MAX_BYTES = 1 << 62


class Slab(msgspec.Struct, frozen=True):
    """A box of the global item that stands somewhere in the local item.

    Attributes:
        start: First global coordinate, per axis.
        stop: One past the last global coordinate, per axis.
        offset: Bytes from the start of the local item to the element at ``start``.
        strides: Bytes between neighbouring elements of the box, per axis, in the local item.
        step: Distance between the global coordinates held, per axis; empty means 1 everywhere.
        optional: Whether the source may lack it; it then stays as it is (the half that only speculation uses).
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    step: tuple[int, ...] = ()
    optional: bool = False

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of elements held, per axis."""
        steps = self.step or (1,) * len(self.start)
        return tuple(-(-(b - a) // s) for a, b, s in zip(self.start, self.stop, steps, strict=True))

    @property
    def stepped(self) -> bool:
        """Whether some axis is held with gaps."""
        return any(s != 1 for s in self.step)

    def end(self, itemsize: int) -> int:
        """Bytes from the start of the local item to the end of this slab's last element."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.counts, self.strides, strict=True)) + itemsize


class Layout(msgspec.Struct, frozen=True):
    """One item: its global shape, and which boxes of it are here and where.

    Attributes:
        dtype: Element type by its usual name, such as ``bfloat16``; compared verbatim.
        itemsize: Bytes of one element.
        shape: Global shape of one item, in elements.
        axes: A name for each axis, such as ``("token", "head", "dim")``; for messages and pairing.
        slabs: The boxes that this rank holds; they do not overlap.
        position: Which axis runs over the positions of the sequence, or ``None`` where items move whole.
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    slabs: tuple[Slab, ...]
    position: int | None = None

    def __post_init__(self) -> None:
        rank = len(self.shape)
        if not 1 <= rank <= MAX_AXES or len(self.axes) != rank:
            raise StateError(f"a layout has 1 to {MAX_AXES} named axes", cause=f"shape {self.shape}, axes {self.axes}")
        if not 1 <= self.itemsize <= 64:
            raise StateError("an element has 1 to 64 bytes", cause=f"itemsize is {self.itemsize}")
        if any(not 1 <= n < MAX_BYTES for n in self.shape):
            raise StateError("every axis of an item has at least one element", cause=f"shape is {self.shape}")
        if self.position is not None and not 0 <= self.position < rank:
            raise StateError("the position axis is not an axis of the item", cause=f"{self.position} of {rank}")
        if not 1 <= len(self.slabs) <= MAX_SLABS:
            raise StateError(f"a layout has 1 to {MAX_SLABS} slabs", cause=f"{len(self.slabs)} given")
        for slab in self.slabs:
            self._check(slab, rank)
        for a, b in itertools.combinations(self.slabs, 2):
            if not (a.stepped or b.stepped) and all(
                max(p, q) < min(r, s) for p, q, r, s in zip(a.start, b.start, a.stop, b.stop, strict=True)
            ):
                raise StateError("two slabs of a layout hold the same coordinates", cause=f"{a} and {b}")
        if len(self.slabs) > 1:
            self._check_apart()

    def _check(self, slab: Slab, rank: int) -> None:
        sizes = {len(slab.start), len(slab.stop), len(slab.strides), len(slab.step) or rank}
        if sizes != {rank}:
            raise StateError("a slab names every axis of its layout once", cause=f"{slab} in shape {self.shape}")
        if any(s < 1 for s in slab.step):
            raise StateError("the step of a slab is at least 1", cause=f"step is {slab.step}")
        for axis, (a, b, n) in enumerate(zip(slab.start, slab.stop, self.shape, strict=True)):
            if not 0 <= a < b <= n:
                raise StateError(
                    f"a slab leaves the item on axis {self.axes[axis]!r}",
                    cause=f"[{a}, {b}) is not within [0, {n})",
                )
        if slab.offset < 0 or any(s < 0 for s in slab.strides) or slab.end(self.itemsize) > MAX_BYTES:
            raise StateError(
                "a slab has offsets and strides of zero or more bytes",
                cause=f"offset {slab.offset}, strides {slab.strides}",
            )
        extent = self.itemsize
        for stride, count in sorted(zip(slab.strides, slab.counts, strict=True)):
            if count > 1:
                if stride < extent:
                    raise StateError("the elements of a slab overlap in memory", cause=f"strides {slab.strides}")
                extent = stride * (count - 1) + extent

    def _check_apart(self) -> None:
        """Check that no two slabs stand on the same local bytes."""
        low, high = zip(*(self._stretches(slab) for slab in self.slabs), strict=True)
        starts, ends = np.concatenate(low), np.concatenate(high)
        order = np.argsort(starts)
        if (starts[order][1:] < ends[order][:-1]).any():
            raise StateError("two slabs of a layout stand on the same bytes", cause=f"{self.slabs}"[:300])

    def _stretches(self, slab: Slab) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where each contiguous stretch of a slab begins and ends, in bytes of the local item."""
        axes = sorted((s, n) for s, n in zip(slab.strides, slab.counts, strict=True) if n > 1)
        unit = self.itemsize
        while axes and axes[0][0] == unit:
            unit *= axes.pop(0)[1]
        if math.prod(n for _, n in axes) > MAX_STRETCHES:
            raise StateError("a slab falls apart into too many pieces", cause=f"more than {MAX_STRETCHES}")
        starts = np.array([slab.offset], np.int64)
        for stride, count in axes:
            starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
        return starts, starts + unit

    @property
    def nbytes(self) -> int:
        """Bytes from the start of the local item to the end of what this rank holds of it."""
        return max(slab.end(self.itemsize) for slab in self.slabs)

    @property
    def held(self) -> int:
        """Bytes of one item that this rank holds."""
        return self.itemsize * sum(math.prod(slab.counts) for slab in self.slabs)
