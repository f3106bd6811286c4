"""Whole ranks from pools: stages, drafts, envelopes and metadata."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from statelink import plan, state
from statelink.errors import StateError
from statelink.state import Memory, PageField, PoolGeometry

from .fakes import (
    HybridPool,
    IndexedPool,
    KeysPool,
    LatentPool,
    QueryPool,
    RequestPool,
    SlidingPool,
    States,
    UnifiedHybridPool,
    compressed_pool,
    keys_pool,
    latents_pool,
    noise,
    triples,
)
from .reading import DIM, HEADS, PAGES, TOKENS, agrees, cut, geometry, keys, kinds, names, refused, whole


def test_constructors_describe_the_same_as_the_walk() -> None:
    k, v = keys(2), keys(2)
    walked = state.from_pools(KeysPool(k, v), geometry=geometry(2, kv_heads=HEADS))
    layers = {layer: tuple(Memory.of(each[layer]) for each in (k, v)) for layer in range(2)}
    tagged: Any = {n: tuple(replace(each, dtype="bfloat16") for each in pair) for n, pair in layers.items()}
    made = state.kv_pages(tagged, heads=HEADS)
    assert state.describe("i", walked).diff(state.describe("i", [made])) == []
    latents, index = [noise(PAGES, TOKENS, 2, dtype="uint8")], [noise(PAGES, TOKENS, 6, dtype="uint8")]
    given = PoolGeometry(layers=1, dtype="uint8", fields={"index_k": [PageField("k", 6)]})
    walked = state.from_pools(IndexedPool(latents, index), geometry=given)
    by_hand = [state.mla_pages({0: latents[0]}), state.index_pages({0: index[0]})]
    assert state.describe("i", walked).digest() == state.describe("i", by_hand).digest()


def test_two_ranks_of_keys_feed_one() -> None:
    k, v = keys(2), keys(2)
    sides: list[list[state.Inventory]] = []
    for width in (2, 1):
        ranks = []
        for rank in range(width):
            held = slice(rank * HEADS // width, (rank + 1) * HEADS // width)
            pool = KeysPool(cut(k, held), cut(v, held))
            found = state.from_pools(pool, geometry=geometry(2, kv_heads=HEADS, tp=(rank, width)))
            ranks.append(state.describe("i", found, rank=rank, ranks=width, axes={"tp": (rank, width)}))
        sides.append(ranks)
    plan.match(*sides)
    assert [(part.source, part.target) for part in plan.route(*sides) if part.shares] == [(0, 0), (1, 0)]


def test_a_stage_without_a_kind_of_layer_leaves_the_component_out() -> None:
    pool = HybridPool(KeysPool(keys(1), keys(1)), [1, 1], States([], []))
    found = state.from_pools(pool, request_pool=RequestPool([], []), geometry=geometry(2, kv_heads=HEADS))
    assert [name for name, _ in kinds(found)] == ["kv"]


def unified() -> UnifiedHybridPool:
    """Two full layers: a page is K0, K1, V0, V1, and a slot is as large as two pages."""
    layer = TOKENS * HEADS * DIM * 2
    full = KeysPool(keys(2), keys(2))
    return UnifiedHybridPool(full, noise(6, 4 * layer, dtype="uint8"), 4 * layer, 8 * layer)


def test_envelopes_move_whole_between_ranks_of_one_place() -> None:
    pool = unified()
    pool.full_kv_pool = LatentPool([pool.raw[:, :8].reshape(6, 4, 2)])
    pool.full_kv_pool.latents = []
    found = {}
    for tp in ((0, 1), (1, 2)):
        given = geometry(4, kv_heads=HEADS, tp=tp, unified=True, page_size=TOKENS, state_tp=tp)
        found[tp] = state.from_pools(pool, geometry=given)
        assert [name for name, _ in kinds(found[tp])] == ["kv", "mamba"]
        assert names(found[tp][0]) == names(found[tp][1]) == ["envelope.0-4"]
    inventories = [state.describe("i", each) for each in found.values()]
    assert [len(each.regions) for each in inventories] == [1, 1]
    assert [buffer.count for each in found[0, 1] for buffer in each.component.buffers] == [6, 3]
    agrees(found[1, 2][0], "envelope.0-4", np.stack([pool.raw, pool.raw], axis=1))
    assert inventories[0].diff(inventories[0]) == []
    assert {str(each) for each in inventories[0].diff(inventories[1])} == {
        f"{name}/envelope.0-4: extent of axis 'rank': 1 here, 2 there" for name in ("kv", "mamba")
    }


def test_an_envelope_that_can_be_looked_into_is_one_region_with_many_buffers() -> None:
    pool = unified()
    pool.full_kv_pool = LatentPool([noise(PAGES, TOKENS, 2)])
    pool.full_kv_pool.latents = []
    size = TOKENS * HEADS * DIM * 2
    parts = {"kv": [(number * size, size) for number in range(4)]}
    given = geometry(4, kv_heads=HEADS, unified=True, envelope=parts, kinds=["linear", "full", "full", "linear"])
    found = state.from_pools(pool, geometry=given)
    assert names(found[0]) == ["layers.1.k", "layers.2.k", "layers.1.v", "layers.2.v"]
    assert len(found[0].regions) == 1
    assert {buffer.stride for buffer in found[0].component.buffers} == {4 * size}
    inside = pool.raw.view("int16").reshape(6, 4, TOKENS, HEADS, DIM)
    agrees(found[0], "layers.2.k", inside[:, 1])
    agrees(found[0], "layers.1.v", inside[:, 2])
    plain = KeysPool(keys(2), keys(2))
    pool_of_a_peer = HybridPool(plain, [1, 2, 1, 2], States([], []))
    (other,) = state.from_pools(pool_of_a_peer, geometry=geometry(4, kv_heads=HEADS))
    assert state.describe("i", [found[0]]).diff(state.describe("i", [other])) == []


def test_an_envelope_that_nobody_announced() -> None:
    pool = SimpleNamespace(page_size=4, get_contiguous_buf_infos=lambda: triples([noise(3, 64)]))
    with pytest.raises(StateError, match=r"lists 1 buffers(.|\n)*PoolGeometry.unified"):
        state.from_pools(pool, geometry=geometry(2, kv_heads=2))
    refused("lists 4 buffers, where one envelope was announced", keys_pool(2), geometry(2, kv_heads=2, unified=True))
    parts = {"kv": [(0, 4096)]}
    refused("do not lie in an envelope", pool, geometry(1, unified=True, envelope=parts))
    refused("lists 2 buffers, where one", keys_pool(1), geometry(1, kv_heads=2, unified=True, envelope=parts))


def test_a_draft_is_further_components_after_the_models_layers() -> None:
    target = IndexedPool([noise(PAGES, TOKENS, 2) for _ in range(3)], [noise(PAGES, 6) for _ in range(3)])
    draft = IndexedPool([noise(PAGES, TOKENS, 2)], [noise(PAGES, 6)], start=61)
    found = state.from_pools(target, draft_pool=draft, geometry=geometry(3))
    assert kinds(found) == [("kv", "kv"), ("dsa", "dsa"), ("draft.kv", "kv"), ("draft.dsa", "dsa")]
    assert names(found[2]) == ["layers.3.latent"]
    agrees(found[2], "layers.3.latent", draft.latents[0])
    whole(found[3], "layers.3.index_k", draft.index[0])
    assert all(buffer.optional for each in found[2:] for buffer in each.component.buffers)
    assert not any(buffer.optional for each in found[:2] for buffer in each.component.buffers)
    strict = state.from_pools(target, draft_pool=draft, geometry=geometry(3), draft_optional=False)
    assert not any(buffer.optional for each in strict for buffer in each.component.buffers)


def test_a_draft_of_other_heads_and_with_ids_of_its_own() -> None:
    target = LatentPool([noise(PAGES, TOKENS, 2) for _ in range(36)])
    k, v = keys(2, heads=2), keys(2, heads=2)
    draft = QueryPool(KeysPool(cut(k, slice(1, 2)), cut(v, slice(1, 2))), [0, 1, 0, 1], States([], []))
    draft.pending, draft.pending_ids = [noise(4, 6), noise(4, 2)], [1, (1 << 32) - 2]
    draft.compressed, draft.compressed_ids = [], []
    own = geometry(2, kv_heads=2, tp=(1, 2))
    found = state.from_pools(target, draft_pool=draft, draft_geometry=own, geometry=geometry(36))
    assert kinds(found)[1:] == [("draft.kv", "kv"), ("draft.qsa_pending", "qsa_pending")]
    assert names(found[1]) == ["layers.36.k", "layers.37.k", "layers.36.v", "layers.37.v"]
    agrees(found[1], "layers.37.v", v[1])
    assert names(found[2]) == ["layers.36.index_k", "rope_positions"]


def test_drafts() -> None:
    target, given = compressed_pool([0]), geometry(1)
    refused("compression_ratios: the draft has none", target, given, draft_pool=latents_pool(1))
    refused("compression_ratios: the model has none", latents_pool(1), given, draft_pool=compressed_pool([0]))
    draft = compressed_pool([4])
    refused(r"the draft is not sliding-window only: it has ratios \[4\]", target, given, draft_pool=draft)
    draft = compressed_pool([0])
    draft.full_to_swa_index_mapping = object()
    refused("full_to_swa_index_mapping: the draft translates", target, given, draft_pool=draft)
    draft = compressed_pool([0])
    draft.sliding_window = 64
    refused("sliding_window: it is 64 for the draft, and 128 for the model", target, given, draft_pool=draft)
    draft = compressed_pool([0])
    draft.ring = [noise(4, 4)]
    refused("only one keeps its windows in rings", target, given, draft_pool=draft)
    draft = compressed_pool([])
    draft.layer_num = 1
    refused("compression_ratios: it has 0 for 1 draft layers", target, given, draft_pool=draft)
    draft = compressed_pool([0])
    draft.kv = [noise(4, 4)]
    refused("get_contiguous_buf_infos: it lists 1 buffers", target, given, draft_pool=draft)
    draft = compressed_pool([0])
    draft.valid_from = [noise(4, 1), noise(4, 1)]
    refused("get_swa_valid_from_buf_infos: it lists 2 buffers; one is known", target, given, draft_pool=draft)
    sliding = SlidingPool(keys_pool(1), keys_pool(1), 8)
    refused(
        "a draft of kind 'swa' beside", keys_pool(1), geometry(1, kv_heads=2), draft_geometry=given, draft_pool=sliding
    )
    refused("layer_num: the number of draft layers is not known", latents_pool(1), given, draft_pool=SimpleNamespace())
    # Under decode context parallelism a draft has every position (§4.7): its own geometry says so.
    dealt = PoolGeometry(layers=1, dtype="bfloat16", partition=state.Partition("cyclic", 2, 1))
    refused("nobody says whether the draft's are too", latents_pool(1), dealt, draft_pool=latents_pool(1))
    both = state.from_pools(latents_pool(1), geometry=dealt, draft_pool=latents_pool(1), draft_geometry=geometry(1))
    assert [each.component.partition.kind for each in both] == ["cyclic", "all"]
    scaled = keys_pool(1)
    scaled.scales = [noise(3, 2), noise(3, 2)]
    refused("get_kv_scale_buf_infos: it lists buffers", keys_pool(1), geometry(1, kv_heads=2), draft_pool=scaled)


def test_metadata_rows_belong_to_the_last_stage_of_prefill_and_to_each_of_decode() -> None:
    given = geometry(2, kv_heads=2, stage=(0, 1))
    rows = {"token": np.zeros((2, 16), np.int32)}
    refused("only the last pipeline stage", keys_pool(1), given, aux=rows)
    found = state.from_pools(keys_pool(1), geometry=given, aux=rows, aux_on_each_stage=True)
    assert [each.component.name for each in found] == ["kv", "aux"]
