"""Constructors for the pages of attention.

Every array may be a torch tensor, a numpy array or a `Memory`. Its first axis runs over pages. Nothing is copied. The
arrays must outlive every link that was opened with the description.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from statelink._arguments import shown
from statelink.errors import StateError

from ._build import Described, View, component
from ._memory import Memory
from ._shares import attention_type, expect_axes, page_of, share
from ._signature import checked

if TYPE_CHECKING:
    from ._inventory import Partition

__all__ = ["compressed_pages", "index_pages", "kv_pages", "mla_pages", "planar_pages"]

Array = Any

PAIR = 2
"""Keys and values."""


@checked
def kv_pages(
    layers: Mapping[int, tuple[Array, Array]],
    *,
    heads: int,
    window: int | None = None,
    attention_chunk: int | None = None,
    tp: tuple[int, int] = (0, 1),
    order: str = "nhd",
    name: str = "",
    type: str = "",
    partition: Partition | None = None,
    replicated: bool = False,
    optional: bool = False,
    scales: Mapping[int, tuple[float, float]] | None = None,
    format: str = "",
) -> Described:
    """Pages of keys and values of attention with heads (MHA, GQA): full, of a sliding window, or chunked local.

    Args:
        layers: Global layer number to its ``(K, V)`` arrays, each ``[pages, tokens, heads, dim]`` for ``nhd`` or
            ``[pages, heads, tokens, dim]`` for ``hnd``. K and V may differ in ``dim``. Layers with windows, and those
            with attention chunks, have page pools of their own, and are components of their own.
        heads: Number of KV heads of the whole model, before any replication.
        window: Tokens that sliding-window layers look back; else ``None``.
        attention_chunk: Tokens of an attention chunk of layers with chunked local attention, at least 2; else ``None``.
            The token at position t attends to the positions from ``t - t mod attention_chunk`` to t. It is the
            component's ``group``.
        tp: This rank and the width of attention TP. If there are more ranks than heads, consecutive ranks hold the
            same head.
        order: ``nhd`` or ``hnd``.
        name: Component name; by default that of the type.
        type: State type; by default ``swa`` with a window, ``chunked_local`` with attention chunks, else ``kv``. The
            dense layers of a sparse model have ``minimax_dense_kv``.
        partition: Which positions this rank holds.
        replicated: Whether other ranks hold the same share, too: context-parallel ones, or all where ``tp`` is (0, 1).
        optional: Whether the other side may lack these layers (draft layers).
        scales: For each layer, the static quantisation scales of K and V, if there are any. Both sides must have the
            same.
        format: Tag for properties that strides do not express. It is compared verbatim.

    Raises:
        StateError: The arrays do not hold this rank's share, an attention chunk has less than 2 tokens, or layers have
            both windows and attention chunks.
    """
    kind = attention_type(window, attention_chunk, type)
    views = list(_kv_views(layers, heads, tp, order, optional, scales or {}))
    label = name or kind
    return component(
        label,
        kind,
        views,
        page=page_of(label, views),
        window=window,
        group=1 if attention_chunk is None else attention_chunk,
        partition=partition,
        format=format,
        tp=tp,
        replicated=replicated,
    )


@checked
def mla_pages(
    layers: Mapping[int, Array],
    *,
    name: str = "kv",
    partition: Partition | None = None,
    optional: bool = False,
    format: str = "",
) -> Described:
    """Pages of MLA latents, ``[pages, tokens, width]`` per layer; the same on every TP rank."""
    views = list(_row_views(layers, "latent", optional))
    page = page_of(name, views)
    return component(name, "kv", views, page=page, partition=partition, format=format, replicated=True)


@checked
def index_pages(
    layers: Mapping[int, Array],
    *,
    name: str = "dsa",
    type: str = "dsa",
    partition: Partition | None = None,
    optional: bool = False,
    format: str = "",
) -> Described:
    """Pages of sparse-attention index keys, ``[pages, tokens, width]`` per layer; the same on every TP rank.

    A layer that shares another layer's index has an array without items. It is listed, and moves nothing.

    Args:
        layers: Global layer number to its array.
        name: Component name.
        type: ``dsa``, or ``minimax_index_k``.
        partition: Which positions this rank holds.
        optional: Whether the other side may lack these layers.
        format: Tag for properties that strides do not express. It is compared verbatim.
    """
    views = list(_row_views(layers, "index_k", optional))
    page = page_of(name, views)
    return component(name, type, views, page=page, partition=partition, format=format, replicated=True)


@checked
def compressed_pages(
    layers: Mapping[int, Mapping[str, Array]],
    *,
    page: int,
    name: str = "dsv4",
    type: str = "dsv4",
    window: int | None = None,
    group: int = 1,
    partition: Partition | None = None,
    replicated: bool = False,
    optional: bool = False,
    format: str = "",
) -> Described:
    """Pages in which each row stands for several tokens: compressed keys, values and index keys.

    Arrays of different compression belong to one component if the same page ids index them all. A pool with page ids of
    its own is a component of its own.

    Args:
        layers: Global layer number to its named arrays, each ``[pages, rows, width]``; ``page / rows`` tokens for each
            row.
        page: Tokens of one page.
        name: Component name.
        type: ``dsv4``, ``qsa_compressed``; ``dsv4_c128`` with ``group``; ``swa`` with ``window``.
        window: Tokens that the layers look back, for windowed types.
        group: Tokens of one group, for types that count complete groups.
        partition: Which positions this rank holds.
        replicated: Whether other ranks hold the same pages, too. A rank with TP > 1 must say so.
        optional: Whether the other side may lack these layers.
        format: Tag for properties that strides do not express. It is compared verbatim.
    """
    views = []
    for layer, arrays in layers.items():
        for part, array in arrays.items():
            label = f"layers.{layer}.{part}"
            memory = Memory.of(array)
            expect_axes(label, memory, "pages, rows, width")
            views.append(_paged_view(label, memory, ("row", "width"), layer, optional))
    return component(
        name,
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
def planar_pages(
    layers: Mapping[int, Array],
    *,
    fields: Sequence[tuple[str, int]],
    name: str = "kv",
    type: str = "kv",
    partition: Partition | None = None,
    replicated: bool = False,
    optional: bool = False,
    format: str = "",
) -> Described:
    """Pages with their fields one after the other: all keys of a page, then all its scales, and so on.

    Args:
        layers: Global layer number to its array of bytes ``[pages, bytes of a page]``.
        fields: Name and bytes per token of each field, in order.
        name: Component name.
        type: State type.
        partition: Which positions this rank holds.
        replicated: Whether other ranks hold the same pages, too. A rank with TP > 1 must say so.
        optional: Whether the other side may lack these layers.
        format: Tag for properties that strides do not express. It is compared verbatim.

    Raises:
        StateError: A page does not have a whole number of tokens with these fields.
    """
    row = sum(width for _, width in fields)
    views = []
    for layer, array in layers.items():
        label = f"layers.{layer}"
        memory = Memory.of(array)
        expect_axes(label, memory, "pages, bytes")
        if row < 1 or memory.itemsize != 1 or memory.shape[1] % row:
            raise StateError(
                f"a page of {label!r} is no whole number of tokens",
                cause=f"{memory.shape[1]} elements of {memory.itemsize} bytes, {row} bytes a token",
            )
        tokens = memory.shape[1] // row
        before = 0
        for field, width in fields:
            # Each field is a dense [tokens, width] block that begins where the fields before it end.
            part = Memory(
                address=memory.address + before * tokens if memory.shape[0] else memory.address,
                shape=(memory.shape[0], tokens, width),
                strides=(memory.strides[0], width, 1),
                dtype=memory.dtype,
                itemsize=1,
                region=memory.region,
            )
            views.append(_paged_view(f"{label}.{field}", part, ("token", "byte"), layer, optional))
            before += width
    page = page_of(name, views)
    return component(name, type, views, page=page, partition=partition, format=format, replicated=replicated)


def _kv_views(
    layers: Mapping[int, tuple[Array, Array]],
    heads: int,
    tp: tuple[int, int],
    order: str,
    optional: bool,
    scales: Mapping[int, tuple[float, float]],
) -> Iterator[View]:
    if order not in ("nhd", "hnd"):
        raise StateError(
            f"no page order {shown(order)}", hint="'nhd' ([token, head, dim]) or 'hnd' ([head, token, dim])"
        )
    axes = (0, 1, 2) if order == "nhd" else (1, 0, 2)
    for layer, given in layers.items():
        pair = _pair(layer, given)
        if len(pair) != PAIR:
            raise StateError(
                f"layer {layer} needs one array of keys and one of values", cause=f"{len(pair)} arrays were passed"
            )
        for number, (part, array) in enumerate(zip(("k", "v"), pair, strict=True)):
            label = f"layers.{layer}.{part}"
            memory = Memory.of(array)
            expect_axes(label, memory, "pages, tokens, heads, dim" if order == "nhd" else "pages, heads, tokens, dim")
            first, last = share(label, "head", heads, tp)
            tokens, width = memory.shape[1 + axes[0]], memory.shape[3]
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
                scale=scales[layer][number] if layer in scales else None,
            )


def _pair(layer: int, given: Any) -> tuple[Any, ...]:
    """The arrays of a layer, for which an engine may have passed one array. An array of two is a pair of arrays."""
    alone = isinstance(given, Memory) or hasattr(given, "shape")
    if alone and (isinstance(given, Memory) or len(given) != PAIR):
        raise StateError(
            f"layer {layer} needs a pair (K, V) of arrays",
            cause=f"one array of shape {tuple(given.shape)} was passed",
            hint="fused_pages describes one array that has the keys and the values of a token side by side; otherwise "
            "pass the part with the keys and the part with the values, as two slices of it",
        )
    if isinstance(given, (str, bytes)) or not hasattr(given, "__iter__"):
        raise StateError(f"layer {layer} needs a pair (K, V) of arrays", cause=f"{shown(given)} was passed")
    return tuple(given)


def _row_views(layers: Mapping[int, Array], part: str, optional: bool) -> Iterator[View]:
    for layer, array in layers.items():
        label = f"layers.{layer}.{part}"
        memory = Memory.of(array)
        expect_axes(label, memory, "pages, tokens, width")
        yield _paged_view(label, memory, ("token", "width"), layer, optional)


def _paged_view(label: str, memory: Memory, axes: tuple[str, str], layer: int, optional: bool) -> View:
    """A view of pages that this rank holds completely, rows first."""
    inner = memory.shape[1:]
    return View(
        name=label,
        memory=memory,
        shape=inner,
        axes=axes,
        boxes=[((0, 0), inner)],
        order=(0, 1),
        position=0,
        layer=layer,
        optional=optional,
    )
