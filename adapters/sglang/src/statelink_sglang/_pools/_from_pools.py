"""The kinds of SGLang's pools: how each is recognised, and what its lists contain."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ._compressed import compressed, expect_window_only
from ._geometry import Element
from ._layouts import row_layout
from ._lists import PAGES, Reader, has, refuse
from ._states import mamba, qsa
from ._walk import STATE, Walk

if TYPE_CHECKING:
    from statelink.state import Described

    from ._geometry import Geometry

__all__ = ["from_pools"]

SPARSE, DENSE = "get_sparse_kv_buf_infos", "get_dense_kv_state_buf_infos"


def from_pools(pages: Any, requests: Any, draft: Any, geometry: Geometry) -> list[Described]:
    """Describe what the pools of a scheduler hold.

    Pools are recognised by their methods, in the order in which SGLang's queues ask. Only addresses, lengths and item
    sizes are read. Nothing is imported, copied or kept. Components come in this order: pages of full attention, the
    other state of the model, the draft's (named ``draft.*``), recurrent state that only the pool of requests knows of.

    Args:
        pages: The pool of the model's pages.
        requests: The pool of request slots, or ``None``. It is asked for recurrent state if ``pages`` has none.
        draft: The pool of a draft model's pages, or ``None``. The other side may lack the draft.
        geometry: The whole model's numbers, and this rank's shares.

    Raises:
        StateError: Something in a pool cannot be described. The error names the pool's class and the method.
    """
    reader = Reader(geometry.kind)
    walk = Walk(pages, geometry, reader)
    _describe(walk)
    found, pools = walk.found, walk.pools()
    if draft is not None:
        of_draft = _draft(walk, draft)
        found += of_draft.found
        pools += of_draft.pools()
    if requests is not None:
        found += _of_requests(walk, requests)
        pools.append(requests)
    reader.nothing_left(pools)
    return found


def _kind(pool: Any) -> str:
    """The kind of a pool. The first test that fits counts, because later tests also fit earlier kinds."""
    if any(has(pool, name) for name in ("index_kv_pool", "index_k_pool", SPARSE)):
        return "sparse"
    if has(pool, "compression_ratios"):
        return "compressed"
    if has(pool, "swa_kv_pool") and has(pool, "translate_loc_from_full_to_swa"):
        return "sliding"
    if has(pool, "full_kv_pool") and has(pool, "mamba_pool"):
        return "hybrid"
    # A pool of an unknown kind that lists other state is refused at the end, because no component has that list.
    return "plain"


def _describe(walk: Walk) -> None:
    """Describe everything in the pool of a walk."""
    if not has(walk.pool, PAGES):
        raise refuse(walk.pool, PAGES, "it does not have it: this is no pool of pages")
    {"sparse": _sparse, "compressed": compressed, "sliding": _sliding, "hybrid": _hybrid, "plain": _plain}[
        _kind(walk.pool)
    ](walk)


def _plain(walk: Walk) -> None:
    pool, page, heads = walk.pool, walk.page(walk.pool), walk.geometry.kv_heads
    walk.starts_at(walk.geometry.stage[0])
    walk.attention("kv", PAGES, range(*walk.geometry.stage), pool, heads=heads, page=page)
    if heads and walk.draft is None:
        walk.scales("block_scale", pool, walk.full_layers, page=page)
    if has(pool, "get_compress_tail_buf_infos"):
        _index(walk, pool, page)


def _sparse(walk: Walk) -> None:
    """Describe MiniMax's pool: pages of the sparse layers, their index keys, and pages of the dense layers."""
    pool, heads, page = walk.pool, walk.geometry.kv_heads, walk.page(walk.pool)
    said = getattr(pool, "sparse_layer_id_mapping", None)
    if said is None:
        raise refuse(pool, SPARSE, "the pool does not say which layers of the model are sparse")
    walk.starts_at(walk.geometry.stage[0])
    sparse = sorted(said)
    dense = [layer for layer in range(*walk.geometry.stage) if layer not in said]
    walk.attention("kv", SPARSE, sparse, pool.main_pool, heads=heads, page=page)
    listing = walk.reader.infos(pool, "get_index_k_state_buf_infos")
    if listing.entries:
        element = Element.of(pool.index_k_pool.dtype)
        layout = partial(row_layout, listing, page=page, element=element)
        walk.add("minimax_index_k", listing.by_layer([("index_k", sparse)]), layout, page=page)
    walk.attention("minimax_dense_kv", DENSE, dense, pool.main_pool, heads=heads, page=page)


