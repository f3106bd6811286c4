"""Which kind of pool is which, and which layers its lists are of."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from statelink import state

from .fakes import (
    HybridPool,
    IndexedPool,
    KeysPool,
    SlidingPool,
    SparsePool,
    States,
    keys_pool,
    latents_pool,
    noise,
    some_states,
    without_scales,
)
from .reading import HEADS, PAGES, TOKENS, agrees, cut, geometry, keys, kinds, names, refused, whole


def test_a_hybrid_pool_around_index_keys() -> None:
    full = IndexedPool([noise(PAGES, TOKENS, 2) for _ in range(2)], [noise(PAGES, TOKENS, 3), noise(0, TOKENS, 3)])
    found = state.from_pools(HybridPool(full, [1, 3], some_states([0, 2])), geometry=geometry(4))
    assert kinds(found) == [("kv", "kv"), ("mamba", "mamba"), ("dsa", "dsa")]
    assert names(found[2]) == ["layers.1.index_k", "layers.3.index_k"]
    whole(found[2], "layers.1.index_k", full.index[0])


def test_sliding_windows_have_pages_of_their_own() -> None:
    full_k, full_v, k, v = keys(1), keys(1), keys(2, heads=2), keys(2, heads=2)
    layout = "hnd"
    held = slice(1, 2)
    inner = KeysPool(cut(k, held, layout), cut(v, held, layout), 0, layout)
    pool = SlidingPool(KeysPool(cut(full_k, slice(2, 4)), cut(full_v, slice(2, 4))), inner, 7)
    pool.full_kv_pool.scales = [noise(PAGES, 2), noise(PAGES, 2)]
    inner.scales = [noise(PAGES, 2) for _ in range(4)]
    given = geometry(
        6, kv_heads=HEADS, window_kv_heads=2, tp=(1, 2), stage=(3, 6), kinds=["window", "window", "full"] * 2
    )
    found = state.from_pools(pool, geometry=given)
    assert [name for name, _ in kinds(found)] == ["kv", "swa", "block_scale", "block_scale_swa"]
    assert names(found[0]) == ["layers.5.k", "layers.5.v"]
    assert names(found[1]) == ["layers.3.k", "layers.4.k", "layers.3.v", "layers.4.v"]
    assert (found[1].component.window, found[1].component.page) == (7, TOKENS)
    assert {h for _, _, h, _ in agrees(found[1], "layers.4.v", v[1])} == {1}
    agrees(found[0], "layers.5.k", full_k[0])
    own = inner.scales[2].view(np.uint8)[:, None]
    agrees(found[3], "layers.3.v_scale", np.concatenate([own, own], axis=1))


def test_a_sliding_pool_asks_pools_for_scales_that_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SlidingPool(without_scales(keys_pool(1, HEADS)), without_scales(keys_pool(1, HEADS)), 7)
    given = geometry(2, kv_heads=HEADS, window_kv_heads=HEADS, kinds=["window", "full"])
    assert [name for name, _ in kinds(state.from_pools(pool, geometry=given))] == ["kv", "swa"]
    # Any other missing attribute is a defect of the pool, and so is a list of pages that is missing.
    for missing in ("k_scale_buffer", "get_contiguous_buf_infos"):
        monkeypatch.setattr(pool, "get_swa_kv_scale_buf_infos", lambda missing=missing: getattr(object(), missing))
        refused(rf"SlidingPool.get_swa_kv_scale_buf_infos: it raised AttributeError.*{missing}", pool, given)


@pytest.mark.parametrize("dense", [True, False])
def test_sparse_layers_beside_dense_ones(dense: bool) -> None:
    sparse, k, v = KeysPool(keys(2), keys(2)), keys(1), keys(1)
    index = [noise(PAGES, 6), noise(PAGES, 6)]
    pool = SparsePool(sparse, KeysPool(k, v) if dense else None, index)
    given = geometry(3 if dense else 2, kv_heads=HEADS, kinds=["dense"] * dense + ["sparse", "sparse"])
    found = state.from_pools(pool, geometry=given)
    assert [name for name, _ in kinds(found)] == ["kv", "minimax_index_k", "minimax_dense_kv"][: 2 + dense]
    first = int(dense)
    agrees(found[0], f"layers.{first}.v", sparse.v[0])
    whole(found[1], f"layers.{first + 1}.index_k", index[1])
    if dense:
        agrees(found[2], "layers.0.v", v[0])


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (
            [7, 11, 7, 11, 36, 36],
            [3, 7, 11, 3, 7, 11, 36, 36],
            [(0, 1), (1, 2), (2, 4), (3, 5), (4, 6), (5, 7)],
        ),
        (
            [4, 5, 6, 4, 5, 6],
            [0, 1, 2, 4, 5, 6] * 2,
            [(0, 3), (1, 4), (2, 5), (3, 9), (4, 10), (5, 11)],
        ),
    ],
)
def test_published_layer_ids_pair_entries(
    source: list[int], target: list[int], expected: list[tuple[int, int]]
) -> None:
    """§1.3: each source entry's place in the other list, keys and values apart."""
    listed = []
    for ids in (source, target):
        half = len(ids) // 2
        pool = HybridPool(KeysPool(keys(half), keys(half)), ids, States([], []))
        (found,) = state.from_pools(pool, geometry=geometry(37, kv_heads=HEADS))
        listed.append(names(found))
    assert [(number, listed[1].index(name)) for number, name in enumerate(listed[0])] == expected


def test_a_pool_without_pages() -> None:
    """The allocator, say, where the pool was meant: described as nothing, it would move nothing without a word."""
    refused(
        "cannot describe SimpleNamespace.get_contiguous_buf_infos: it does not have it", SimpleNamespace(), geometry(1)
    )
    refused("layer_num", latents_pool(1), geometry(1), draft_pool=SimpleNamespace())
    refused("no pool of pages", latents_pool(1), geometry(1), draft_pool=SimpleNamespace(layer_num=1))


def test_layers_that_nobody_names() -> None:
    pool = SlidingPool(keys_pool(1), keys_pool(1), 8)
    refused("SlidingPool.get_contiguous_buf_infos: it holds only the full layers", pool, geometry(2, kv_heads=2))
    hybrid = HybridPool(keys_pool(1), [], some_states([0]))
    refused("HybridPool.get_contiguous_buf_infos: it holds only the full", hybrid, geometry(2, kv_heads=2))
    del pool.sliding_window
    known = geometry(2, kv_heads=2, kinds=["full", "window"])
    refused("SlidingPool.sliding_window: nobody says", pool, known)


@pytest.mark.parametrize(
    ("ids", "cause"),
    [
        ([1], "it has 1 values for the 2 buffers of get_contiguous_buf_infos"),
        ([1, 2], r"layer 1 has 1 buffers; the geometry knows 2 \(k, v\)"),
        ([9, 9], r"layer 9 is not in \[0, 2\)"),
    ],
)
def test_layer_ids_that_do_not_fit(ids: list[int], cause: str) -> None:
    pool = HybridPool(keys_pool(1), ids, some_states([0]))
    refused(f"HybridPool.get_kv_layer_ids: {cause}", pool, geometry(2 if 9 in ids else 3, kv_heads=2))
