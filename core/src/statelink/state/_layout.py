"""The shape of one item, and the boxes of it that a rank holds."""

from __future__ import annotations

import math

import msgspec

from statelink.errors import StateError

__all__ = ["Layout", "Slab"]

MAX_AXES = 8
MAX_SLABS = 256
MAX_BYTES = 1 << 62


class Slab(msgspec.Struct, frozen=True):
    """A box of the global item that stands somewhere in the local item.

    Attributes:
        start: First global coordinate, per axis.
        stop: One past the last global coordinate, per axis.
        offset: Bytes from the start of the local item to the element at ``start``.
        strides: Bytes between neighbouring elements of the box, per axis, in the local item.
        step: Distance between the global coordinates held, per axis; empty means 1 everywhere.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    step: tuple[int, ...] = ()

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
        if any(n > 1 and s < self.itemsize for n, s in zip(slab.counts, slab.strides, strict=True)):
            raise StateError("the elements of a slab overlap in memory", cause=f"strides {slab.strides}")

    @property
    def nbytes(self) -> int:
        """Bytes from the start of the local item to the end of what this rank holds of it."""
        return max(slab.end(self.itemsize) for slab in self.slabs)

    @property
    def held(self) -> int:
        """Bytes of one item that this rank holds."""
        return self.itemsize * sum(math.prod(slab.counts) for slab in self.slabs)
