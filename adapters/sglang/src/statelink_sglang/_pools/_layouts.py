"""Says how an item of a buffer lies in memory, in the whole model's coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from statelink.errors import StateError
from statelink.state import Layout, Slab

from ._geometry import BYTE, Element

if TYPE_CHECKING:
    from ._geometry import StateTensor
    from ._lists import Listing, Named

__all__ = ["EMPTY", "Cut", "cut_layout", "head_layout", "own_layout", "row_layout", "share", "whole_layout"]

EMPTY = Layout("uint8", 1, (1,), ("element",), (Slab((0,), (1,), 0, (1,)),))
"""That of a buffer without items. It is listed, and holds nothing."""


class Cut(NamedTuple):
    """How a recurrent state is shared out: ``outer`` rows of ``dim`` units, and the pool's own names of its blocks."""

    dim: int
    outer: int
    groups: Sequence[int]
    tensor: StateTensor


def share(label: str, what: str, total: int, tp: tuple[int, int], *, replicate: bool = True) -> tuple[int, int]:
    """This rank's range of ``total`` units. If there are more ranks than units, consecutive ranks hold the same unit.

    Raises:
        StateError: So many ranks cannot share so many units.
    """
    rank, width = tp
    if total > 0 and total % width == 0:
        each = total // width
        return rank * each, (rank + 1) * each
    if total > 0 and replicate and width % total == 0:
        one = rank // (width // total)
        return one, one + 1
    raise StateError(f"{total} {what}s of {label!r} cannot be shared by {width} ranks")


def head_layout(
    listing: Listing, named: Named, *, page: int, heads: int, tp: tuple[int, int], order: str, element: Element
) -> Layout:
    """A page of keys or values, of which this rank holds its share of heads. ``order`` is ``nhd`` or ``hnd``."""
    first, last = share(named.label, "head", heads, tp)
    local = last - first
    what = f"[{page} tokens, {local} heads, dim] of {element.name}"
    dim = listing.units(named, page * local * element.size, what)
    row = dim * element.size
    strides = (local * row, row, element.size) if order == "nhd" else (row, page * row, element.size)
    slab = Slab((0, first, 0), (page, last, dim), 0, strides)
    return Layout(element.name, element.size, (page, heads, dim), ("token", "head", "dim"), (slab,), 0)


def row_layout(listing: Listing, named: Named, *, page: int, element: Element) -> Layout:
    """A page of rows, one for each token, the same on every rank."""
    width = listing.units(named, page * element.size, f"{page} rows of {element.name}")
    slab = Slab((0, 0), (page, width), 0, (width * element.size, element.size))
    return Layout(element.name, element.size, (page, width), ("token", "width"), (slab,), 0)


def whole_layout(listing: Listing, named: Named, element: Element = BYTE) -> Layout:
    """An item that is the same on every rank, and moves as a whole."""
    width = listing.units(named, element.size, f"number of {element.name}")
    return Layout(element.name, element.size, (width,), ("element",), (Slab((0,), (width,), 0, (element.size,)),))


def own_layout(named: Named, tp: tuple[int, int]) -> Layout:
    """An item that holds this rank's share in an unknown order. Only the same rank of equal width can read it.

    The rank is an axis of the item, so another width is a mismatch of extents when two sides connect.
    """
    (rank, width), nbytes = tp, named.entry.nbytes
    slab = Slab((rank, 0), (rank + 1, nbytes), 0, (nbytes, 1))
    return Layout("uint8", 1, (width, nbytes), ("rank", "byte"), (slab,))


def cut_layout(listing: Listing, named: Named, cut: Cut, tp: tuple[int, int]) -> Layout:
    """A slot of recurrent state: ``outer`` rows of ``dim`` units each. This rank holds its share of the units."""
    dim, outer, element = cut.dim, cut.outer, cut.tensor.element
    if dim < 1 or outer < 1:
        raise listing.refuse(f"{named.label!r} has dim {dim} and {outer} outer rows")
    what = f"{outer} rows of {dim} units of {element.name}"
    unit = listing.units(named, dim * outer * element.size, what)
    if outer != 1 and unit != 1:
        raise listing.refuse(
            f"{named.label!r} has {outer} outer rows of units of {unit} elements; one of the two is expected to be 1"
        )
    # With outer rows, channels are last in memory. The global item is the same as for channels first.
    rest, strides = (unit, (unit, 1)) if outer == 1 else (outer, (1, dim))
    across, along = (each * element.size for each in strides)
    blocks = cut.tensor.blocks or [(width, width) for width in cut.groups]
    boxes, full = _boxes(listing, named, cut, blocks, tp)
    slabs, filled = [], 0
    for first, last in boxes:
        slabs.append(Slab((first, 0), (last, rest), filled * across, (across, along)))
        filled += last - first
    held = tuple(width for width, _ in blocks) if len(blocks) > 1 else ()
    return Layout(element.name, element.size, (full, rest), ("channel", "unit"), tuple(slabs), blocks=held)


def _boxes(
    listing: Listing, named: Named, cut: Cut, blocks: Sequence[tuple[int, int]], tp: tuple[int, int]
) -> tuple[list[tuple[int, int]], int]:
    """This rank's ranges of the axis that is shared out, and the axis's full width."""
    rank, width = tp
    if not blocks:
        return [(rank * cut.dim, (rank + 1) * cut.dim)], cut.dim * width
    boxes, before = [], 0
    for block, units in blocks:
        # A block of the pool is dealt out by channels. A channel is never replicated, so there may be no more ranks.
        first, last = share(named.label, "head", units, tp, replicate=bool(cut.tensor.blocks))
        boxes.append((before + first * (block // units), before + last * (block // units)))
        before += block
    held = sum(last - first for first, last in boxes)
    if held != cut.dim:
        said = ", ".join(str(block) for block, _ in blocks)
        raise listing.refuse(
            f"{named.label!r} has dim {cut.dim}; rank {rank} of {width} holds {held} of the groups [{said}]. Where key "
            "heads are fewer than ranks, the pool does not say which of them a rank has"
        )
    return boxes, before
