"""A constructor for pages in which the key and the value of a token and head are side by side.

Every array may be a torch tensor, a numpy array or a `Memory`. Nothing is copied. The arrays must outlive every link
that was opened with the description.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from statelink.errors import StateError

from ._build import Described, View, component
from ._memory import Memory
from ._shares import attention_type, expect_axes, share
from ._signature import checked

if TYPE_CHECKING:
    from ._inventory import Partition

__all__ = ["fused_pages"]

Array = Any


@checked
def fused_pages(
    layers: Mapping[int, Array],
    *,
    heads: int,
    tp: tuple[int, int] = (0, 1),
    keys: int = 0,
    halves: bool = False,
    opaque: bool = False,
    window: int | None = None,
    attention_chunk: int | None = None,
    name: str = "",
    type: str = "",
    partition: Partition | None = None,
    replicated: bool = False,
    optional: bool = False,
    format: str = "",
) -> Described:
    """Pages of attention whose content is the key and then the value of one token and one head.

    The array's axes are always in one order. Its strides say how it lies in memory: with tokens or heads first, or
    with the pages of all layers in one block. Components may share an allocation, and even the same bytes of it, if a
    page id belongs to one of them at a time.

    Args:
        layers: Global layer number to its array ``[pages, heads, tokens, content]``.
        heads: Number of KV heads of the whole model, before any replication.
        tp: This rank and the width of attention TP. If there are more ranks than heads, consecutive ranks hold the
            same head.
        keys: How many elements of ``content`` are the key. Keys and values are then buffers of their own, named as
            those of `kv_pages`, so that the other side may have them in separate arrays. With 0, they are one buffer.
        halves: Whether a page has the keys of all tokens of a head, and then their values. Tokens must be next to each
            other in memory, with their content. Needs ``keys``.
        opaque: Whether only the backend of attention knows how a page holds the tokens of a head. The bytes of a head
            in a page then move as a whole, and both sides need pages of one size. Tokens must be next to each other
            in memory, with their content.
        window: Tokens that sliding-window layers look back; else ``None``.
        attention_chunk: Tokens of an attention chunk of layers with chunked local attention, as for `kv_pages`;
            else ``None``.
        name: Component name; by default that of the type.
        type: State type; by default ``swa`` with a window, ``chunked_local`` with attention chunks, else ``kv``.
        partition: Which positions this rank holds.
        replicated: Whether other ranks hold the same share, too: context-parallel ones, or all where ``tp`` is (0, 1).
        optional: Whether the other side may lack these layers (draft layers).
        format: Tag for properties that strides do not express, such as the name of the backend of attention that packs
            ``content``. It is compared verbatim.

    Raises:
        StateError: The arrays do not hold this rank's share, ``keys`` is not less than the content, the tokens of a
            head are not next to each other where they have to be, or layers have both windows and attention chunks.
    """
    if (opaque and keys) or (halves and not keys):
        raise StateError(
            "pages have either a known number of elements of the key, or are opaque",
            cause=f"keys is {keys}, halves {halves}, opaque {opaque}",
        )
    kind = attention_type(window, attention_chunk, type)
    label = name or kind
    views, pages = [], set()
    for layer, array in layers.items():
        memory = Memory.of(array)
        expect_axes(f"layers.{layer}.kv", memory, "pages, heads, tokens, content")
        pages.add(memory.shape[2])
        if opaque:
            views.append(_by_head(f"layers.{layer}.kv", layer, memory, heads, tp, optional))
            continue
        parts = _parts(f"layers.{layer}", memory, keys, halves) if keys else {"kv": memory}
        for part, each in parts.items():
            axis = "dim" if keys else "kv"
            views.append(_by_token(f"layers.{layer}.{part}", layer, each, heads, tp, optional, axis))
    if len(pages) != 1:
        found = ", ".join(map(str, sorted(pages)))
        raise StateError(
            f"the arrays of component {label!r} need one number of tokens a page", cause=f"they have {found or 'none'}"
        )
    return component(
        label,
        kind,
        views,
        page=pages.pop(),
        window=window,
        group=1 if attention_chunk is None else attention_chunk,
        partition=partition,
        format=format,
        tp=tp,
        replicated=replicated,
    )


def _parts(label: str, memory: Memory, keys: int, halves: bool) -> dict[str, Memory]:
    """The keys and the values of pages, each as ``[pages, heads, tokens, dim]``."""
    *outer, tokens, content = memory.shape
    if not 0 < keys < content:
        raise StateError(
            f"the content of {label!r} is no key and a value",
            cause=f"{keys} elements of {content} are said to be the key",
        )
    parts, before = {}, 0
    if halves:
        _expect_dense(label, memory, "pages with all keys before all values need")
    for part, width in (("k", keys), ("v", content - keys)):
        step = memory.itemsize * width if halves else memory.strides[2]
        parts[part] = msgspec.structs.replace(
            memory,
            address=memory.address + before if memory.shape[0] else memory.address,
            shape=(*outer, tokens, width),
            strides=(*memory.strides[:2], step, memory.strides[3]),
        )
        before += width * (memory.itemsize * tokens if halves else memory.strides[3])
    return parts


def _expect_dense(label: str, memory: Memory, who: str) -> None:
    """Check that the tokens of a head follow one another in memory, each with its content."""
    dense = (memory.itemsize * memory.shape[3], memory.itemsize)
    if any(n > 1 and a != b for n, a, b in zip(memory.shape[2:], memory.strides[2:], dense, strict=True)):
        raise StateError(
            f"the tokens of a head of {label!r} are not next to each other in a page",
            cause=f"strides {memory.strides} bytes; {who} {dense} on the last two axes",
            hint="lay pages out with heads before tokens; or describe them by token, if their content is known",
        )


def _by_token(
    label: str, layer: int, memory: Memory, heads: int, tp: tuple[int, int], optional: bool, axis: str
) -> View:
    first, last = share(label, "head", heads, tp)
    _, _, tokens, width = memory.shape
    return View(
        name=label,
        memory=memory,
        shape=(tokens, heads, width),
        axes=("token", "head", axis),
        boxes=[((0, first, 0), (tokens, last, width))],
        order=(1, 0, 2),
        position=0,
        layer=layer,
        optional=optional,
    )


def _by_head(label: str, layer: int, memory: Memory, heads: int, tp: tuple[int, int], optional: bool) -> View:
    first, last = share(label, "head", heads, tp)
    pages, here, tokens, width = memory.shape
    _expect_dense(label, memory, "opaque pages need")
    cells = msgspec.structs.replace(
        memory, shape=(pages, here, tokens * width), strides=(*memory.strides[:2], memory.itemsize)
    )
    return View(
        name=label,
        memory=cells,
        shape=(heads, tokens * width),
        axes=("head", "cell"),
        boxes=[((first, 0), (last, tokens * width))],
        order=(0, 1),
        layer=layer,
        optional=optional,
    )
