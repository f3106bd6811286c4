"""Lists by layer as views: every element is the model's own, at the coordinates that it says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from statelink import plan, state
from statelink.errors import MismatchError
from statelink.state import PageField

from .fakes import (
    Array,
    HybridPool,
    IndexedPool,
    KeysPool,
    LatentPool,
    SlidingPool,
    SparsePool,
    States,
    keys_pool,
    latents_pool,
    noise,
    some_states,
)
from .reading import DIM, HEADS, PAGES, TOKENS, agrees, cut, geometry, keys, kinds, names, planar, refused, whole


@pytest.mark.parametrize("layout", ["nhd", "hnd", None])
@pytest.mark.parametrize("tp", [(0, 1), (1, 2), (3, 8)])
def test_keys_and_values_of_a_stage(layout: str | None, tp: tuple[int, int]) -> None:
    k, v = keys(2), keys(2, dim=3)
    first = tp[0] * HEADS // tp[1]
    held = slice(first, first + max(1, HEADS // tp[1]))
    pool = KeysPool(cut(k, held, layout), cut(v, held, layout), 3, layout)
    (found,) = state.from_pools(pool, geometry=geometry(6, kv_heads=HEADS, tp=tp, stage=(3, 5)))
    assert names(found) == ["layers.3.k", "layers.4.k", "layers.3.v", "layers.4.v"]
    assert [buffer.layer for buffer in found.component.buffers] == [3, 4, 3, 4]
    assert (found.component.page, found.component.type) == (TOKENS, "kv")
    assert len(found.regions) == 4
    expected = {
        (p, t, h, d) for p in range(PAGES) for t in range(TOKENS) for h in range(HEADS)[held] for d in range(DIM)
    }
    assert agrees(found, "layers.4.k", k[1]) == expected
    agrees(found, "layers.3.v", v[0])


def test_latents_and_their_partition() -> None:
    pool = LatentPool([noise(PAGES, TOKENS, 5) for _ in range(2)])
    held = state.Partition("contiguous", 2, 1)
    (found,) = state.from_pools(pool, geometry=geometry(2, tp=(1, 2), partition=held, kind="dram"))
    assert names(found) == ["layers.0.latent", "layers.1.latent"]
    assert found.component.partition == held
    assert len(agrees(found, "layers.1.latent", pool.latents[1])) == PAGES * TOKENS * 5


def test_block_scales_come_right_after_the_keys_and_pair_only_with_their_namesakes() -> None:
    sides: list[list[state.Inventory]] = []
    for width in (1, 2):
        ranks = []
        for rank in range(width):
            pool = KeysPool(keys(1, heads=HEADS // width), keys(1, heads=HEADS // width))
            pool.scales = [noise(PAGES, 8), noise(PAGES, 8)]
            found = state.from_pools(pool, geometry=geometry(1, kv_heads=HEADS, tp=(rank, width)))
            assert kinds(found) == [("kv", "kv"), ("block_scale", "block_scale")]
            assert names(found[1]) == ["layers.0.k_scale", "layers.0.v_scale"]
            ranks.append(state.describe("i", found, rank=rank, ranks=width, axes={"tp": (rank, width)}))
        sides.append(ranks)
    own = pool.scales[1].view(np.uint8)[:, None]
    assert agrees(found[1], "layers.0.v_scale", np.concatenate([own, own], axis=1)) == {
        (p, 1, b) for p in range(PAGES) for b in range(16)
    }
    plan.match(sides[1], sides[1])
    for pair in (sides, sides[::-1]):
        with pytest.raises(MismatchError, match=r"block_scale/layers\.0\.v_scale: extent of axis 'rank'"):
            plan.match(*pair)


def test_latents_in_planar_pages_and_layers_without_any() -> None:
    page, (latent, scale) = planar(TOKENS, 6, 2)
    pool = LatentPool([page.reshape(PAGES, TOKENS, 8), np.zeros((0, 1, 1), np.uint8)])
    fields = {"latent": [PageField("c", 6), PageField("scale", 2, "float16")]}
    (found,) = state.from_pools(pool, geometry=geometry(2, fields=fields))
    assert [buffer.count for buffer in found.component.buffers] == [PAGES, PAGES, 0, 0]
    agrees(found, "layers.0.latent.c", latent)
    agrees(found, "layers.0.latent.scale", scale.view("float16"))
    # A list keeps the place of what has no items, of whatever kind it is.
    nothing = np.zeros((0, 1), np.uint8)
    (empty,) = state.from_pools(LatentPool([noise(PAGES, TOKENS, 2), noise(0, TOKENS, 2)]), geometry=geometry(2))
    assert [buffer.count for buffer in empty.component.buffers] == [PAGES, 0]
    kv = KeysPool([*keys(1), noise(0, TOKENS, HEADS, DIM)], [*keys(1), noise(0, TOKENS, HEADS, DIM)])
    kv.scales = [noise(PAGES, 2), nothing, noise(PAGES, 2), nothing]
    found, scales = state.from_pools(kv, geometry=geometry(2, kv_heads=HEADS))
    assert [[b.count for b in each.component.buffers] for each in (found, scales)] == [[PAGES, 0, PAGES, 0]] * 2
    held = States([nothing, noise(2, 4)], [8, 2], ids=[0, 0])
    hybrid = HybridPool(KeysPool(keys(1), keys(1)), [1, 1], held)
    _, slots = state.from_pools(hybrid, geometry=geometry(2, kv_heads=HEADS))
    assert [buffer.count for buffer in slots.component.buffers] == [0, 2]


@pytest.mark.parametrize("pool", [1, 2])
def test_index_keys_in_planar_pages_and_layers_that_share_them(pool: int) -> None:
    page, (k, scale) = planar(TOKENS // pool, 8, 4)
    shared = np.zeros((0, 4), np.uint8)
    # Four requests: rings of pool + 1 slots, keys of 6 bytes and scores of 2.
    tails = [noise(4, pool + 1, 6, dtype="uint8"), noise(0, pool + 1, 6, dtype="uint8")]
    scores = [noise(4, pool + 1, 2, dtype="uint8"), noise(0, pool + 1, 2, dtype="uint8")]
    latents = [noise(PAGES, TOKENS, 2) for _ in range(2)]
    made = IndexedPool(latents, [page, shared], start=4, pool=pool, tails=[*tails, *scores] if pool > 1 else ())
    fields = {"index_k": [PageField("k", 8), PageField("scale", 4, "float32")]}
    found = state.from_pools(made, geometry=geometry(6, stage=(4, 6), fields=fields))
    assert [name for name, _ in kinds(found)] == ["kv", "dsa", "dsa_tail"][: 3 if pool > 1 else 2]
    index = found[1].component
    assert names(found[1]) == [f"layers.{layer}.index_k.{field}" for layer in (4, 5) for field in ("k", "scale")]
    assert [buffer.count for buffer in index.buffers] == [PAGES, PAGES, 0, 0]
    assert index.ratio(index.buffers[0]) == pool
    assert len(agrees(found[1], "layers.4.index_k.k", k)) == k.size
    agrees(found[1], "layers.4.index_k.scale", scale.view("float32"))
    if pool > 1:
        tail = found[2].component
        assert (tail.page, tail.group) == (1, 2)
        assert names(found[2]) == ["layers.4.key", "layers.5.key", "layers.4.score", "layers.5.score"]
        assert [buffer.count for buffer in tail.buffers] == [12, 0, 12, 0]
        whole(found[2], "layers.4.key", tails[0].reshape(12, 6))
        whole(found[2], "layers.4.score", scores[0].reshape(12, 2))


def test_layers_that_share_an_index_stay_empty_where_pages_differ_in_size() -> None:
    """What has no items has no tokens that two page sizes could disagree about; `index_pages` takes it, too."""

    def rank(name: str, page: int) -> state.Inventory:
        index = [noise(PAGES, page, 8, dtype="uint8"), np.zeros((0, 8), np.uint8)]
        pool = IndexedPool([noise(PAGES, page, 2) for _ in index], index)
        fields = {"index_k": [PageField("k", 8)]}
        return state.describe(name, state.from_pools(pool, geometry=geometry(2, fields=fields)))

    plan.match([rank("p", TOKENS)], [rank("d", 2 * TOKENS)])


def test_addresses_with_the_highest_bit_set_are_unsigned() -> None:
    class Far:
        page_size = 4

        def get_contiguous_buf_infos(self) -> tuple[Array, list[int], list[int]]:
            return np.array([-(1 << 62)], np.int64), [64], [16]

    (found,) = state.from_pools(Far(), geometry=geometry(1, kind="npu:0"))
    assert found.regions == (state.Region((1 << 64) - (1 << 62), 64, "npu:0"),)
    assert found.component.buffers[0].count == 4


def test_layouts_that_strides_cannot_say() -> None:
    pool = SlidingPool(keys_pool(1), keys_pool(1, layout="vectorized_5d"), 8)
    given = geometry(2, kv_heads=2, kinds=["full", "window"])
    refused("KeysPool.kv_cache_layout: pages in the layout 'vectorized_5d'", pool, given)


def test_index_keys() -> None:
    pool = SparsePool(keys_pool(1), None, [noise(3, 6)])
    given = geometry(1, kv_heads=2, kinds=["sparse"])
    pool.index_kv_pool = object()
    refused("SparsePool.index_kv_pool: an index with values", pool, given)
    pool.index_kv_pool = None
    pool.index = []
    pool.index.extend([noise(3, 6), noise(3, 6)])
    refused("get_index_k_state_buf_infos: it lists 2 buffers; index_k of 1 layers", pool, given)
    bare = SimpleNamespace(page_size=4, index_k_pool=object(), get_sparse_kv_buf_infos=lambda: ([], [], []))
    refused("object.get_index_k_state_buf_infos: it has no list", bare, given)
    hybrid = HybridPool(latents_pool(1), [1], some_states([0]))
    hybrid.use_dsa = True  # type: ignore[attr-defined]
    refused("LatentPool.get_state_buf_infos: it has no list of index keys", hybrid, geometry(2))
    fields = {"index_k": [PageField("k", 5)]}
    dsa = IndexedPool([noise(3, 4, 2)], [noise(3, 6)])
    refused("has 12 bytes; 4 rows of k 5 bytes do not fill it", dsa, geometry(1, fields=fields))
    latent: Any = {"kv": [("latent", None), ("index_k", None)]}
    dsa.latents.append(noise(3, 4, 2))
    refused("index keys that the list of pages does not have", dsa, geometry(1, groups=latent))


def test_open_pools_of_a_compressor() -> None:
    pool = IndexedPool([noise(3, 4, 2)], [noise(3, 6)], pool=2, tails=[noise(4, 7), noise(4, 6)])
    refused("get_compress_tail_buf_infos: item of entry 0: 14 bytes are no 3 slots", pool, geometry(1))
    pool.tails = [noise(4, 6)]
    refused("lists 1 buffers; key of 1 layers, then score of 1 layers would be 2", pool, geometry(1))
    pool.kpool_use_compress = False
    refused("get_compress_tail_buf_infos: it lists buffers that a pool of this kind", pool, geometry(1))
