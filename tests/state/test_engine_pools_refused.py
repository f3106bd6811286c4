"""What pools cannot be described as: refused by class, method and reason, and never left out in silence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from statelink import state
from statelink.errors import StateError
from statelink.state import PageField, PoolGeometry, StateTensor

from .fake_pools import (
    CompressedPool,
    HybridPool,
    IndexedPool,
    KeysPool,
    LatentPool,
    QueryPool,
    RequestPool,
    SlidingPool,
    SparsePool,
    States,
    noise,
    triples,
)


def geometry(layers: int, **more: Any) -> PoolGeometry:
    return PoolGeometry(layers=layers, dtype="bfloat16", **more)


def keys(layers: int, heads: int = 2, layout: str | None = None) -> KeysPool:
    k, v = ([noise(3, 4, heads, 2) for _ in range(layers)] for _ in range(2))
    return KeysPool(k, v, layout=layout)


def latents(layers: int) -> LatentPool:
    return LatentPool([noise(3, 4, 2) for _ in range(layers)])


def states(layers: list[int], **more: Any) -> States:
    tensors = [noise(2, 8, 3) for _ in layers] + [noise(2, 2, 4, dtype="float32") for _ in layers]
    return States(tensors, **{"dims": [8] * len(layers) + [2] * len(layers), "ids": layers * 2, **more})


def compressed(ratios: list[int]) -> CompressedPool:
    pool = CompressedPool(ratios, 0, len(ratios), 256, 128)
    pool.swa = [noise(2, 4) for _ in ratios]
    return pool


def refused(match: str, pool: Any, given: PoolGeometry, **more: Any) -> None:
    with pytest.raises(StateError, match=match):
        state.from_pools(pool, geometry=given, **more)


def listing(ptrs: list[int], lens: list[int], items: list[int]) -> Any:
    return SimpleNamespace(page_size=4, get_contiguous_buf_infos=lambda: (ptrs, lens, items))


@pytest.mark.parametrize(
    ("lists", "cause"),
    [
        (([16], [64, 64], [16]), "unequal length: 1 addresses, 2 lengths, 1 item sizes"),
        (([0], [64], [16]), "entry 0 has 64 bytes at 0x0"),
        (([16], [64], [0]), "entry 0 has 64 bytes at 0x10 in items of 0"),
        (([16], [64], [128]), "in items of 128"),
        (([16], [-64], [16]), "entry 0 has -64 bytes"),
        (([16], [64], [18]), "no whole 4 rows of bfloat16"),
        (([(1 << 64) + 16], [64], [16]), "entry 0 has 64 bytes at 0x10000000000000010"),
        (([16, 256], [64, 64], [16, 16]), "lists 2 buffers; latent of 1 layers would be 1"),
    ],
)
def test_lists_that_contradict_themselves(lists: Any, cause: str) -> None:
    refused(rf"cannot describe SimpleNamespace.get_contiguous_buf_infos: .*{cause}", listing(*lists), geometry(1))


def test_a_list_that_is_no_triple() -> None:
    for value in (None, 3, ([1], [2]), (["a"], [1], [1])):
        pool = SimpleNamespace(page_size=4, get_contiguous_buf_infos=lambda value=value: value)
        refused("addresses, lengths and item sizes are expected", pool, geometry(1))


def test_a_pool_without_pages() -> None:
    """The allocator, say, where the pool was meant: described as nothing, it would move nothing without a word."""
    refused(
        "cannot describe SimpleNamespace.get_contiguous_buf_infos: it does not have it", SimpleNamespace(), geometry(1)
    )
    refused("layer_num", latents(1), geometry(1), draft_pool=SimpleNamespace())
    refused("no pool of pages", latents(1), geometry(1), draft_pool=SimpleNamespace(layer_num=1))


def test_a_list_that_cannot_be_had() -> None:
    def broken() -> Any:
        raise RuntimeError("freed")

    def abstract() -> Any:
        raise NotImplementedError

    pool = listing([16], [64], [16])
    pool.get_state_buf_infos = pool.get_kv_scale_buf_infos = abstract
    assert [each.component.name for each in state.from_pools(pool, geometry=geometry(1))] == ["kv"]
    pool.get_state_buf_infos = broken
    refused("SimpleNamespace.get_state_buf_infos: it raised RuntimeError: freed", pool, geometry(1))
    pool.get_contiguous_buf_infos = abstract
    refused("SimpleNamespace.get_contiguous_buf_infos: it raised NotImplementedError", pool, geometry(1))


def test_numbers_on_which_pool_and_geometry_differ() -> None:
    for wrong in ("4", 4.0):
        odd = SimpleNamespace(page_size=wrong, get_contiguous_buf_infos=lambda: ([16], [64], [16]))
        refused(f"page_size is {wrong!r}: a whole number", odd, geometry(1))
    refused("KeysPool.head_num: it is 2; rank 0 of 2 holds 1 of the 2", keys(1), geometry(1, kv_heads=2, tp=(0, 2)))
    refused("KeysPool.page_size: it is 4; the geometry says 8", keys(1), geometry(1, kv_heads=2, page_size=8))
    refused("KeysPool.start_layer: it is 0; .* it is 1", keys(1), geometry(2, kv_heads=2, stage=(1, 2)))
    unknown = SimpleNamespace(get_contiguous_buf_infos=lambda: ([16], [64], [16]))
    refused("nobody says how many tokens a page", unknown, geometry(1))
    refused("lists 2 buffers; latent of 1 layers would be 1", keys(1), geometry(1))
    refused("lists 4 buffers; k of 3 layers, then v of 3 layers would be 6", keys(2), geometry(3, kv_heads=2))


def test_an_envelope_that_nobody_announced() -> None:
    pool = SimpleNamespace(page_size=4, get_contiguous_buf_infos=lambda: triples([noise(3, 64)]))
    with pytest.raises(StateError, match=r"lists 1 buffers(.|\n)*PoolGeometry.unified"):
        state.from_pools(pool, geometry=geometry(2, kv_heads=2))
    refused("lists 4 buffers, where one envelope was announced", keys(2), geometry(2, kv_heads=2, unified=True))
    parts = {"kv": [(0, 4096)]}
    refused("do not lie in an envelope", pool, geometry(1, unified=True, envelope=parts))
    refused("lists 2 buffers, where one", keys(1), geometry(1, kv_heads=2, unified=True, envelope=parts))


def test_layouts_that_strides_cannot_say() -> None:
    pool = SlidingPool(keys(1), keys(1, layout="vectorized_5d"), 8)
    given = geometry(2, kv_heads=2, kinds=["full", "window"])
    refused("KeysPool.kv_cache_layout: pages in the layout 'vectorized_5d'", pool, given)


def test_layers_that_nobody_names() -> None:
    pool = SlidingPool(keys(1), keys(1), 8)
    refused("SlidingPool.get_contiguous_buf_infos: it holds only the full layers", pool, geometry(2, kv_heads=2))
    hybrid = HybridPool(keys(1), [], states([0]))
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
    pool = HybridPool(keys(1), ids, states([0]))
    refused(f"HybridPool.get_kv_layer_ids: {cause}", pool, geometry(2 if 9 in ids else 3, kv_heads=2))


@pytest.mark.parametrize(
    ("more", "given", "cause"),
    [
        ({"dims": [8]}, {}, "get_state_dim_per_tensor: it has 1 values for the 2 buffers"),
        ({"outers": [1]}, {}, "get_state_slice_outer_counts: it has 1 values for the 2"),
        ({"groups": [None]}, {}, "get_state_conv_shard_groups: it has 1 values for the 2"),
        ({"ids": [0]}, {}, "get_state_layer_ids: it has 1 values for the 2"),
        ({"dims": [7, 2]}, {}, "get_state_buf_infos: an item of 'layers.0.conv' has 48 bytes: no whole 1 rows of 7"),
        ({"groups": [[8, 8], None]}, {}, r"'layers.0.conv' has dim 8; rank 0 of 1 holds 16 of the groups \[8, 8\]"),
        ({"groups": [[5, 3], None]}, {"state_tp": (0, 2)}, "5 heads of 'layers.0.conv' cannot be shared by 2 ranks"),
        ({"groups": [[8], None]}, {"conv_heads": (2, 2)}, "has 1 groups; the geometry has heads for 2"),
        ({"groups": [[8], None]}, {"conv_heads": (3,)}, "8 channels of 'layers.0.conv' are no whole number of 3"),
        ({"dims": [4, 2], "outers": [3, 1]}, {}, "3 outer rows of units of 2 elements"),
        ({"outers": [0, 1]}, {}, "dim 8 and 0 outer rows"),
        ({"ids": [0, 0], "dims": [8, 2]}, {"state_tensors": ()}, "layer 0 has 2 buffers; the geometry knows 0"),
        ({"ids": [0, (1 << 32) - 1]}, {}, "layer 0 has 1 buffers"),
        ({"ids": [(1 << 32) - 1] * 2}, {}, "get_state_layer_ids: 2 buffers have no layer's id"),
    ],
)
def test_recurrent_state_that_cannot_be_sliced(more: Any, given: Any, cause: str) -> None:
    refused(cause, HybridPool(keys(1), [1, 1], states([0], **more)), geometry(2, kv_heads=2, **given))


def test_a_request_wide_state_that_is_sliced() -> None:
    held = states([0], ids=[0, 0, (1 << 32) - 1], dims=[8, 2, 4])
    held.tensors.append(noise(2, 4))
    refused("'ngram' belongs to no layer", HybridPool(keys(1), [1, 1], held), geometry(2, kv_heads=2))
    held.tensors.append(noise(2, 4))
    twice = States(held.tensors, [8, 2, 0, 0], ids=[0, 0, *[(1 << 32) - 1] * 2])
    refused("two buffers of one request-wide id", HybridPool(keys(1), [1, 1], twice), geometry(2, kv_heads=2))


def test_heads_that_do_not_divide_what_is_here() -> None:
    tensors = [StateTensor("ssm", "bfloat16", heads=4)]
    pool = HybridPool(keys(1), [1, 1], States([noise(2, 3)], [3], ids=[0]))
    refused("has dim 3 for 2 heads", pool, geometry(2, kv_heads=2, state_tensors=tensors, state_tp=(1, 2)))


def test_a_second_component_of_recurrent_state() -> None:
    pool = HybridPool(keys(1), [1, 1], states([0]))
    other = states([0])
    given = geometry(2, kv_heads=2)
    same = state.from_pools(pool, geometry=given, request_pool=RequestPool(pool.tensors, []))
    assert [each.component.name for each in same] == ["kv", "mamba"]
    refused(
        "RequestPool.get_state_buf_infos: it lists recurrent state that HybridPool does not",
        pool,
        given,
        request_pool=RequestPool(other.tensors, []),
    )
    empty = HybridPool(keys(1), [1, 1], States([], []))
    refused("HybridPool does not", empty, given, request_pool=RequestPool(other.tensors, []))
    refused("a second 'mamba'", keys(2), given, draft_pool=pool, draft_geometry=given)


def test_state_of_the_request_pool_whose_layers_nobody_names() -> None:
    held = states([0])
    refused(
        "RequestPool.get_state_buf_infos: it lists 2 buffers",
        keys(2),
        geometry(2, kv_heads=2),
        request_pool=held_in(held),
    )


def held_in(held: States) -> RequestPool:
    return RequestPool(held.tensors, held.dims)


def test_lists_that_nobody_reads() -> None:
    pool = keys(1)
    given = geometry(1, kv_heads=2)
    extra = noise(3, 8)
    for name in ("get_state_buf_infos", "get_qsa_pending_state_buf_infos", "get_strange_buf_infos"):
        setattr(pool, name, lambda: triples([extra]))
        refused(rf"KeysPool.{name}: it lists buffers that a pool of this kind is not known to have", pool, given)
        # The same bytes once more, or nothing, is no loss.
        for harmless in (lambda: triples(pool.k), lambda: ([], [], [])):
            setattr(pool, name, harmless)
            assert len(state.from_pools(pool, geometry=given)) == 1
        delattr(pool, name)
    hybrid = HybridPool(keys(1), [1, 1], states([0]))
    hybrid.full_kv_pool.scales = [extra, extra]
    refused("KeysPool.get_kv_scale_buf_infos", hybrid, geometry(2, kv_heads=2))


def test_index_keys() -> None:
    pool = SparsePool(keys(1), None, [noise(3, 6)])
    given = geometry(1, kv_heads=2, kinds=["sparse"])
    pool.index_kv_pool = object()
    refused("SparsePool.index_kv_pool: an index with values", pool, given)
    pool.index_kv_pool = None
    pool.index = []
    pool.index.extend([noise(3, 6), noise(3, 6)])
    refused("get_index_k_state_buf_infos: it lists 2 buffers; index_k of 1 layers", pool, given)
    bare = SimpleNamespace(page_size=4, index_k_pool=object(), get_sparse_kv_buf_infos=lambda: ([], [], []))
    refused("object.get_index_k_state_buf_infos: it has no list", bare, given)
    hybrid = HybridPool(latents(1), [1], states([0]))
    hybrid.use_dsa = True  # type: ignore[attr-defined]
    refused("LatentPool.get_state_buf_infos: it has no list of index keys", hybrid, geometry(2))
    fields = {"index_k": [PageField("k", 5)]}
    dsa = IndexedPool([noise(3, 4, 2)], [noise(3, 6)])
    refused("has 12 bytes; 4 rows of k 5 bytes do not fill it", dsa, geometry(1, fields=fields))
    latent: Any = {"kv": [("latent", None), ("index_k", None)]}
    dsa.latents.append(noise(3, 4, 2))
    refused("index keys that the list of pages does not have", dsa, geometry(1, groups=latent))


def test_open_pools_of_a_compressor() -> None:
    pool = IndexedPool([noise(3, 4, 2)], [noise(3, 6)], pool=2, extra=1, keys=[noise(4, 7)], scores=[noise(4, 6)])
    refused("get_compress_tail_buf_infos: item of entry 0: 14 bytes are no 3 slots", pool, geometry(1))
    pool.tails = [noise(4, 6)]
    refused("lists 1 buffers; key of 1 layers, then score of 1 layers would be 2", pool, geometry(1))
    pool.kpool_use_compress = False
    refused("get_compress_tail_buf_infos: it lists buffers that a pool of this kind", pool, geometry(1))


def test_pending_index_keys_without_their_layers() -> None:
    pool = QueryPool(keys(1), [1, 1], states([0]))
    pool.pending, pool.pending_ids = [noise(2, 4)], [(1 << 32) - 2]
    pool.compressed, pool.compressed_ids = [], []
    given = geometry(2, kv_heads=2)
    refused("QueryPool.get_qsa_pending_state_layer_ids: 1 buffers have no layer's id", pool, given)
    pool.pending_ids = []
    refused("have no layer's id", pool, given)
    pool.pending_ids = [1]
    pool.compressed, pool.compressed_ids = [noise(2, 4)] * 2, [1, 1]
    refused("get_qsa_compressed_state_layer_ids: layer 1 has 2 buffers", pool, given)


def test_compressed_pools() -> None:
    pool = compressed([0, 4])
    refused("get_state_buf_infos: it lists 2 buffers; swa of 2 layers, then c4_state of 1", pool, geometry(2))
    pool.kv = [noise(2, 4)] * 3
    refused("c4_kv of 1 layers, then c4_index_k of 1 layers, then c128_kv of 0 layers would be 2", pool, geometry(2))
    pool = compressed([0, 2])
    refused(r"layers \[1\] have ratios that no tensor", pool, geometry(2))
    pool = compressed([0])
    refused("end_layer: the pool holds layers", pool, geometry(2))
    refused("compression_ratios: it has 1 for 2 layers", pool, geometry(2, stage=(0, 1)))
    pool.c128 = [noise(2, 4)]
    refused("get_c128_kv_buf_infos: nobody says how many rows", pool, geometry(1))
    pool.c128, pool.swa, pool.ring, pool.unified_swa_ring_size = [], [], [noise(7, 4)], 4
    refused("entry 0 has 7 rows: no whole number of rings of 4", pool, geometry(1))
    del pool.end_layer
    refused("CompressedPool.end_layer: lists by compression ratio need", pool, geometry(1))
    pool = compressed([0])
    refused("it is 128; the geometry says 64 tokens a window", pool, geometry(1, window=64))
    pool.request = [noise(2, 4)]
    refused("get_request_state_buf_infos: it lists 1 buffers; state of 0 layers", pool, geometry(1))


def test_drafts() -> None:
    target, given = compressed([0]), geometry(1)
    refused("compression_ratios: the draft has none", target, given, draft_pool=latents(1))
    refused("compression_ratios: the model has none", latents(1), given, draft_pool=compressed([0]))
    draft = compressed([4])
    refused(r"the draft is not sliding-window only: it has ratios \[4\]", target, given, draft_pool=draft)
    draft = compressed([0])
    draft.full_to_swa_index_mapping = object()
    refused("full_to_swa_index_mapping: the draft translates", target, given, draft_pool=draft)
    draft = compressed([0])
    draft.sliding_window = 64
    refused("sliding_window: it is 64 for the draft, and 128 for the model", target, given, draft_pool=draft)
    draft = compressed([0])
    draft.ring = [noise(4, 4)]
    refused("only one keeps its windows in rings", target, given, draft_pool=draft)
    draft = compressed([])
    draft.layer_num = 1
    refused("compression_ratios: it has 0 for 1 draft layers", target, given, draft_pool=draft)
    draft = compressed([0])
    draft.kv = [noise(4, 4)]
    refused("get_contiguous_buf_infos: it lists 1 buffers", target, given, draft_pool=draft)
    draft = compressed([0])
    draft.valid_from = [noise(4, 1), noise(4, 1)]
    refused("get_swa_valid_from_buf_infos: it lists 2 buffers; one is known", target, given, draft_pool=draft)
    sliding = SlidingPool(keys(1), keys(1), 8)
    refused("a draft of kind 'swa' beside", keys(1), geometry(1, kv_heads=2), draft_geometry=given, draft_pool=sliding)
    refused("layer_num: the number of draft layers is not known", latents(1), given, draft_pool=SimpleNamespace())
    # Under decode context parallelism a draft has every position (§4.7): its own geometry says so.
    dealt = PoolGeometry(layers=1, dtype="bfloat16", partition=state.Partition("cyclic", 2, 1))
    refused("nobody says whether the draft's are too", latents(1), dealt, draft_pool=latents(1))
    both = state.from_pools(latents(1), geometry=dealt, draft_pool=latents(1), draft_geometry=geometry(1))
    assert [each.component.partition.kind for each in both] == ["cyclic", "all"]
    scaled = keys(1)
    scaled.scales = [noise(3, 2), noise(3, 2)]
    refused("get_kv_scale_buf_infos: it lists buffers", keys(1), geometry(1, kv_heads=2), draft_pool=scaled)


def test_metadata_rows_belong_to_the_last_stage() -> None:
    given = geometry(2, kv_heads=2, stage=(0, 1))
    refused("only the last pipeline stage", keys(1), given, aux={"token": np.zeros((2, 16), np.int32)})


@pytest.mark.parametrize(
    "wrong",
    [
        {"stage": (1, 3)},
        {"kinds": ["full"]},
        {"kinds": ["full", "half"]},
        {"tp": (2, 2)},
        {"state_tp": (-1, 2)},
        {"order": "hdn"},
        {"window": -1},
        {"request_ratio": 0},
        {"envelope": {"kv": [(0, 1)]}},
        {"envelope": {"kw": [(0, 1)]}, "unified": True},
        {"groups": {"nsa": [("index_k", None)]}},
        {"tp": 2},
        {"stage": (0, 1, 2)},
        {"state_tp": (0, 2.0)},
    ],
)
def test_geometry_that_contradicts_itself(wrong: Any) -> None:
    with pytest.raises(StateError):
        geometry(2, **wrong)


def test_an_element_type_that_nobody_knows() -> None:
    for dtype in ("int4", "object", "U", torch.bfloat16):
        given = PoolGeometry(layers=1, dtype=dtype)  # type: ignore[arg-type]
        with pytest.raises(StateError, match=f"no element type {dtype!r}"):
            state.from_pools(latents(1), geometry=given)
    (found,) = state.from_pools(latents(1), geometry=PoolGeometry(layers=1, dtype="float8_e4m3fn"))
    assert found.component.buffers[0].layout.itemsize == 1
