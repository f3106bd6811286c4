"""Constructors in the words of the field: pages of keys and values, slots, windows, index keys, metadata rows.

Every array may be a torch tensor, a numpy array or a `Memory`. Its first axis runs over items. Nothing is copied;
the arrays must outlive every link that was opened with the description.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from statelink.errors import StateError

from ._build import Described, View, component
from ._memory import Memory

if TYPE_CHECKING:
    from ._inventory import Partition

__all__ = ["aux_rows", "index_pages", "kv_pages", "mamba_slots", "mla_pages", "window_pages"]

Array = Any


def kv_pages(
    layers: Mapping[int, tuple[Array, Array]],
    *,
    heads: int,
    tp: tuple[int, int] = (0, 1),
    order: str = "nhd",
    name: str = "kv",
    partition: Partition | None = None,
    optional: bool = False,
    format: str = "",
) -> Described:
    """Pages of keys and values of full attention (MHA, GQA).

    Args:
        layers: Global layer number to its ``(K, V)`` arrays, each ``[pages, tokens, heads, dim]`` for ``nhd`` or
            ``[pages, heads, tokens, dim]`` for ``hnd``. K and V may differ in ``dim``.
        heads: Number of KV heads of the whole model, before any replication.
        tp: This rank and the width of attention TP. Where there are more ranks than heads, consecutive ranks
            hold the same head (semantics of head replication: head ``rank // (width / heads)``).
        order: ``nhd`` or ``hnd``.
        name: Component name.
        partition: Which positions this rank holds.
        optional: Whether the other side may lack these layers (draft layers).
        format: Opaque tag for what strides cannot say.

    Raises:
        StateError: The arrays do not hold this rank's share.
    """
    views = list(_kv_views(layers, heads, tp, order, optional))
    return component(name, "kv", views, page=_page(name, views), partition=partition, format=format)


def window_pages(
    layers: Mapping[int, tuple[Array, Array]],
    *,
    heads: int,
    window: int,
    tp: tuple[int, int] = (0, 1),
    order: str = "nhd",
    name: str = "swa",
    format: str = "",
) -> Described:
    """Pages of keys and values of sliding-window layers, in a page pool of their own.

    Args:
        layers: As for `kv_pages`; indices are pages of the sliding pool.
        heads: Number of KV heads of the whole model.
        window: Tokens that the layers look back.
        tp: This rank and the width of attention TP.
        order: ``nhd`` or ``hnd``.
        name: Component name.
        format: Opaque tag for what strides cannot say.
    """
    views = list(_kv_views(layers, heads, tp, order, False))
    return component(name, "swa", views, page=_page(name, views), window=window, format=format)


def mla_pages(
    layers: Mapping[int, Array],
    *,
    name: str = "kv",
    partition: Partition | None = None,
    optional: bool = False,
    format: str = "",
) -> Described:
    """Pages of MLA latents, ``[pages, tokens, width]`` per layer; the same on every TP rank."""
    views = list(_row_views(layers, "latent", "width", optional))
    return component(name, "kv", views, page=_page(name, views), partition=partition, format=format)


def index_pages(
    layers: Mapping[int, Array], *, name: str = "dsa", optional: bool = False, format: str = ""
) -> Described:
    """Pages of sparse-attention index keys, ``[pages, tokens, width]`` per layer; the same on every TP rank.

    A layer that shares another's index is given an array without items: it keeps its place and moves nothing.
    """
    views = list(_row_views(layers, "index_k", "width", optional))
    return component(name, "dsa", views, page=_page(name, views), format=format)


def mamba_slots(
    *,
    conv: Mapping[int, Array | Sequence[Array]],
    ssm: Mapping[int, Array],
    conv_groups: Sequence[int] | None = None,
    heads: int = 0,
    tp: tuple[int, int] = (0, 1),
    transposed: bool = False,
    name: str = "mamba",
    format: str = "",
) -> Described:
    """Slots of convolution and recurrent state of Mamba, gated-delta and linear-attention layers.

    Args:
        conv: Global layer number to its convolution state ``[slots, channels, kernel]`` (or
            ``[slots, kernel, channels]`` when ``transposed``), or to several of them.
        ssm: Global layer number to its recurrent state ``[slots, heads, dim, state]``; may be empty.
        conv_groups: Full widths of the blocks of the channel axis that are each sharded on their own, such as
            ``[key, key, value]``; one block of the whole width when not given.
        heads: Heads of the recurrent state in the whole model; needed when ``ssm`` is given.
        tp: This rank and the width over which the states are sharded.
        transposed: Whether convolution states have their channels last.
        name: Component name.
        format: Opaque tag for what strides cannot say.

    Raises:
        StateError: A width is not divisible by the number of ranks, or an array does not hold this rank's share.
    """
    views: list[View] = []
    for layer, given in conv.items():
        arrays = list(given) if isinstance(given, (list, tuple)) else [given]
        for number, array in enumerate(arrays):
            suffix = f".{number}" if len(arrays) > 1 else ""
            views.append(_conv_view(f"layers.{layer}.conv{suffix}", layer, array, conv_groups, tp, transposed))
    for layer, array in ssm.items():
        memory = Memory.of(array)
        label = f"layers.{layer}.ssm"
        if len(memory.shape) < 2 or heads < 1:
            raise StateError(f"recurrent state {label!r} needs [slots, heads, ...] and the number of heads")
        first, last = _share(label, "head", heads, tp)
        inner = memory.shape[2:]
        axes = ("head", *(f"state{axis}" for axis in range(len(inner))))
        box = ((first, *(0 for _ in inner)), (last, *inner))
        views.append(View(label, memory, (heads, *inner), axes, [box], tuple(range(len(axes))), layer=layer))
    return component(name, "mamba", views, format=format)


def aux_rows(rows: Mapping[str, Array], *, name: str = "aux", format: str = "") -> Described:
    """Rows of metadata, one a request: ``[rows, ...]`` per named array; the same on every rank that lists them.

    Under pipeline parallelism only the last stage's rows are authoritative: the other stages leave them out.
    """
    views = []
    for label, array in rows.items():
        memory = Memory.of(array)
        if len(memory.shape) < 2:
            raise StateError(
                f"metadata buffer {label!r} of component {name!r} needs rows first and at least one more axis",
                cause=f"its shape is {memory.shape}",
            )
        inner = memory.shape[1:]
        axes = tuple(f"axis{axis}" for axis in range(len(inner)))
        views.append(View(label, memory, inner, axes, [((0,) * len(inner), inner)], tuple(range(len(inner)))))
    return component(name, "aux", views, format=format)


def _kv_views(
    layers: Mapping[int, tuple[Array, Array]], heads: int, tp: tuple[int, int], order: str, optional: bool
) -> Iterator[View]:
    if order not in ("nhd", "hnd"):
        raise StateError(f"no page order {order!r}", hint="'nhd' ([token, head, dim]) or 'hnd' ([head, token, dim])")
    axes = (0, 1, 2) if order == "nhd" else (1, 0, 2)
    for layer, pair in layers.items():
        for part, array in zip(("k", "v"), pair, strict=True):
            label = f"layers.{layer}.{part}"
            memory = Memory.of(array)
            if len(memory.shape) != 4:
                raise StateError(f"pages {label!r} need four axes", cause=f"their shape is {memory.shape}")
            first, last = _share(label, "head", heads, tp)
            tokens, width = memory.shape[1 + axes[0]], memory.shape[4 - 1]
            yield View(
                name=label,
                memory=memory,
                shape=(tokens, heads, width),
                axes=("token", "head", "dim"),
                boxes=[((0, first, 0), (tokens, last, width))],
                order=axes,
                position=0,
                layer=layer,
                optional=optional,
            )


def _row_views(layers: Mapping[int, Array], part: str, axis: str, optional: bool) -> Iterator[View]:
    for layer, array in layers.items():
        label = f"layers.{layer}.{part}"
        memory = Memory.of(array)
        if len(memory.shape) != 3:
            raise StateError(f"pages {label!r} need [pages, tokens, width]", cause=f"their shape is {memory.shape}")
        tokens, width = memory.shape[1:]
        yield View(
            name=label,
            memory=memory,
            shape=(tokens, width),
            axes=("token", axis),
            boxes=[((0, 0), (tokens, width))],
            order=(0, 1),
            position=0,
            layer=layer,
            optional=optional,
        )


def _conv_view(
    label: str, layer: int, array: Array, groups: Sequence[int] | None, tp: tuple[int, int], transposed: bool
) -> View:
    memory = Memory.of(array)
    if len(memory.shape) != 3:
        raise StateError(f"convolution state {label!r} needs three axes", cause=f"its shape is {memory.shape}")
    order = (1, 0) if transposed else (0, 1)
    local, kernel = memory.shape[1 + order[0]], memory.shape[1 + order[1]]
    widths = list(groups) if groups else [local * tp[1]]
    boxes, before = [], 0
    for width in widths:
        first, last = _share(label, "channel", width, tp, divide=True)
        boxes.append(((before + first, 0), (before + last, kernel)))
        before += width
    return View(label, memory, (before, kernel), ("channel", "kernel"), boxes, order, layer=layer)


def _share(label: str, what: str, total: int, tp: tuple[int, int], *, divide: bool = False) -> tuple[int, int]:
    """This rank's range of ``total`` along a TP axis; ranks beyond the total replicate unless ``divide``."""
    rank, width = tp
    if total < 1 or width < 1 or not 0 <= rank < width:
        raise StateError(f"rank {rank} of {width} cannot hold a share of {total} {what}s of {label!r}")
    if total % width == 0:
        each = total // width
        return rank * each, (rank + 1) * each
    if not divide and width % total == 0:
        one = rank // (width // total)
        return one, one + 1
    raise StateError(
        f"{total} {what}s of {label!r} cannot be shared by {width} ranks",
        cause="one does not divide the other" if not divide else "the width is not divisible",
        hint="give the state types' own TP width, or describe the slabs by hand",
    )


def _page(name: str, views: Sequence[View]) -> int:
    sizes = {view.shape[0] for view in views if view.memory.shape[0]} or {view.shape[0] for view in views}
    if len(sizes) != 1:
        raise StateError(f"the arrays of component {name!r} differ in tokens a page", cause=f"they have {sizes}")
    return sizes.pop()
