"""Turns an engine's buffers into views in global coordinates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from statelink.errors import StateError
from statelink.state._build import View
from statelink.state._memory import Memory
from statelink.state._shares import share

from ._geometry import itemsize_of
from ._lists import refuse

if TYPE_CHECKING:
    from ._geometry import PoolGeometry, StateTensor
    from ._lists import Entry, Named

__all__ = ["PoolList", "State", "empty_view", "head_views", "own_view", "row_view", "state_view", "whole_views"]


class PoolList(NamedTuple):
    """One list of one pool, with its geometry. Errors name the pool and the method."""

    pool: object
    method: str
    geometry: PoolGeometry
    optional: bool = False

    def memory(self, entry: Entry, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] = ()) -> Memory:
        """The buffer as an array of items of this shape."""
        size = itemsize_of(dtype)
        dense = [size]
        for extent in reversed(shape[1:]):
            dense.insert(0, dense[0] * extent)
        return Memory.pointer(
            entry.address,
            (entry.items, *shape),
            dtype,
            size,
            strides=(entry.stride, *(strides or dense)),
            region=entry.region,
        )

    def split(self, named: Named, unit: int, what: str) -> int:
        """Number of units of an item."""
        if unit < 1 or named.entry.nbytes % unit:
            raise refuse(
                self.pool, self.method, f"an item of {named.label!r} has {named.entry.nbytes} bytes: no whole {what}"
            )
        return named.entry.nbytes // unit


class State(NamedTuple):
    """How one entry of recurrent state is sliced."""

    dim: int
    outer: int
    groups: Sequence[int]
    tensor: StateTensor


def empty_view(listed: PoolList, named: Named) -> View:
    """A buffer without items. It is listed, and holds nothing."""
    memory = Memory.pointer(1, (0, 1), "uint8", 1, kind=listed.geometry.kind)
    return View(
        named.label,
        memory,
        (1,),
        ("element",),
        [((0,), (1,))],
        (0,),
        layer=named.layer,
        optional=listed.optional,
    )


def head_views(listed: PoolList, named: Sequence[Named], *, page: int, heads: int, order: str) -> Iterator[View]:
    """Pages of keys or values, of which this rank holds its share of heads."""
    geometry = listed.geometry
    size = itemsize_of(geometry.dtype)
    axes = (0, 1, 2) if order == "nhd" else (1, 0, 2)
    for each in named:
        if not each.entry.items:
            yield empty_view(listed, each)
            continue
        first, last = share(each.label, "head", heads, geometry.tp)
        local = last - first
        dim = listed.split(each, page * local * size, f"[{page} tokens, {local} heads, dim] of {geometry.dtype}")
        inner = (page, local, dim) if order == "nhd" else (local, page, dim)
        yield View(
            each.label,
            listed.memory(each.entry, inner, geometry.dtype),
            (page, heads, dim),
            ("token", "head", "dim"),
            [((0, first, 0), (page, last, dim))],
            axes,
            position=0,
            layer=each.layer,
            optional=listed.optional,
        )


def row_view(listed: PoolList, named: Named, *, rows: int, dtype: str, axis: str = "token") -> View:
    """Pages of rows, the same on every rank; ``axis`` says what a row is."""
    if not named.entry.items:
        return empty_view(listed, named)
    width = listed.split(named, rows * itemsize_of(dtype), f"{rows} rows of {dtype}")
    return View(
        named.label,
        listed.memory(named.entry, (rows, width), dtype),
        (rows, width),
        (axis, "width"),
        [((0, 0), (rows, width))],
        (0, 1),
        position=0,
        layer=named.layer,
        optional=listed.optional,
    )


def whole_views(listed: PoolList, named: Named, *, rows: int = 0, axis: str = "token") -> Iterator[View]:
    """Items that are the same on every rank: field by field if the geometry has the fields, else as a whole."""
    entry, geometry = named.entry, listed.geometry
    fields = geometry.fields.get(named.part, ()) if rows else ()
    # A single field is the tensor itself, under the tensor's name.
    labels = [f"{named.part}.{field.name}" if len(fields) > 1 else named.part for field in fields]
    if not entry.items and fields:
        # Empty buffers have the names of the fields, so that they pair with the other side's.
        for label in labels:
            yield empty_view(listed, named._replace(part=label))
        return
    if not entry.items:
        yield empty_view(listed, named)
        return
    if not fields:
        dtype = geometry.dtypes.get(named.part, "uint8")
        width = listed.split(named, itemsize_of(dtype), f"number of {dtype}")
        memory = listed.memory(entry, (width,), dtype)
        box = ((0,), (width,))
        yield View(
            named.label,
            memory,
            (width,),
            ("element",),
            [box],
            (0,),
            layer=named.layer,
            optional=listed.optional,
        )
        return
    if rows * sum(field.width for field in fields) != entry.nbytes:
        said = " + ".join(f"{field.name} {field.width}" for field in fields)
        raise refuse(
            listed.pool,
            listed.method,
            f"an item of {named.label!r} has {entry.nbytes} bytes; {rows} rows of {said} bytes do not fill it",
        )
    before = 0
    for label, field in zip(labels, fields, strict=True):
        part = named._replace(part=label, entry=entry.within(before * rows, field.width * rows))
        yield row_view(listed, part, rows=rows, dtype=field.dtype, axis=axis)
        before += field.width


def own_view(listed: PoolList, named: Named, tp: tuple[int, int], dtype: str = "uint8") -> View:
    """Items that hold this rank's share in an unknown order. Only the same rank of equal width can read them.

    The rank is an axis of the item, so another width is a mismatch of extents when two sides connect.
    """
    if not named.entry.items:
        return empty_view(listed, named)
    rank, width = tp
    size = listed.split(named, itemsize_of(dtype), f"number of {dtype}")
    return View(
        named.label,
        listed.memory(named.entry, (1, size), dtype),
        (width, size),
        ("rank", "byte" if dtype == "uint8" else "element"),
        [((rank, 0), (rank + 1, size))],
        (0, 1),
        layer=named.layer,
        optional=listed.optional,
    )


def state_view(listed: PoolList, named: Named, state: State) -> View:
    """Slots of recurrent state: ``outer`` rows of ``dim`` units each. This rank holds its share of them."""
    if not named.entry.items:
        return empty_view(listed, named)
    dim, outer, dtype = state.dim, state.outer, state.tensor.dtype
    if dim < 0 or outer < 1:
        raise refuse(listed.pool, listed.method, f"{named.label!r} has dim {dim} and {outer} outer rows")
    size = itemsize_of(dtype)
    unit = listed.split(named, max(dim, 1) * outer * size, f"{outer} rows of {dim} units of {dtype}")
    if not dim:
        shape = (outer * unit,)
        return View(
            named.label,
            listed.memory(named.entry, shape, dtype),
            shape,
            ("element",),
            [((0,), shape)],
            (0,),
            layer=named.layer,
            optional=listed.optional,
        )
    blocks = _blocks(listed, named, state)
    boxes, full = _boxes(listed, named, state, blocks)
    order: tuple[int, ...]
    if outer == 1:
        inner, order, rest, axes = (dim, unit), (0, 1), (unit,), ("channel", "unit")
    elif unit == 1:
        # Channels are last in memory. The global item is the same as for channels first.
        inner, order, rest, axes = (outer, dim), (1, 0), (outer,), ("channel", "unit")
    else:
        raise refuse(
            listed.pool,
            listed.method,
            f"{named.label!r} has {outer} outer rows of units of {unit} elements; one of the two is expected to be 1",
        )
    zeros = (0,) * len(rest)
    return View(
        named.label,
        listed.memory(named.entry, inner, dtype),
        (full, *rest),
        axes,
        [((first, *zeros), (last, *rest)) for first, last in boxes],
        order,
        layer=named.layer,
        optional=listed.optional,
        blocks=tuple(block for block, _ in blocks) if len(blocks) > 1 else (),
    )


def _boxes(
    listed: PoolList, named: Named, state: State, blocks: Sequence[tuple[int, int]]
) -> tuple[list[tuple[int, int]], int]:
    """This rank's ranges of the sliced axis, and the axis's full width."""
    rank, width = listed.geometry.states
    tensor, dim = state.tensor, state.dim
    if not blocks:
        if not tensor.heads:
            return [(rank * dim, (rank + 1) * dim)], dim * width
        first, last = share(named.label, "head", tensor.heads, (rank, width))
        if dim % (last - first):
            raise refuse(listed.pool, listed.method, f"{named.label!r} has dim {dim} for {last - first} heads")
        each = dim // (last - first)
        return [(first * each, last * each)], tensor.heads * each
    replicate = bool(tensor.blocks or listed.geometry.conv_heads)
    boxes, before = [], 0
    for block, units in blocks:
        if units < 1 or block < 0 or block % units:
            raise StateError(f"{block} channels of {named.label!r} are no whole number of {units} heads")
        # Without heads, a unit is one channel. A channel is never replicated, so there may be no more ranks than units.
        first, last = share(named.label, "head", units, (rank, width), replicate=replicate)
        boxes.append((before + first * (block // units), before + last * (block // units)))
        before += block
    held = sum(last - first for first, last in boxes)
    if held != dim:
        said = ", ".join(str(block) for block, _ in blocks)
        raise refuse(
            listed.pool,
            listed.method,
            f"{named.label!r} has dim {dim}; rank {rank} of {width} holds {held} of the groups [{said}]",
            "where key heads are fewer than ranks, say so with PoolGeometry.conv_heads",
        )
    return boxes, before


def _blocks(listed: PoolList, named: Named, state: State) -> Sequence[tuple[int, int]]:
    """Blocks of the sliced axis: the elements of each, and the heads in which it is dealt out.

    There are none if every rank holds an equal part of the axis.
    """
    given, groups = state.tensor.blocks, state.groups
    if given:
        if groups and [width for width, _ in given] != [*groups]:
            raise refuse(
                listed.pool,
                listed.method,
                f"{named.label!r} has the groups {[*groups]}; the geometry has the blocks {[*given]}",
            )
        return given
    heads = listed.geometry.conv_heads or groups
    if groups and len(heads) != len(groups):
        raise refuse(
            listed.pool,
            listed.method,
            f"{named.label!r} has {len(groups)} groups; the geometry has heads for {len(heads)}",
        )
    return list(zip(groups, heads, strict=True)) if groups else []