def _sliding(walk: Walk) -> None:
    pool, geometry = walk.pool, walk.geometry
    if not geometry.windowed:
        raise refuse(pool, "layers_mapping", "it does not say which layers have a window")
    first, last = geometry.stage
    windowed = [layer for layer in range(first, last) if geometry.windowed[layer]]
    full = [layer for layer in range(first, last) if not geometry.windowed[layer]]
    walk.starts_at(first, geometry.windowed[:first].count(False))
    heads, page = geometry.kv_heads, walk.page(pool)
    walk.attention("kv", PAGES, full, pool.full_kv_pool, heads=heads, page=page)
    walk.scales("block_scale", pool.full_kv_pool, full, page=page)
    heads, page, window = geometry.window_heads, walk.sliding_page(), walk.window()
    walk.attention("swa", STATE, windowed, pool.swa_kv_pool, heads=heads, page=page, window=window)
    walk.scales("block_scale_swa", pool.swa_kv_pool, windowed, page=page, window=window)


def _hybrid(walk: Walk) -> None:
    pool, page = walk.pool, walk.page(walk.pool)
    full = pool.full_kv_pool
    walk.attention("kv", PAGES, [], full, heads=walk.geometry.kv_heads, page=page, ids=True)
    mamba(walk, pool, ids=True)
    if getattr(pool, "use_dsa", False):
        _index(walk, full, page)
    qsa(walk, page)


def _index(walk: Walk, pool: Any, page: int) -> None:
    """Describe index keys: one buffer for each layer, without items if the layer shares another layer's.

    If a key stands for several tokens, each request also has rings for those that do not fill a group yet.
    """
    listing = walk.reader.infos(pool, STATE)
    if listing.entries:
        walk.whole("dsa", listing, listing.by_layer([("index_k", walk.full_layers)]), page=page)
    listing = walk.reader.infos(pool, "get_compress_tail_buf_infos")
    if listing.entries:
        group = pool.index_kpool
        rows = listing.in_rows(group + pool.tail_extra_slots)
        parts = [(part, walk.full_layers) for part in ("key", "score")]
        walk.whole("dsa_tail", rows, rows.by_layer(parts), page=1, group=group)


def _draft(target: Walk, pool: Any) -> Walk:
    """Describe a draft's pool. Its layers get the numbers after the model's."""
    total, layers = target.geometry.layers, getattr(pool, "layer_num", None)
    kinds = {_kind(target.pool), _kind(pool)}
    if "compressed" in kinds:
        expect_window_only(target.pool, pool)
    elif _kind(pool) != "plain":
        raise refuse(pool, PAGES, f"a draft of the kind {_kind(pool)!r} is not known")
    if not layers:
        raise refuse(pool, "layer_num", "the number of draft layers is not known")
    geometry = target.geometry._replace(layers=total + layers, stage=(total, total + layers), windowed=())
    draft = Walk(pool, geometry, target.reader, draft=total)
    _describe(draft)
    return draft


def _of_requests(target: Walk, pool: Any) -> list[Described]:
    """Describe recurrent state that only the pool of requests lists. There is never a second component of it."""
    if _kind(target.pool) != "hybrid":
        extra = Walk(target.pool, target.geometry, target.reader)
        mamba(extra, pool, ids=False)
        return extra.found
    if not target.reader.holds(target.reader.infos(pool, STATE, keep=False).entries):
        raise refuse(pool, STATE, f"it lists recurrent state that {type(target.pool).__name__} does not have")
    return []
