"""What pools of each kind are described as: every element is the model's own, at the coordinates that it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from statelink import plan, state
from statelink.errors import MismatchError
from statelink.state import Described, Memory, PageField, PoolGeometry, StateTensor

from .fake_pools import (
    Array,
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
    UnifiedHybridPool,
    noise,
)
from .look import elements

PAGES, TOKENS, HEADS, DIM = 3, 4, 4, 2


def geometry(layers: int, **more: Any) -> PoolGeometry:
    return PoolGeometry(layers=layers, dtype="bfloat16", **more)


def names(described: Described) -> list[str]:
    return [buffer.name for buffer in described.component.buffers]


def kinds(found: list[Described]) -> list[tuple[str, str]]:
    return [(each.component.name, each.component.type) for each in found]


def agrees(described: Described, buffer: str, full: Array) -> set[tuple[int, ...]]:
    """Every described element is ``full``'s element of those coordinates; returns the coordinates."""
    inventory = state.describe("i", [described])
    found = elements(inventory, described.component.name, buffer)
    assert found
    for coordinate, raw in found.items():
        assert raw == full[coordinate].tobytes(), (buffer, coordinate)
    return set(found)


def whole(described: Described, buffer: str, array: Array) -> None:
    """The buffer holds exactly these items, byte by byte."""
    raw = array.view(np.uint8).reshape(len(array), -1)
    assert len(agrees(described, buffer, raw)) == raw.size


def cut(full: list[Array], heads: slice, layout: str | None = None) -> list[Array]:
    parts = [each[:, :, heads] for each in full]
    return [np.ascontiguousarray(each.swapaxes(1, 2) if layout == "hnd" else each) for each in parts]


def keys(layers: int, *, heads: int = HEADS, dim: int = DIM) -> list[Array]:
    return [noise(PAGES, TOKENS, heads, dim) for _ in range(layers)]


def some_states(layers: list[int], **more: Any) -> States:
    conv, ssm = [noise(2, 8, 3) for _ in layers], [noise(2, 2, 4, dtype="float32") for _ in layers]
    return States(conv + ssm, [8] * len(layers) + [2] * len(layers), ids=layers * 2, **more)


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


