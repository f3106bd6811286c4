"""Describes what pools keep for each request: recurrent states, and index keys of open groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._layouts import Cut, cut_layout, whole_layout
from ._walk import STATE

if TYPE_CHECKING:
    from statelink.state import Layout

    from ._lists import Named
    from ._walk import Walk

__all__ = ["mamba", "qsa"]

NGRAM, ROPE = (1 << 32) - 1, (1 << 32) - 2
"""Ids in lists of state that stand for no layer: the n-gram history, and the ring of rotary positions."""


def mamba(walk: Walk, pool: Any, *, ids: bool) -> None:
    """Describe recurrent state from the pool that lists it.

    Args:
        walk: The walk that gets the component.
        pool: The pool that lists it.
        ids: Whether the pool publishes layer ids.
    """
    listing = walk.reader.infos(pool, STATE)
    if not listing.entries:
        return
    geometry, tensors = walk.geometry, {each.name: each for each in walk.geometry.tensors}
    dims, outers, groups = (
        walk.reader.values(listing, method)
        for method in ("get_state_dim_per_tensor", "get_state_slice_outer_counts", "get_state_conv_shard_groups")
    )
    if not dims:
        raise listing.refuse("the pool does not say which axis of each tensor is shared out")
    if ids:
        method = "get_state_layer_ids"
        known = walk.reader.values(listing, method)
        named = listing.by_id(method, known, [*tensors], geometry.stage, {NGRAM: "ngram"})
    else:
        named = listing.by_layer([(name, range(*geometry.stage)) for name in tensors])

    def layout(each: Named) -> Layout:
        number = each.entry.number
        if each.layer is None:
            if dims[number]:
                raise listing.refuse(f"{each.part!r} belongs to no layer, and yet has dim {dims[number]}")
            return whole_layout(listing, each)
        outer, blocks = outers[number] if outers else 1, groups[number] or () if groups else ()
        return cut_layout(listing, each, Cut(dims[number], outer, blocks, tensors[each.part]), geometry.tp)

    walk.add("mamba", named, layout, tp=geometry.tp)


def qsa(walk: Walk, page: int) -> None:
    """Describe raw index keys of open compression groups, and compressed index keys."""
    for type_ in ("qsa_pending", "qsa_compressed"):
        listing = walk.reader.infos(walk.pool, f"get_{type_}_state_buf_infos")
        if not listing.entries:
            continue
        method, pending = f"get_{type_}_state_layer_ids", type_ == "qsa_pending"
        known, others = walk.reader.values(listing, method), {ROPE: "rope_positions"} if pending else {}
        named = listing.by_id(method, known, ["index_k"], walk.geometry.stage, others)
        walk.whole(type_, listing, named, page=0 if pending else page)
