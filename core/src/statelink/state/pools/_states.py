"""Describes what pools keep for each request: recurrent states, and index keys of open groups."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._lists import NGRAM, ROPE, Named, band, by_id, by_layer, refuse
from ._views import State, own_view, state_view, whole_views

if TYPE_CHECKING:
    from statelink.state._build import View

    from ._lists import Entry
    from ._walk import Walk

__all__ = ["mamba", "qsa"]

LIST = "get_state_buf_infos"


def mamba(walk: Walk, pool: Any, *, ids: bool) -> None:
    """Describe recurrent state from the pool that lists it.

    Args:
        walk: The walk that gets the component.
        pool: The pool that lists it.
        ids: Whether the pool may publish layer ids.
    """
    walk.types.add("mamba")
    entries = walk.infos(pool, LIST, "mamba")
    geometry, listed = walk.geometry, walk.pool_list(pool, LIST)
    if not entries:
        return
    if walk.enveloped("mamba"):
        walk.add("mamba", walk.envelope(pool, LIST, entries, geometry.states), tp=geometry.states)
        return
    dims, outers, groups = (
        walk.reader.values(pool, method, entries, LIST)
        for method in ("get_state_dim_per_tensor", "get_state_slice_outer_counts", "get_state_conv_shard_groups")
    )
    known = walk.reader.values(pool, "get_state_layer_ids", entries, LIST) if ids else []
    tensors = {each.name: each for each in geometry.state_tensors}
    views: list[View] = []
    for each in _states(walk, pool, entries, [operator.index(layer) for layer in known]):
        number = each.entry.number
        dim = operator.index(dims[number] or 0) if dims else 0
        if each.layer is None:
            if dim:
                raise refuse(pool, LIST, f"{each.part!r} belongs to no layer, and yet has dim {dim}")
            views += whole_views(listed, each)
            continue
        if not dims:
            # It is unknown which part of the state a slot is, so only the same rank of equal width fits.
            views.append(own_view(listed, each, geometry.states, tensors[each.part].dtype))
            continue
        outer = operator.index(outers[number]) if outers else 1
        blocks = tuple(operator.index(width) for width in groups[number] or ()) if groups else ()
        views.append(state_view(listed, each, State(dim, outer, blocks, tensors[each.part])))
    walk.add("mamba", views, tp=geometry.states)


def qsa(walk: Walk, page: int) -> None:
    """Describe raw index keys of open compression groups, and compressed index keys."""
    pool = walk.pool
    for type_ in ("qsa_pending", "qsa_compressed"):
        method, ids = f"get_{type_}_state_buf_infos", f"get_{type_}_state_layer_ids"
        entries = walk.infos(pool, method, type_)
        if not entries:
            continue
        known = [operator.index(each) for each in walk.reader.values(pool, ids, entries, method)]
        pending = type_ == "qsa_pending"
        named = _by_id(walk, pool, ids, entries, known, {ROPE: "rope_positions"} if pending else {}, ("index_k",))
        listed = walk.pool_list(pool, method)
        views = [view for each in named for view in whole_views(listed, each)]
        walk.add(type_, views, page=0 if pending else page)


def _states(walk: Walk, pool: Any, entries: Sequence[Entry], ids: list[int]) -> list[Named]:
    tensors = walk.geometry.state_tensors
    if not ids:
        layers = walk.layers(pool, LIST, "linear", every=True)
        parts = [(each.name, [i for i in layers if each.layers is None or i in each.layers]) for each in tensors]
        hint = "give PoolGeometry.kinds and PoolGeometry.state_tensors"
        return by_layer(pool, LIST, entries, parts, hint)
    names = {
        layer: [each.name for each in tensors if each.layers is None or layer in each.layers] for layer in set(ids)
    }
    return _by_id(walk, pool, "get_state_layer_ids", entries, ids, {NGRAM: "ngram"}, names)


def _by_id(
    walk: Walk,
    pool: Any,
    method: str,
    entries: Sequence[Entry],
    ids: list[int],
    others: dict[int, str],
    parts: Mapping[int, Sequence[str]] | Sequence[str],
) -> list[Named]:
    """Name entries by layer, except those that belong to the whole request."""
    pairs = list(zip(ids, entries, strict=False))
    inner = [(layer, entry) for layer, entry in pairs if layer not in others]
    if not inner:
        raise refuse(
            pool,
            method,
            f"{len(entries)} buffers have no layer's id",
            "a stage without such layers lists nothing, not even what belongs to the whole request",
        )
    layers = [layer for layer, _ in inner]
    layers = layers if walk.draft is None else band(layers, walk.draft)
    named = by_id(pool, method, [entry for _, entry in inner], layers, parts, walk.geometry.span)
    rest = [(others[layer], entry) for layer, entry in pairs if layer in others]
    if len({name for name, _ in rest}) != len(rest):
        raise refuse(pool, method, "two buffers of one request-wide id")
    return named + [Named(None, name, entry) for name, entry in rest]