def test_states_of_unknown_dims_pair_only_with_their_namesakes_of_equal_width() -> None:
    """Copying whole slots would be right between equal widths, and only there."""
    sides: list[list[state.Inventory]] = []
    for width in (1, 2):
        ranks = []
        for rank in range(width):
            states = States([noise(2, 8 // width, 3), noise(2, 2 // width, 4, dtype="float32")], [], ids=[0, 0])
            pool = HybridPool(LatentPool([noise(PAGES, TOKENS, 2)]), [1], states)
            found = state.from_pools(pool, geometry=geometry(2, state_tp=(rank, width)))
            own = states.tensors[0].reshape(2, 1, -1)
            assert {where[1] for where in agrees(found[1], "layers.0.conv", np.repeat(own, width, axis=1))} == {rank}
            ranks.append(state.describe("i", found, rank=rank, ranks=width))
        plan.match(ranks, ranks)
        parts = plan.route(ranks, ranks)
        pairs = {(part.source, part.target) for part in parts for each in part.shares if each.component == "mamba"}
        assert pairs == {(rank, rank) for rank in range(width)}
        sides.append(ranks)
    for pair in (sides, sides[::-1]):
        with pytest.raises(MismatchError, match=r"mamba/layers\.0\.conv: extent of axis 'rank': \d on decode, \d on"):
            plan.match(*pair)


KEY, VALUE, KERNEL = 8, 16, 3


def grouped(full: Array, rank: int, width: int) -> Array:
    """One rank's channels: its part of key, key and value, one after the other."""
    edges = [(0, KEY), (KEY, 2 * KEY), (2 * KEY, 2 * KEY + VALUE)]
    parts = [full[:, a + (b - a) * rank // width : a + (b - a) * (rank + 1) // width] for a, b in edges]
    return np.ascontiguousarray(np.concatenate(parts, axis=1))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tp", [(0, 1), (1, 2), (3, 4)])
def test_hybrid_with_a_grouped_convolution(transposed: bool, tp: tuple[int, int]) -> None:
    rank, width = tp
    k, v = keys(2), keys(2)
    held = slice(rank * HEADS // width, (rank + 1) * HEADS // width)
    linear, slots = [0, 1, 3, 4], 3
    conv = [noise(slots, KEY * 2 + VALUE, KERNEL) for _ in linear]
    ssm = [noise(slots, 4, 6, dtype="float32") for _ in linear]
    local = [grouped(each, rank, width) for each in conv]
    if transposed:
        local = [np.ascontiguousarray(each.swapaxes(1, 2)) for each in local]
    heads = [np.ascontiguousarray(each[:, rank * 4 // width : (rank + 1) * 4 // width]) for each in ssm]
    states = States(
        local + heads,
        [32 // width] * 4 + [4 // width] * 4,
        [KERNEL if transposed else 1] * 4 + [1] * 4,
        [[KEY, KEY, VALUE]] * 4 + [None] * 4,
        linear * 2,
    )
    pool = HybridPool(KeysPool(cut(k, held), cut(v, held)), [2, 5, 2, 5], states)
    requests = RequestPool(states.tensors, states.dims)
    found = state.from_pools(pool, request_pool=requests, geometry=geometry(6, kv_heads=HEADS, tp=tp))
    assert kinds(found) == [("kv", "kv"), ("mamba", "mamba")]
    assert names(found[0]) == ["layers.2.k", "layers.5.k", "layers.2.v", "layers.5.v"]
    assert names(found[1])[2:6] == ["layers.3.conv", "layers.4.conv", "layers.0.ssm", "layers.1.ssm"]
    agrees(found[0], "layers.5.v", v[1])
    assert len(agrees(found[1], "layers.3.conv", conv[2])) == slots * 32 // width * KERNEL
    assert len(agrees(found[1], "layers.4.ssm", ssm[3])) == slots * 4 // width * 6
    # Every rank's view is of the same global item, whichever way the channels lie in memory.
    assert {buffer.layout.shape for buffer in found[1].component.buffers} == {(32, KERNEL), (4, 6)}
    assert found[1].component.buffers[0].layout.axes == ("channel", "unit")


def test_key_heads_that_are_fewer_than_ranks_are_replicated() -> None:
    # 2 key heads of 4 channels and 4 value heads of 4, over 4 ranks: rank 3 holds key head 1 and value head 3.
    full = noise(2, 32, 3)
    local = np.ascontiguousarray(np.concatenate([full[:, 4:8], full[:, 12:16], full[:, 28:32]], axis=1))
    states = States([local], [12], None, [[8, 8, 16]], [1])
    pool = HybridPool(LatentPool([noise(PAGES, TOKENS, 2)]), [0], states)
    given = geometry(2, tp=(3, 4), conv_heads=(2, 2, 4), state_tensors=[StateTensor("conv", "bfloat16")])
    found = state.from_pools(pool, geometry=given)
    assert {c for _, c, _ in agrees(found[1], "layers.1.conv", full)} == {*range(4, 8), *range(12, 16), *range(28, 32)}


def test_recurrent_heads_that_are_fewer_than_ranks_are_replicated() -> None:
    full = noise(2, 2, 4, dtype="float32")
    tensors = [StateTensor("ssm", "float32", heads=2)]
    pool = HybridPool(LatentPool([noise(PAGES, TOKENS, 2)]), [0], States([full[:, 1:].copy()], [1], ids=[1]))
    found = state.from_pools(pool, geometry=geometry(2, tp=(2, 4), state_tensors=tensors))
    assert {head for _, head, _ in agrees(found[1], "layers.1.ssm", full)} == {1}


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


def test_side_states_that_some_layers_have_and_the_history_of_the_request() -> None:
    conv, short, history = [noise(2, 8, 3) for _ in range(2)], noise(2, 4), noise(2, 6)
    ids = [0, 1, 1, (1 << 32) - 1]
    states = States([*conv, short, history], [8, 8, 0, 0], ids=ids)
    pool = HybridPool(LatentPool([noise(PAGES, TOKENS, 2)]), [2], states)
    tensors = [StateTensor("conv", "bfloat16"), StateTensor("short", "bfloat16", layers=(1,))]
    found = state.from_pools(pool, geometry=geometry(3, state_tensors=tensors))
    assert names(found[1]) == ["layers.0.conv", "layers.1.conv", "layers.1.short", "ngram"]
    agrees(found[1], "layers.1.short", short)
    whole(found[1], "ngram", history)
    assert found[1].component.buffers[3].layer is None


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


def planar(tokens: int, *widths: int) -> tuple[Array, list[Array]]:
    """Pages of all keys and then all scales, and each of them on its own."""
    parts = [noise(PAGES, tokens, width, dtype="uint8") for width in widths]
    return np.concatenate([part.reshape(PAGES, -1) for part in parts], axis=1), parts


@pytest.mark.parametrize("pool", [1, 2])
def test_index_keys_in_planar_pages_and_layers_that_share_them(pool: int) -> None:
    page, (k, scale) = planar(TOKENS // pool, 8, 4)
    shared = np.zeros((0, 4), np.uint8)
    # Four requests: rings of pool + 1 slots, keys of 6 bytes and scores of 2.
    tails = [noise(4, pool + 1, 6, dtype="uint8"), noise(0, pool + 1, 6, dtype="uint8")]
    scores = [noise(4, pool + 1, 2, dtype="uint8"), noise(0, pool + 1, 2, dtype="uint8")]
    more: dict[str, Any] = {"keys": tails, "scores": scores} if pool > 1 else {}
    latents = [noise(PAGES, TOKENS, 2) for _ in range(2)]
    made = IndexedPool(latents, [page, shared], start=4, pool=pool, extra=1, **more)
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


def test_pending_and_compressed_index_keys() -> None:
    pool = QueryPool(KeysPool(keys(2), keys(2)), [1, 3, 1, 3], some_states([0, 2]))
    pool.pending, pool.pending_ids = [noise(4, 6), noise(4, 6), noise(4, 2)], [1, 3, (1 << 32) - 2]
    pool.compressed, pool.compressed_ids = [noise(PAGES, 5), noise(PAGES, 5)], [1, 3]
    found = state.from_pools(pool, geometry=geometry(4, kv_heads=HEADS))
    assert [name for name, _ in kinds(found)] == ["kv", "mamba", "qsa_pending", "qsa_compressed"]
    assert names(found[2]) == ["layers.1.index_k", "layers.3.index_k", "rope_positions"]
    whole(found[2], "layers.3.index_k", pool.pending[1])
    whole(found[2], "rope_positions", pool.pending[2])
    whole(found[3], "layers.1.index_k", pool.compressed[0])
    assert (found[2].component.page, found[3].component.page) == (0, TOKENS)


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
    # semantics.md 6.4: what stage [4, 8) holds of the full model's lists.
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


def test_recurrent_state_of_the_request_pool_is_a_fallback() -> None:
    layers = [0, 2]
    states = some_states(layers)
    requests = RequestPool(states.tensors, states.dims)
    pool = KeysPool(keys(1), keys(1), 1)
    pool.start_layer = 0
    given = geometry(3, kv_heads=HEADS, kinds=["linear", "full", "linear"])
    found = state.from_pools(pool, request_pool=requests, geometry=given, aux={"token": noise(2, 32)})
    assert [name for name, _ in kinds(found)] == ["kv", "mamba", "aux"]
    assert names(found[1]) == ["layers.0.conv", "layers.2.conv", "layers.0.ssm", "layers.2.ssm"]
    agrees(found[1], "layers.2.ssm", states.tensors[3])


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
    """semantics.md 1.3: each source entry's place in the other list, keys and values apart."""
    listed = []
    for ids in (source, target):
        half = len(ids) // 2
        pool = HybridPool(KeysPool(keys(half), keys(half)), ids, States([], []))
        (found,) = state.from_pools(pool, geometry=geometry(37, kv_heads=HEADS))
        listed.append(names(found))
    assert [(number, listed[1].index(name)) for number, name in enumerate(listed[0])] == expected


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


def test_a_stage_without_a_kind_of_layer_leaves_the_component_out() -> None:
    pool = HybridPool(KeysPool(keys(1), keys(1)), [1, 1], States([], []))
    found = state.from_pools(pool, request_pool=RequestPool([], []), geometry=geometry(2, kv_heads=HEADS))
    assert [name for name, _ in kinds(found)] == ["kv"]


def test_addresses_with_the_highest_bit_set_are_unsigned() -> None:
    class Far:
        page_size = 4

        def get_contiguous_buf_infos(self) -> tuple[Array, list[int], list[int]]:
            return np.array([-(1 << 62)], np.int64), [64], [16]

    (found,) = state.from_pools(Far(), geometry=geometry(1, kind="npu:0"))
    assert found.regions == (state.Region((1 << 64) - (1 << 62), 64, "npu:0"),)
    assert found.component.buffers[0].count == 4
