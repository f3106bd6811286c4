"""Describes pools of compressed attention (DeepSeek-V4).

Such a pool has one list for each buffer type. A list may name several tensors. Each tensor has one buffer for every
layer of one compression ratio. Rows have an order of their own, so items move as a whole, between pages of equal size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._lists import PAGES, has, refuse
from ._walk import STATE

if TYPE_CHECKING:
    from ._walk import Walk

__all__ = ["compressed", "expect_window_only"]

OF_PAGES = (("c4_kv", 4), ("c4_index_k", 4), ("c128_kv", 128))
OF_WINDOWS = (("swa", None), ("c4_state", 4), ("c4_index_state", 4))
SHARED = (("c1_kv", 1), ("c1_index_k", 1), ("c2_kv", 2), ("c2_index_k", 2))
"""What the list of pages also has if some layers read the rows of others. The pool says which layers have rows."""


def compressed(walk: Walk) -> None:
    """Describe a pool of compressed attention. For a draft, describe only its windows."""
    pool = walk.pool
    first, last, ratios = _stage(walk)
    sources = None if walk.draft is not None else getattr(pool, "sources_by_ratio", None)
    of_pages = (*OF_PAGES, *(SHARED if sources else ()))
    tag, page, sliding = _format(walk), walk.page(pool), walk.sliding_page()

    def layers(ratio: int | None) -> list[int]:
        if ratio is None:
            # Next-token layers after the model's have a ratio, and no window.
            return list(range(first, min(last, walk.geometry.layers)))
        if sources:
            return [int(layer) for layer in sources.get(ratio, ())]
        return [layer for layer in range(first, last) if ratios[layer - (walk.draft or 0)] == ratio]

    def describe(type_: str, method: str, tensors: tuple[tuple[str, int | None], ...], **more: Any) -> None:
        listing = walk.reader.infos(pool, method)
        if listing.entries:
            named = listing.by_layer([(part, layers(ratio)) for part, ratio in tensors])
            walk.whole(type_, listing, named, tag=tag, **more)

    strange = {layer for ratio in set(ratios) - {ratio for _, ratio in of_pages} - {0} for layer in layers(ratio)}
    if strange:
        raise refuse(
            pool, "compression_ratios", f"layers {sorted(strange)} have ratios that no tensor of the list of pages has"
        )
    describe("dsv4", PAGES, of_pages, page=page)
    describe("swa", STATE, OF_WINDOWS, page=sliding, window=walk.window())
    ratio = walk.geometry.request_ratio
    describe("c128_state", "get_request_state_buf_infos", (("state", ratio),), page=ratio, group=ratio)
    if walk.draft is not None:
        listing = walk.reader.infos(pool, "get_swa_valid_from_buf_infos")
        if listing.entries:
            walk.whole("request_row", listing, listing.by_layer([("swa_valid_from", [None])]))


def expect_window_only(target: Any, draft: Any) -> None:
    """Check a draft beside a model with compressed attention. It may only have windows, in the model's form."""
    for pool, what in ((target, "the model"), (draft, "the draft")):
        if not has(pool, "compression_ratios"):
            raise refuse(pool, "compression_ratios", f"{what} has none, where the other pool has compressed attention")
    if any(draft.compression_ratios):
        raise refuse(
            draft,
            "compression_ratios",
            f"the draft is not sliding-window only: it has ratios {sorted(set(draft.compression_ratios))}",
        )
    for name in ("page_size", "sliding_window"):
        ours, theirs = getattr(draft, name, None), getattr(target, name, None)
        if ours != theirs:
            raise refuse(draft, name, f"it is {ours} for the draft, and {theirs} for the model")
    mapping = "full_to_swa_index_mapping"
    if getattr(draft, mapping, None) is not getattr(target, mapping, None):
        raise refuse(draft, mapping, "the draft translates to the sliding pool in another way than the model")


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
        first, last = geometry.stage
        if len(ratios) < last - walk.draft:
            raise refuse(pool, "compression_ratios", f"it has {len(ratios)} for {last - walk.draft} draft layers")
        return first, last, ratios
    first, last = int(pool.start_layer), int(pool.end_layer)
    if (first, min(last, geometry.layers)) != geometry.stage:
        raise refuse(pool, "end_layer", f"the pool holds layers [{first}, {last}); the stage's are {geometry.stage}")
    if len(ratios) < max(last, geometry.layers):
        raise refuse(
            pool, "compression_ratios", f"it has {len(ratios)} for {max(last, geometry.layers)} layers of the model"
        )
    return first, last, ratios
