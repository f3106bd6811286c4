"""Pools of compressed attention: lists by compression ratio, windows and open groups beside them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from statelink import state
from statelink.state import PageField

from .fakes import (
    CompressedPool,
    compressed_pool,
    noise,
)
from .reading import agrees, geometry, kinds, names, refused, whole


def v4(start: int, end: int, *, unified: bool = False) -> CompressedPool:
    ratios = [0, 0, 4, 128, 4, 128, 4, 128, 0]
    pool = CompressedPool(ratios, start, end, 256, 128)
    mine = ratios[start:end]
    c4, c128, windows = mine.count(4), mine.count(128), min(end, 8) - min(start, 8)
    pool.kv = [noise(2, 64 * 3, dtype="uint8") for _ in range(c4)] + [
        noise(2, 64 * 2, dtype="uint8") for _ in range(c4)
    ]
    pool.kv += [noise(2, 2 * 3, dtype="uint8") for _ in range(c128)]
    pool.request = [noise(2, 128, 2) for _ in range(c128)]
    if unified:
        pool.unified_swa_ring_size = 136
        pool.ring = [noise(2 * 136, 4) for _ in range(windows)]
    else:
        pool.swa = [noise(2, 256, 2) for _ in range(windows)] + [noise(2, 8, 2) for _ in range(2 * c4)]
    return pool


@pytest.mark.parametrize("unified", [False, True])
def test_compressed_attention_by_ratio(unified: bool) -> None:
    pool = v4(4, 9, unified=unified)
    given = geometry(8, stage=(4, 8), fields={"c4_index_k": [PageField("k", 1), PageField("scale", 1)]})
    found = state.from_pools(pool, geometry=given)
    window = "swa_ring" if unified else "swa"
    assert [name for name, _ in kinds(found)] == ["dsv4", window, "c128_state"]
    assert names(found[0]) == [
        *("layers.4.c4_kv", "layers.6.c4_kv"),
        *(f"layers.{layer}.c4_index_k.{field}" for layer in (4, 6) for field in ("k", "scale")),
        *("layers.5.c128_kv", "layers.7.c128_kv"),
    ]
    whole(found[0], "layers.6.c4_kv", pool.kv[1])
    agrees(found[0], "layers.6.c4_index_k.k", pool.kv[3][:, :64].reshape(2, 64, 1))
    agrees(found[0], "layers.6.c4_index_k.scale", pool.kv[3][:, 64:].reshape(2, 64, 1))
    assert {found[0].component.ratio(buffer) for buffer in found[0].component.buffers} == {0, 4}
    assert found[1].component.window == 128
    if unified:
        assert names(found[1]) == [f"layers.{layer}.swa" for layer in (4, 5, 6, 7)]
        whole(found[1], "layers.7.swa", pool.ring[3])
    else:
        assert names(found[1])[3:] == [
            *("layers.7.swa", "layers.4.c4_state", "layers.6.c4_state"),
            *("layers.4.c4_index_state", "layers.6.c4_index_state"),
        ]
        whole(found[1], "layers.6.c4_state", pool.swa[5])
    assert (found[2].component.page, found[2].component.group) == (128, 128)
    assert names(found[2]) == ["layers.5.state", "layers.7.state"]
    whole(found[2], "layers.7.state", pool.request[1])


def test_the_stage_of_a_compressed_model_lists_the_entries_of_the_vector() -> None:
    # §6.4: what stage [4, 8) holds of the full model's lists.
    listed = []
    for start, end in ((0, 9), (4, 8)):
        found = state.from_pools(v4(start, end), geometry=geometry(8, stage=(start, min(end, 8))))
        listed.append([names(each) for each in found])
    places = [[all_.index(name) for name in some] for all_, some in zip(*listed, strict=True)]
    assert places == [[1, 2, 4, 5, 7, 8], [4, 5, 6, 7, 9, 10, 12, 13], [1, 2]]


def test_other_groups_of_a_compressed_pool_are_named_by_the_caller() -> None:
    pool = CompressedPool([4, 128, 2], 0, 3, 256, 128)
    pool.kv = [noise(2, 4 + number) for number in range(7)]
    pool.request = [noise(2, 4)]
    pool.c128, pool.c4 = [noise(3, 16)], [noise(8, 2), noise(8, 2)]
    parts = [("c4_kv", 4), ("c4_rope", 4), ("c4_index_k", 4), ("c128_kv", 128), ("c128_rope", 128)]
    groups: Any = {"dsv4": [*parts, ("c2_kv", 2), ("c2_index_k", 2)]}
    pool.pd_kv_layout = "two-pool"  # type: ignore[attr-defined]
    found = state.from_pools(pool, geometry=geometry(3, groups=groups, request_ratio=2, c128_rows=8, format="x"))
    assert [name for name, _ in kinds(found)] == ["dsv4", "c128_state", "dsv4_c128", "dsv4_c4_state"]
    assert names(found[0]) == [f"layers.{[4, 128, 2].index(ratio)}.{part}" for part, ratio in groups["dsv4"]]
    assert found[0].component.format == "x; pd_kv_layout=two-pool"
    whole(found[0], "layers.1.c128_rope", pool.kv[4])
    assert names(found[1]) == ["layers.2.state"]
    assert (found[2].component.page, found[2].component.group) == (1024, 128)
    assert (found[3].component.group, found[3].component.keep) == (4, 4)
    whole(found[3], "layers.0.c4_index_state", pool.c4[1])


def test_the_format_says_the_layout_and_the_pages_of_windows() -> None:
    def found(pool: Any) -> set[str]:
        return {each.component.format for each in state.from_pools(pool, geometry=geometry(8))}

    pool: Any = v4(0, 9)
    assert found(pool) == {""}
    pool.pd_kv_layout = lambda: "v4,c4:v4,c128:v4"  # in some versions it is a method
    assert found(pool) == {"pd_kv_layout=v4,c4:v4,c128:v4"}
    pool.swa_page_size, pool.swa_kv_pool = 256, SimpleNamespace(page_size=64)
    assert found(pool) == {"pd_kv_layout=v4,c4:v4,c128:v4; windows in pages of 64"}
    pool.swa_kv_pool.page_size = 256
    assert found(pool) == {"pd_kv_layout=v4,c4:v4,c128:v4"}


def test_layers_that_read_the_rows_of_others_have_none() -> None:
    pool: Any = CompressedPool([0, 4, 1, 1, 2, 2], 0, 6, 256, 128)
    pool.kv = [noise(2, 4 + number) for number in range(6)]
    pool.sources_by_ratio = {4: [1], 1: [2], 2: [4]}
    (pages,) = state.from_pools(pool, geometry=geometry(6, request_ratio=2))
    assert names(pages) == [
        *("layers.1.c4_kv", "layers.1.c4_index_k", "layers.2.c1_kv", "layers.2.c1_index_k"),
        *("layers.4.c2_kv", "layers.4.c2_index_k"),
    ]
    whole(pages, "layers.4.c2_index_k", pool.kv[5])


@pytest.mark.parametrize("unified", [False, True])
def test_a_draft_beside_compressed_attention_has_windows_only(unified: bool) -> None:
    target, draft = v4(0, 9, unified=unified), CompressedPool([0], 0, 1, 256, 128)
    draft.valid_from = [noise(2, 1, dtype="int64")]
    if unified:
        draft.ring, draft.unified_swa_ring_size = [noise(2 * 136, 4)], 136
    else:
        draft.swa = [noise(2, 256, 2)]
    found = state.from_pools(target, draft_pool=draft, geometry=geometry(8))
    window = "swa_ring" if unified else "swa"
    assert [name for name, _ in kinds(found)] == ["dsv4", window, "c128_state", f"draft.{window}", "draft.request_row"]
    assert names(found[3]) == ["layers.8.swa"]
    whole(found[3], "layers.8.swa", (draft.ring or draft.swa)[0])
    whole(found[4], "swa_valid_from", draft.valid_from[0])


def test_compressed_pools() -> None:
    pool = compressed_pool([0, 4])
    refused("get_state_buf_infos: it lists 2 buffers; swa of 2 layers, then c4_state of 1", pool, geometry(2))
    pool.kv = [noise(2, 4)] * 3
    refused("c4_kv of 1 layers, then c4_index_k of 1 layers, then c128_kv of 0 layers would be 2", pool, geometry(2))
    pool = compressed_pool([0, 2])
    refused(r"layers \[1\] have ratios that no tensor", pool, geometry(2))
    pool = compressed_pool([0])
    refused("end_layer: the pool holds layers", pool, geometry(2))
    refused("compression_ratios: it has 1 for 2 layers", pool, geometry(2, stage=(0, 1)))
    pool.c128 = [noise(2, 4)]
    refused("get_c128_kv_buf_infos: nobody says how many rows", pool, geometry(1))
    pool.c128, pool.swa, pool.ring, pool.unified_swa_ring_size = [], [], [noise(7, 4)], 4
    refused("entry 0 has 7 rows: no whole number of rings of 4", pool, geometry(1))
    del pool.end_layer
    refused("CompressedPool.end_layer: lists by compression ratio need", pool, geometry(1))
    pool = compressed_pool([0])
    refused("it is 128; the geometry says 64 tokens a window", pool, geometry(1, window=64))
    pool.request = [noise(2, 4)]
    refused("get_request_state_buf_infos: it lists 1 buffers; state of 0 layers", pool, geometry(1))
