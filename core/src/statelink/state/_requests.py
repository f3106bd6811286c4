"""Constructors for state of single requests: recurrent states, rings, and rows.

Every array may be a torch tensor, a numpy array or a `Memory`. Its first axis runs over slots or rows. Nothing is
copied. The arrays must outlive every link that was opened with the description.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from statelink.errors import StateError

from ._build import Described, View, component
from ._memory import Memory
from ._shares import as_int, expect_axes, pair, share
from ._signature import checked

if TYPE_CHECKING:
    from ._inventory import Partition

__all__ = ["Groups", "aux_rows", "conv_view", "mamba_slots", "ring_rows", "ssm_view", "whole_items"]

Array = Any
Groups = Sequence[int | tuple[int, int]]


@checked
def mamba_slots(
    *,
    conv: Mapping[int, Array | Sequence[Array]],
    ssm: Mapping[int, Array],
    conv_groups: Groups | None = None,
    heads: int = 0,
    tp: tuple[int, int] = (0, 1),
    transposed: bool = False,
    name: str = "mamba",
    replicated: bool = False,
    format: str = "",
) -> Described:
    """Slots of convolution and recurrent state of Mamba, gated-delta and linear-attention layers.

    Args:
        conv: Global layer number to its convolution state ``[slots, channels, kernel]`` (or
            ``[slots, kernel, channels]`` when ``transposed``), or to several of them.
        ssm: Global layer number to its recurrent state ``[slots, heads, dim, state]``; may be empty.
        conv_groups: Blocks of the channel axis that are each sharded on their own, such as ``[key, key, value]``. A
            block is given by its full width, or by ``(width, heads)`` if it is dealt out in heads. If there are more
            ranks than heads, several ranks hold the same head: ``(width, 1)`` is a block that every rank holds whole,
            such as B and C of a model with one group. The default is one block of the whole width. Both sides must
            give the same.
        heads: Heads of the recurrent state in the whole model; needed when ``ssm`` is given.
        tp: This rank and the width over which the states are sharded.
        transposed: Whether convolution states have their channels last.
        name: Component name.
        replicated: Whether other ranks hold the same share, too: context-parallel ones, or all where ``tp`` is (0, 1).
        format: Tag for properties that strides do not express. It is compared verbatim.

    Raises:
        StateError: A width is not divisible by the number of ranks, or an array does not hold this rank's share.
    """
    views: list[View] = []
    for layer, given in conv.items():
        arrays = list(given) if isinstance(given, (list, tuple)) else [given]
        for number, array in enumerate(arrays):
            suffix = f".{number}" if len(arrays) > 1 else ""
            views.append(conv_view(f"layers.{layer}.conv{suffix}", layer, array, conv_groups, tp, transposed))
    for layer, array in ssm.items():
        views.append(ssm_view(f"layers.{layer}.ssm", layer, array, heads, tp))
    return component(name, "mamba", views, format=format, tp=tp, replicated=replicated)


@checked
def ring_rows(
    layers: Mapping[int, Mapping[str, Array]],
    *,
    type: str,
    name: str = "",
    window: int | None = None,
    group: int = 1,
    keep: int = 0,
    heads: int = 0,
    tp: tuple[int, int] = (0, 1),
    replicated: bool = False,
    optional: bool = False,
    format: str = "",
) -> Described:
    """Rings of recent positions, one for each request, addressed by row: ``slot * ring + position mod ring``.

    The two sides may have rings of different lengths, because positions are paired.

    Args:
        layers: Global layer number to its named arrays, with one ring in each slot: ``[slots, ring, heads, ...]`` if
            ``heads`` is given, else ``[slots, ring, ...]``.
        type: ``swa_ring`` with ``window``; ``dsa_tail`` with ``group``; ``dsv4_c4_state`` with ``group`` and ``keep``.
        name: Component name; the type's when not given.
        heads: Heads of a row in the whole model, before any replication, such as KV heads of sliding-window layers;
            0 if rows have no heads, and are the same on every TP rank.
        tp: This rank and the width over which the heads are shared out, as for `kv_pages`: rank ``r`` of ``X`` holds
            heads ``[r * heads / X, (r + 1) * heads / X)``, or head ``r // (X / heads)`` where there are more ranks.
        replicated: Whether other ranks hold the same rows, too. On a rank with TP > 1, rows without heads must say so.
        window: Tokens that the layers look back.
        group: Positions that make up one compressed key.
        keep: Positions before the open group that are needed too.
        optional: Whether the other side may lack these layers.
        format: Tag for properties that strides do not express. It is compared verbatim.

    Raises:
        StateError: A slot does not follow its predecessor's last row in memory, an array does not hold this rank's
            share, or rows without heads are shared out.
    """
    width = pair(tp, f"the rank and width of component {name or type!r}")[1]
    if width > 1 and not heads and not replicated:
        raise StateError(
            f"component {name or type!r} does not say how {width} TP ranks share its rows",
            cause="its rows have no heads",
            hint="pass heads= where each rank holds heads of its own, replicated=True where all hold the same rows",
        )
    views = []
    for layer, arrays in layers.items():
        for part, array in arrays.items():
            label = f"layers.{layer}.{part}"
            rows = _rows(label, Memory.of(array))
            if heads:
                views.append(_head_view(label, rows, layer, optional, heads, tp))
            else:
                views.append(whole_view(label, rows, layer, optional))
    return component(
        name or type,
        type,
        views,
        page=1,
        window=window,
        group=group,
        keep=keep,
        format=format,
        tp=tp if heads else None,
        replicated=replicated,
    )


@checked
def whole_items(
    arrays: Mapping[str, Array],
    *,
    type: str,
    name: str = "",
    layers: Mapping[str, int] | None = None,
    page: int = 0,
    window: int | None = None,
    group: int = 1,
    partition: Partition | None = None,
    optional: bool = False,
    spare: int = 0,
    replicated: bool = False,
    format: str = "",
) -> Described:
    """Items that move as a whole: rows, pending groups, scales.

    Several ranks can list only items that are the same on all of them. Items of which each TP rank holds its own heads
    are described with `kv_pages` or `ring_rows`, or by hand.

    Args:
        arrays: Buffer name to its array ``[items, ...]``.
        type: State type: ``request_row``, ``hidden``, ``encoder``, ``qsa_pending``; ``block_scale``,
            ``block_scale_swa`` and ``c128_state`` with ``page``; or a third party's.
        name: Component name; by default that of the type.
        layers: Buffer name to its global layer, if it belongs to one.
        page: Positions of an item, for types that cover positions.
        window: Tokens that the layers look back, for windowed types.
        group: Positions of one group, for types that count groups.
        partition: Which positions this rank holds.
        optional: Whether the other side may lack these buffers.
        spare: Number of rows at the end of each item, on its first axis, that the other side may lack. They then stay
            as they are. Only speculation uses this half of a ring. Without it, another number of rows is a mismatch.
        replicated: Whether other ranks list the same items with the same bytes, too. A rank with TP > 1 must say so.
        format: Tag for properties that strides do not express. It is compared verbatim.
    """
    known = layers or {}
    views = [whole_view(label, Memory.of(array), known.get(label), optional, spare) for label, array in arrays.items()]
    return component(
        name or type,
        type,
        views,
        page=page,
        window=window,
        group=group,
        partition=partition,
        format=format,
        replicated=replicated,
    )


@checked
def aux_rows(
    rows: Mapping[str, Array],
    *,
    name: str = "aux",
    replicated: bool = False,
    optional: bool = False,
    format: str = "",
) -> Described:
    """Rows of metadata, one for each request: named arrays ``[rows, ...]``.

    With pipeline parallelism, only the rows of prefill's last stage are authoritative. Its other stages do not list
    them. On decode, each stage that reads rows lists its own.

    Args:
        rows: Name to its array.
        name: Component name.
        replicated: Whether other ranks list the same rows with the same bytes, too. A rank with TP > 1 must say so, or
            leave the rows to one rank.
        optional: Whether the other side may have no rows, as an engine of another kind. Decode's rows then stay as they
            are, and its engine has to fill them.
        format: Tag for properties that strides do not express. It is compared verbatim.
    """
    views = [whole_view(label, Memory.of(array), None, optional) for label, array in rows.items()]
    return component(name, "aux", views, format=format, replicated=replicated)


def whole_view(label: str, memory: Memory, layer: int | None, optional: bool, spare: int = 0) -> View:
    """A view of items that this rank holds whole. No axis of an item runs over positions.

    The last ``spare`` rows of an item's first axis are spare: the other side may lack them.
    """
    if len(memory.shape) < 2:
        raise StateError(
            f"array {label!r} needs items first and at least one more axis", cause=f"its shape is {memory.shape}"
        )
    inner = memory.shape[1:]
    axes = tuple(f"axis{axis}" for axis in range(len(inner)))
    rows, rest = inner[0], inner[1:]
    if as_int(spare, f"the number of spare rows of {label!r}") and not 0 < spare < rows:
        raise StateError(f"{spare} rows of {label!r} cannot be spare", cause=f"an item has {rows}")
    edges = [0, rows - spare, rows] if spare else [0, rows]
    zeros = (0,) * len(rest)
    boxes = [((first, *zeros), (last, *rest)) for first, last in itertools.pairwise(edges)]
    order = tuple(range(len(inner)))
    return View(label, memory, inner, axes, boxes, order, layer=layer, optional=optional, spare=bool(spare))


def _head_view(label: str, rows: Memory, layer: int, optional: bool, heads: int, tp: tuple[int, int]) -> View:
    """Rows ``[rows, heads, ...]`` of which this rank holds its share of the heads."""
    first, last = share(label, "head", heads, tp)
    inner = rows.shape[2:]
    axes = ("head", *(f"axis{axis}" for axis in range(len(inner))))
    box = ((first, *(0 for _ in inner)), (last, *inner))
    return View(label, rows, (heads, *inner), axes, [box], tuple(range(len(axes))), layer=layer, optional=optional)


def _rows(label: str, memory: Memory) -> Memory:
    """``[slots, ring, ...]`` as ``[slots * ring, ...]``."""
    if len(memory.shape) < 3:
        raise StateError(f"array {label!r} needs the axes [slots, ring, ...]", cause=f"its shape is {memory.shape}")
    slots, ring = memory.shape[:2]
    if slots > 1 and memory.strides[0] != ring * memory.strides[1]:
        raise StateError(
            f"the rings of array {label!r} do not follow one another in memory",
            cause=f"{memory.strides[0]} bytes from slot to slot, {ring} rows of {memory.strides[1]} bytes"
            + ("; the array is transposed" if memory.strides[0] < memory.strides[1] else ""),
        )
    return msgspec.structs.replace(
        memory, shape=(slots * ring, *memory.shape[2:]), strides=(memory.strides[1], *memory.strides[2:])
    )


def conv_view(
    label: str, layer: int, array: Array, groups: Groups | None, tp: tuple[int, int], transposed: bool
) -> View:
    """A convolution state, of which this rank holds its share of each block of channels."""
    memory = Memory.of(array)
    expect_axes(label, memory, "slots, kernel, channels" if transposed else "slots, channels, kernel")
    order = (1, 0) if transposed else (0, 1)
    local, kernel = memory.shape[1 + order[0]], memory.shape[1 + order[1]]
    boxes, before = [], 0
    blocks: list[int] = []
    for group in groups or [local * tp[1]]:
        given = group if isinstance(group, (tuple, list)) else (group, group)
        width, units = pair(given, f"the width and heads of a block of {label!r}")
        if units < 1 or width % units:
            raise StateError(f"{width} channels of {label!r} are no whole number of {units} heads")
        first, last = share(label, "head" if units != width else "channel", units, tp, replicate=units != width)
        each = width // units
        boxes.append(((before + first * each, 0), (before + last * each, kernel)))
        before += width
        blocks.append(width)
    return View(
        label,
        memory,
        (before, kernel),
        ("channel", "kernel"),
        boxes,
        order,
        layer=layer,
        blocks=tuple(blocks) if len(blocks) > 1 else (),
        wider="a block that each rank holds whole, such as B and C of a model with one group, is given as (width, 1) "
        "in conv_groups",
    )


def ssm_view(label: str, layer: int, array: Array, heads: int, tp: tuple[int, int]) -> View:
    """A recurrent state ``[slots, heads, ...]``, of which this rank holds its share of the heads."""
    memory = Memory.of(array)
    if len(memory.shape) < 2 or heads < 1:
        raise StateError(f"recurrent state {label!r} needs [slots, heads, ...] and the number of heads")
    first, last = share(label, "head", heads, tp)
    inner = memory.shape[2:]
    axes = ("head", *(f"state{axis}" for axis in range(len(inner))))
    box = ((first, *(0 for _ in inner)), (last, *inner))
    return View(label, memory, (heads, *inner), axes, [box], tuple(range(len(axes))), layer=layer)
