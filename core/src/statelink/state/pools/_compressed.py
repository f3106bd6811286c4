"""Describes pools of compressed attention (DeepSeek-V4).

Such a pool has one list for each buffer type. A list may name several tensors. Each tensor has one buffer for every
layer of one compression ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._lists import Named, by_layer, has, refuse
from ._views import whole_views

if TYPE_CHECKING:
    from ._walk import Walk

__all__ = ["compressed"]

STATE_LIST, RING_LIST = "get_state_buf_infos", "get_unified_swa_ring_buf_infos"
C128_LIST = "get_c128_kv_buf_infos"
GROUPS: dict[str, tuple[tuple[str, int | None], ...]] = {
    "dsv4": (("c4_kv", 4), ("c4_index_k", 4), ("c128_kv", 128)),
    "swa": (("swa", None), ("c4_state", 4), ("c4_index_state", 4)),
    "swa_ring": (("swa", None),),
    "dsv4_c128": (("c128_kv", 128),),
    "dsv4_c4_state": (("c4_state", 4), ("c4_index_state", 4)),
}

SHARED: tuple[tuple[str, int | None], ...] = (("c1_kv", 1), ("c1_index_k", 1), ("c2_kv", 2), ("c2_index_k", 2))
"""What the list of pages also has if some layers read the rows of others. The pool says which layers have rows."""


def compressed(walk: Walk) -> None:
    """Describe a pool of compressed attention. For a draft, describe only its windows."""
    pool = walk.pool
    first, last, ratios = _stage(walk)
    sources = None if walk.draft is not None else getattr(pool, "sources_by_ratio", None)
    groups = {
        **GROUPS,
        "dsv4": (*GROUPS["dsv4"], *(SHARED if sources else ())),
        "c128_state": (("state", walk.geometry.request_ratio),),
        **walk.geometry.groups,
    }
    tag = _format(walk)

    def layers(ratio: int | None) -> list[int]:
        if ratio is None:
            # Next-token layers after the model's have a ratio, and no window.
            return list(range(first, min(last, walk.geometry.layers)))
        if sources:
            return [int(layer) for layer in sources.get(ratio, ())]
        return [layer for layer in range(first, last) if ratios[layer - (walk.draft or 0)] == ratio]

    def describe(type_: str, method: str, rows: Callable[[int | None], int], **more: Any) -> None:
        entries = walk.infos(pool, method, type_)
        if not entries:
            return
        hint = f"where the list has other tensors, name them in PoolGeometry.groups[{type_!r}]"
        tensors = groups[type_]
        named = by_layer(pool, method, entries, [(part, layers(ratio)) for part, ratio in tensors], hint)
        ratio_of, listed = dict(tensors), walk.pool_list(pool, method)
        views = [
            view for each in named for view in whole_views(listed, each, rows=rows(ratio_of[each.part]), axis="row")
        ]
        walk.add(type_, views, tag=tag, **more)

    known = {ratio for type_ in ("dsv4", "dsv4_c128") for _, ratio in groups[type_] if ratio}
    strange = {layer for ratio in set(ratios) - known - {0} for layer in layers(ratio)}
    if strange:
        raise refuse(
            pool,
            "compression_ratios",
            f"layers {sorted(strange)} have ratios that no tensor of the list of pages has",
            "name their tensors in PoolGeometry.groups['dsv4']",
        )
    page = walk.page(pool)
    describe("dsv4", "get_contiguous_buf_infos", lambda r: page // (r or 1), page=page, partition=True)
    sliding = walk.sliding_page()
    describe("swa", STATE_LIST, lambda r: 0 if r else sliding, page=sliding, window=_window(walk, STATE_LIST))
    _check_ring(walk)
    describe("swa_ring", RING_LIST, lambda r: 0, page=1, window=_window(walk, RING_LIST))
    ratio = walk.geometry.request_ratio
    describe("c128_state", "get_request_state_buf_infos", lambda r: 0, page=ratio, group=ratio)
    c128 = walk.geometry.c128_rows
    if walk.reader.infos(pool, C128_LIST, keep=False) and not c128:
        raise refuse(pool, C128_LIST, "nobody says how many rows its pages have", "give PoolGeometry.c128_rows")
    describe("dsv4_c128", C128_LIST, lambda r: c128, page=128 * c128, group=128)
    describe("dsv4_c4_state", "get_c4_state_buf_infos", lambda r: 0, page=1, group=4, keep=4)
    if walk.draft is not None:
        method = "get_swa_valid_from_buf_infos"
        rows = [Named(None, "swa_valid_from", entry) for entry in walk.infos(pool, method, "request_row")]
        if len(rows) > 1:
            raise refuse(pool, method, f"it lists {len(rows)} buffers; one is known")
        walk.add("request_row", [view for row in rows for view in whole_views(walk.pool_list(pool, method), row)])


def _format(walk: Walk) -> str:
    """What two pools must have alike besides the sizes of their items."""
    layout = getattr(walk.pool, "pd_kv_layout", None)
    layout = layout() if callable(layout) else layout
    words = [f"pd_kv_layout={layout}"] if layout else []
    inner = getattr(getattr(walk.pool, "swa_kv_pool", None), "page_size", None)
    if inner and inner != walk.sliding_page():
        # Several small pages have the size of one large page, and other bytes inside.
        words.append(f"windows in pages of {inner}")
    return "; ".join(words)


def _stage(walk: Walk) -> tuple[int, int, list[int]]:
    """The layers of this pipeline stage as ``(first, last)``, and the compression ratio of every layer of the model.

    ``last`` is excluded. The stage's layers include next-token layers.
    """
    pool, geometry = walk.pool, walk.geometry
    ratios = [int(ratio) for ratio in pool.compression_ratios]
    if walk.draft is not None:
        first, last = geometry.span
        if len(ratios) < last - walk.draft:
            raise refuse(pool, "compression_ratios", f"it has {len(ratios)} for {last - walk.draft} draft layers")
        return first, last, ratios
    for name in ("start_layer", "end_layer"):
        if not has(pool, name):
            raise refuse(pool, name, "lists by compression ratio need to know the stage's first and last layer")
    first, last = int(pool.start_layer), int(pool.end_layer)
    if first != geometry.span[0] or min(last, geometry.layers) != geometry.span[1]:
        raise refuse(pool, "end_layer", f"the pool holds layers [{first}, {last}); the geometry says {geometry.span}")
    if len(ratios) < last or len(ratios) < geometry.layers:
        raise refuse(
            pool, "compression_ratios", f"it has {len(ratios)} for {max(last, geometry.layers)} layers of the model"
        )
    return first, last, ratios


def _window(walk: Walk, method: str) -> int | None:
    """The window, if the list of this method has buffers; else ``None``."""
    return walk.window() if walk.reader.infos(walk.pool, method, keep=False) else None


def _check_ring(walk: Walk) -> None:
    ring = getattr(walk.pool, "unified_swa_ring_size", None)
    for entry in walk.reader.infos(walk.pool, RING_LIST, keep=False):
        if not ring or entry.items % ring:
            raise refuse(
                walk.pool, RING_LIST, f"entry {entry.number} has {entry.items} rows: no whole number of rings of {ring}"
            )
