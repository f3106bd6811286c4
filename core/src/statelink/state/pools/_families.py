"""The kinds of pools: how each is recognised, and what its lists contain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._compressed import compressed
from ._lists import PAGES, by_layer, has, refuse
from ._states import mamba, qsa
from ._views import whole_views
from ._walk import STATE

if TYPE_CHECKING:
    from ._walk import Walk

__all__ = ["describe_pool", "family"]

CONTIGUOUS, SPARSE = PAGES


def family(pool: Any) -> str:
    """The kind of a pool. The first test that fits counts, because later tests also fit earlier kinds."""
    if any(has(pool, name) for name in ("index_kv_pool", "index_k_pool", SPARSE)):
        return "minimax"
    if has(pool, "compression_ratios") or (has(pool, "swa_kv_pool") and has(pool, "translate_loc_from_full_to_swa")):
        return "swa"
    if has(pool, "full_kv_pool") and has(pool, "mamba_pool"):
        return "hybrid"
    if has(pool, STATE) and any(
        has(pool, name) for name in ("kpool_use_compress", "index_kpool", "get_compress_tail_buf_infos")
    ):
        return "dsa"
    # A pool of an unknown kind that lists state is refused at the end, because no component reads that list.
    return "plain"


def describe_pool(walk: Walk) -> None:
    """Describe everything in the pool of a walk."""
    if not any(has(walk.pool, name) for name in PAGES):
        raise refuse(walk.pool, CONTIGUOUS, "it does not have it: this is no pool of pages")
    {"minimax": _minimax, "swa": _sliding, "hybrid": _hybrid, "dsa": _dsa, "plain": _plain}[family(walk.pool)](walk)


def _plain(walk: Walk) -> None:
    pool, page = walk.pool, walk.page(walk.pool)
    walk.starts_at(walk.geometry.span[0])
    walk.attention("kv", CONTIGUOUS, "full", pool, heads=walk.geometry.kv_heads, page=page, every=True)
    if walk.draft is not None:
        qsa(walk, page)
    elif walk.geometry.kv_heads:
        walk.scales("block_scale", pool, "full", page, None, every=True)


def _minimax(walk: Walk) -> None:
    pool, page = walk.pool, walk.page(walk.pool)
    if has(pool, "index_kv_pool"):
        raise refuse(pool, "index_kv_pool", "an index with values beside its keys is not known")
    walk.starts_at(walk.geometry.span[0])
    heads = walk.geometry.kv_heads
    walk.attention("kv", SPARSE, "sparse", pool, heads=heads, page=page, ids=True)
    if has(pool, "index_k_pool"):
        method = "get_index_k_state_buf_infos"
        holder = pool if has(pool, method) else pool.index_k_pool
        if not has(holder, method):
            raise refuse(holder, method, "it has no list of index keys, though the pool around it has them")
        _index(walk, "minimax_index_k", holder, method, walk.full_layers, page, page)
    walk.attention("minimax_dense_kv", "get_dense_kv_state_buf_infos", "dense", pool, heads=heads, page=page)


def _sliding(walk: Walk) -> None:
    pool, geometry = walk.pool, walk.geometry
    if has(pool, "compression_ratios"):
        compressed(walk)
        return
    walk.starts_at(geometry.span[0], walk.full_before())
    page, window, inner = walk.page(pool), walk.window(), walk.sliding_page()
    full = getattr(pool, "full_kv_pool", None)
    walk.attention("kv", CONTIGUOUS, "full", full, heads=geometry.kv_heads, page=page, ids=True)
    heads = geometry.window_heads
    walk.attention("swa", STATE, "window", pool.swa_kv_pool, heads=heads, page=inner, window=window)
    if full is not None:
        walk.scales("block_scale", full, "full", page, None, every=False)
    walk.scales("block_scale_swa", pool.swa_kv_pool, "window", inner, window, every=False)


def _hybrid(walk: Walk) -> None:
    pool, geometry = walk.pool, walk.geometry
    page, full = walk.page(pool), pool.full_kv_pool
    if geometry.kinds:
        walk.starts_at(walk.full_before())
    walk.attention("kv", CONTIGUOUS, "full", full, heads=geometry.kv_heads, page=page, ids=True)
    if walk.draft is None:
        mamba(walk, pool, ids=True)
    if getattr(pool, "use_dsa", False) or family(full) == "dsa":
        if not has(full, STATE):
            raise refuse(full, STATE, "it has no list of index keys, though the pool around it uses them")
        _index_and_tail(walk, full, page)
    qsa(walk, page)


def _dsa(walk: Walk) -> None:
    _plain(walk)
    _index_and_tail(walk, walk.pool, walk.page(walk.pool))


def _index_and_tail(walk: Walk, pool: Any, page: int) -> None:
    group = int(getattr(pool, "index_kpool", 0) or 1)
    pooled = bool(getattr(pool, "kpool_use_compress", False))
    if any(name == "index_k" for name, _ in walk.geometry.groups.get("kv", ())):
        # The list of pages has the index keys. They may be listed here again.
        if not walk.reader.holds(walk.reader.infos(pool, STATE, keep=False)):
            raise refuse(pool, STATE, "it lists index keys that the list of pages does not have")
    else:
        _index(walk, "dsa", pool, STATE, walk.full_layers, page, page // group if pooled else page)
    tail = "get_compress_tail_buf_infos"
    if not pooled:
        return
    entries = walk.infos(pool, tail, "dsa_tail")
    ring = group + int(getattr(pool, "tail_extra_slots", 0) or 0)
    for number, entry in enumerate(entries):
        if entry.nbytes % ring:
            raise refuse(pool, tail, f"item of entry {number}: {entry.nbytes} bytes are no {ring} slots of a ring")
    # An item of the list is a request's ring, and the plan addresses its rows.
    rows = [
        each._replace(stride=each.stride // ring, nbytes=each.nbytes // ring, items=each.items * ring)
        for each in entries
    ]
    layers = walk.full_layers or []
    named = by_layer(pool, tail, rows, [("key", layers), ("score", layers)]) if rows else []
    views = [view for each in named for view in whole_views(walk.pool_list(pool, tail), each)]
    walk.add("dsa_tail", views, page=1, group=group)


def _index(walk: Walk, type_: str, pool: Any, method: str, layers: list[int] | None, page: int, rows: int) -> None:
    """Describe index keys: one buffer for each layer, without items if the layer shares another layer's."""
    entries = walk.infos(pool, method, type_)
    named = by_layer(pool, method, entries, [("index_k", layers or [])]) if entries else []
    listed, axis = walk.pool_list(pool, method), "token" if rows == page else "row"
    views = [view for each in named for view in whole_views(listed, each, rows=rows, axis=axis)]
    walk.add(type_, views, page=page, partition=True)
