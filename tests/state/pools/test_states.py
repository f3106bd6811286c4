"""Recurrent state and pending index keys: sliced as the lists and the geometry say, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from statelink import plan, state
from statelink.errors import MismatchError
from statelink.state import StateTensor

from .fakes import (
    Array,
    HybridPool,
    KeysPool,
    LatentPool,
    QueryPool,
    RequestPool,
    States,
    keys_pool,
    noise,
    some_states,
)
from .reading import HEADS, PAGES, TOKENS, agrees, cut, geometry, keys, kinds, names, refused, whole


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


@pytest.mark.parametrize("groups", [[None], [[16, 4, 4]]])
def test_blocks_that_the_geometry_names(groups: list[Any]) -> None:
    # 8 heads of x, and one group of B and of C, over 4 ranks: rank 2 holds heads 4 and 5, and all of B and C.
    full = noise(2, 24, 3)
    held = {*range(8, 12), *range(16, 24)}
    states = States([np.ascontiguousarray(full[:, sorted(held)])], [12], None, groups, [1])
    pool = HybridPool(LatentPool([noise(PAGES, TOKENS, 2)]), [0], states)
    tensors = [StateTensor("conv", "bfloat16", blocks=[(16, 8), (4, 1), (4, 1)])]
    found = state.from_pools(pool, geometry=geometry(2, tp=(2, 4), state_tensors=tensors))
    assert {c for _, c, _ in agrees(found[1], "layers.1.conv", full)} == held
    assert found[1].component.buffers[0].layout.shape == (24, 3)


def test_recurrent_heads_that_are_fewer_than_ranks_are_replicated() -> None:
    full = noise(2, 2, 4, dtype="float32")
    tensors = [StateTensor("ssm", "float32", heads=2)]
    pool = HybridPool(LatentPool([noise(PAGES, TOKENS, 2)]), [0], States([full[:, 1:].copy()], [1], ids=[1]))
    found = state.from_pools(pool, geometry=geometry(2, tp=(2, 4), state_tensors=tensors))
    assert {head for _, head, _ in agrees(found[1], "layers.1.ssm", full)} == {1}


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


def blocks(*given: tuple[int, int]) -> dict[str, Any]:
    """A geometry that names the blocks of the convolution."""
    return {"state_tensors": [StateTensor("conv", "bfloat16", blocks=given), StateTensor("ssm", "float32")]}


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
        (
            {"groups": [[4, 4], None]},
            blocks((8, 1)),
            r"'layers.0.conv' has the groups \[4, 4\]; the geometry has the blocks \[\(8, 1\)\]",
        ),
        ({}, blocks((8, 3)), "8 channels of 'layers.0.conv' are no whole number of 3"),
        ({}, blocks((9, -1), (-1, 1)), "9 channels of 'layers.0.conv' are no whole number of -1"),
        ({}, blocks((9, 1), (-1, 1)), "-1 channels of 'layers.0.conv' are no whole number of 1"),
        ({}, blocks((6, 2), (4, 1)), r"'layers.0.conv' has dim 8; rank 0 of 1 holds 10 of the groups \[6, 4\]"),
        ({"dims": [4, 2], "outers": [3, 1]}, {}, "3 outer rows of units of 2 elements"),
        ({"outers": [0, 1]}, {}, "dim 8 and 0 outer rows"),
        ({"ids": [0, 0], "dims": [8, 2]}, {"state_tensors": ()}, "layer 0 has 2 buffers; the geometry knows 0"),
        ({"ids": [0, (1 << 32) - 1]}, {}, "layer 0 has 1 buffers"),
        ({"ids": [(1 << 32) - 1] * 2}, {}, "get_state_layer_ids: 2 buffers have no layer's id"),
    ],
)
def test_recurrent_state_that_cannot_be_sliced(more: Any, given: Any, cause: str) -> None:
    refused(cause, HybridPool(keys_pool(1), [1, 1], some_states([0], **more)), geometry(2, kv_heads=2, **given))


def test_a_request_wide_state_that_is_sliced() -> None:
    held = some_states([0], ids=[0, 0, (1 << 32) - 1], dims=[8, 2, 4])
    held.tensors.append(noise(2, 4))
    refused("'ngram' belongs to no layer", HybridPool(keys_pool(1), [1, 1], held), geometry(2, kv_heads=2))
    held.tensors.append(noise(2, 4))
    twice = States(held.tensors, [8, 2, 0, 0], ids=[0, 0, *[(1 << 32) - 1] * 2])
    refused("two buffers of one request-wide id", HybridPool(keys_pool(1), [1, 1], twice), geometry(2, kv_heads=2))


def test_heads_that_do_not_divide_what_is_here() -> None:
    tensors = [StateTensor("ssm", "bfloat16", heads=4)]
    pool = HybridPool(keys_pool(1), [1, 1], States([noise(2, 3)], [3], ids=[0]))
    refused("has dim 3 for 2 heads", pool, geometry(2, kv_heads=2, state_tensors=tensors, state_tp=(1, 2)))


def test_a_second_component_of_recurrent_state() -> None:
    pool = HybridPool(keys_pool(1), [1, 1], some_states([0]))
    other = some_states([0])
    given = geometry(2, kv_heads=2)
    same = state.from_pools(pool, geometry=given, request_pool=RequestPool(pool.tensors, []))
    assert [each.component.name for each in same] == ["kv", "mamba"]
    refused(
        "RequestPool.get_state_buf_infos: it lists recurrent state that HybridPool does not",
        pool,
        given,
        request_pool=RequestPool(other.tensors, []),
    )
    empty = HybridPool(keys_pool(1), [1, 1], States([], []))
    refused("HybridPool does not", empty, given, request_pool=RequestPool(other.tensors, []))
    refused("a second 'mamba'", keys_pool(2), given, draft_pool=pool, draft_geometry=given)


def test_state_of_the_request_pool_whose_layers_nobody_names() -> None:
    held = some_states([0])
    refused(
        "RequestPool.get_state_buf_infos: it lists 2 buffers",
        keys_pool(2),
        geometry(2, kv_heads=2),
        request_pool=RequestPool(held.tensors, held.dims),
    )


def test_pending_index_keys_without_their_layers() -> None:
    pool = QueryPool(keys_pool(1), [1, 1], some_states([0]))
    pool.pending, pool.pending_ids = [noise(2, 4)], [(1 << 32) - 2]
    pool.compressed, pool.compressed_ids = [], []
    given = geometry(2, kv_heads=2)
    refused("QueryPool.get_qsa_pending_state_layer_ids: 1 buffers have no layer's id", pool, given)
    pool.pending_ids = []
    refused("have no layer's id", pool, given)
    pool.pending_ids = [1]
    pool.compressed, pool.compressed_ids = [noise(2, 4)] * 2, [1, 1]
    refused("get_qsa_compressed_state_layer_ids: layer 1 has 2 buffers", pool, given)
