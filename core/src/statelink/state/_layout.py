"""The shape of one item, and the boxes that a rank holds of it."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt

from statelink._arguments import shown, text
from statelink.errors import StateError

from ._effort import known, spend
from ._shares import ints, settle_ints, settle_switches

__all__ = ["MAX_BYTES", "Layout", "Slab"]

MAX_AXES = 8
MAX_DTYPE = 1024
"""Most characters of the name of an element type or of an axis."""
MAX_SLABS = 64
MAX_COMPARED_STRETCHES = 1 << 16
"""Most contiguous stretches of one item, in all slabs together, that are compared for overlap."""
MAX_BYTES = 1 << 62
OF_A_SLAB = 64
"""The cost of checking one slab. The comparison of a stretch costs 1."""

I64 = npt.NDArray[np.int64]


class Slab(msgspec.Struct, frozen=True):
    """A box of the global item, and its place in the local item.

    Attributes:
        start: For each axis, the first global coordinate.
        stop: For each axis, one past the last global coordinate.
        offset: Bytes from the start of the local item to the element at ``start``.
        strides: For each axis, bytes between neighbouring elements of the box in the local item.
        step: For each axis, distance between the global coordinates that are held; empty means 1 on all axes.
        optional: Whether the source may lack it. It then stays as it is. Only speculation uses such a half of an item.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    step: tuple[int, ...] = ()
    optional: bool = False

    def __post_init__(self) -> None:
        for field in ("start", "stop", "strides", "step"):
            given = getattr(self, field)
            found = ints(given, f"the {field} of a slab")
            if found is not given:
                msgspec.structs.force_setattr(self, field, found)
        settle_ints(self, "a slab", "offset")
        settle_switches(self, "a slab", "optional")

    @property
    def counts(self) -> tuple[int, ...]:
        """For each axis, number of elements that are held."""
        steps = self.step or (1,) * len(self.start)
        return tuple(-(-(b - a) // s) for a, b, s in zip(self.start, self.stop, steps, strict=True))

    @property
    def stepped(self) -> bool:
        """Whether there are gaps between the coordinates on some axis."""
        return any(s != 1 for s in self.step)

    def end(self, itemsize: int) -> int:
        """Bytes from the start of the local item to the end of this slab's last element."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.counts, self.strides, strict=True)) + itemsize


class Layout(msgspec.Struct, frozen=True):
    """One item: its global shape, the boxes of it that are here, and where they are.

    Attributes:
        dtype: Element type by its usual name, such as ``bfloat16``; compared verbatim.
        itemsize: Bytes of one element.
        shape: Global shape of one item, in elements.
        axes: A name for each axis, such as ``("token", "head", "dim")``, for errors and pairing.
        slabs: The boxes that this rank holds. They do not overlap.
        position: The axis that runs over the positions of the sequence, or ``None`` if items move as a whole.
        blocks: Extents of the blocks of the first axis, if each of several blocks is dealt out over ranks by itself, as
            in a convolution state of queries, keys and values. Both sides must have the same.
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    slabs: tuple[Slab, ...]
    position: int | None = None
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._settle()
        if known(self.geometry):
            return
        rank = len(self.shape)
        if not 1 <= rank <= MAX_AXES or len(self.axes) != rank:
            raise StateError(f"a layout has 1 to {MAX_AXES} named axes", cause=f"shape {self.shape}, axes {self.axes}")
        if not 1 <= self.itemsize <= 64:
            raise StateError("an element has 1 to 64 bytes", cause=f"itemsize is {self.itemsize}")
        if any(not 1 <= n < MAX_BYTES for n in self.shape):
            raise StateError("every axis of an item has at least one element", cause=f"shape is {self.shape}")
        if self.position is not None and not 0 <= self.position < rank:
            raise StateError("the position axis is not an axis of the item", cause=f"{self.position} of {rank}")
        if self.blocks and (min(self.blocks) < 1 or sum(self.blocks) != self.shape[0]):
            raise StateError("blocks make up the first axis", cause=f"blocks {self.blocks}, shape {self.shape}")
        if not 1 <= len(self.slabs) <= MAX_SLABS:
            raise StateError(f"a layout has 1 to {MAX_SLABS} slabs", cause=f"{len(self.slabs)} given")
        spend(OF_A_SLAB * len(self.slabs))
        for slab in self.slabs:
            self._check(slab, rank)
        if len(self.slabs) > 1:
            self._check_coordinates()
            self._check_apart()

    def _settle(self) -> None:
        """Check the kinds of what a caller passes. A decoder has checked them."""
        text(self.dtype, "the element type of a layout", most=MAX_DTYPE)
        settle_ints(self, "a layout", "itemsize", "position")
        for field in ("shape", "blocks"):
            given = getattr(self, field)
            found = ints(given, f"the {field} of a layout")
            if found is not given:
                msgspec.structs.force_setattr(self, field, found)
        for field, kind in (("axes", str), ("slabs", Slab)):
            given = getattr(self, field)
            if not isinstance(given, tuple) or not all(isinstance(each, kind) for each in given):
                raise StateError(
                    f"the {field} of a layout are {shown(given)}", cause=f"a tuple of {kind.__name__} is expected"
                )
        for axis in self.axes:
            text(axis, "the name of an axis", most=MAX_DTYPE)

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

    def _check_coordinates(self) -> None:
        """Check that no two slabs hold the same coordinates. Does not compare slabs with gaps."""
        plain = [slab for slab in self.slabs if not slab.stepped]
        if len(plain) < 2:
            return
        start = np.array([slab.start for slab in plain], np.int64)
        stop = np.array([slab.stop for slab in plain], np.int64)
        meet = np.logical_and.reduce(np.maximum(start[:, None], start) < np.minimum(stop[:, None], stop), axis=-1)
        np.fill_diagonal(meet, False)
        if meet.any():
            first, second = (plain[number] for number in np.argwhere(meet)[0])
            raise StateError("two slabs of a layout hold the same coordinates", cause=f"{first} and {second}")

    def _check_apart(self) -> None:
        """Check that no two slabs have the same local bytes."""
        pieces = self.pieces
        if pieces > MAX_COMPARED_STRETCHES:
            raise StateError(
                "the slabs of a layout fall apart into too many pieces",
                cause=f"{pieces} contiguous pieces, and at most {MAX_COMPARED_STRETCHES} can be compared",
            )
        spend(pieces)
        # Sorted ranges are disjoint if and only if each begins no earlier than the one before it ends.
        starts, ends = (np.sort(edges) for edges in self.stretches())
        if (starts[1:] < ends[:-1]).any():
            raise StateError("two slabs of a layout stand on the same bytes", cause=f"{self.slabs}"[:300])

    def _axes(self, slab: Slab) -> tuple[int, list[tuple[int, int]]]:
        """Bytes of each contiguous stretch of a slab, and stride and count of the axes along which stretches repeat."""
        axes = sorted((s, n) for s, n in zip(slab.strides, slab.counts, strict=True) if n > 1)
        unit = self.itemsize
        while axes and axes[0][0] == unit:
            unit *= axes.pop(0)[1]
        return unit, axes

    def _stretches(self, slab: Slab) -> tuple[I64, I64]:
        """Where each contiguous stretch of a slab begins and ends, in bytes of the local item."""
        unit, axes = self._axes(slab)
        starts = np.array([slab.offset], np.int64)
        for stride, count in axes:
            starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
        return starts, starts + unit

    def stretches(self) -> tuple[I64, I64]:
        """Where each contiguous stretch of an item begins and ends, in bytes of the local item; in no order."""
        low, high = zip(*(self._stretches(slab) for slab in self.slabs), strict=True)
        return np.concatenate(low), np.concatenate(high)

    @property
    def effort(self) -> int:
        """The cost of checking this layout, in units of ``spend``."""
        return OF_A_SLAB * len(self.slabs) + self.pieces

    @property
    def pieces(self) -> int:
        """Number of contiguous stretches of one item that are compared with each other; 0 for one slab."""
        return self.stretch_count if len(self.slabs) > 1 else 0

    @property
    def stretch_count(self) -> int:
        """Number of contiguous stretches of one item."""
        return sum(math.prod(count for _, count in self._axes(slab)[1]) for slab in self.slabs)

    def geometry(self) -> bytes:
        """Bytes that are equal for equal layouts, and different for different ones.

        Tables of layouts use it as key. A peer could choose many layouts with the same hash, but not with the same
        bytes.
        """
        return msgspec.msgpack.encode(self)

    @property
    def nbytes(self) -> int:
        """Bytes from the start of the local item to the end of its last slab."""
        return max(slab.end(self.itemsize) for slab in self.slabs)

    @property
    def whole(self) -> bool:
        """Whether this rank holds all of the item."""
        return sum(math.prod(slab.counts) for slab in self.slabs) == math.prod(self.shape)

    @property
    def held(self) -> int:
        """Number of bytes of one item that this rank holds."""
        return self.itemsize * sum(math.prod(slab.counts) for slab in self.slabs)
