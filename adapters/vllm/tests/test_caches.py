"""vLLM's caches: how each layout, kind of layer and width is described, and that the right bytes arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.caches import (
    BLOCKS,
    Cache,
    Rank,
    attention,
    hand,
    latent,
    make_cache,
    model_of,
    recurrent,
    sides,
)
from support.layers import HEADS, KINDS, LAYERS, TOKENS, blocks, heads_of, read, truth_of, write
from vllm.v1.kv_cache_interface import KVQuantMode, SinkFullAttentionSpec

from statelink import state
from statelink.errors import StatelinkError
from statelink_vllm.connector import Group, Model, describe_cache

pytestmark = pytest.mark.smoke


def described(cache: Cache, model: Model) -> tuple[list[state.Described], tuple[Group, ...]]:
    return describe_cache(cache.config, cache.tensors, model)


def full(width: int, layout: str, block: int, **more: Any) -> list[tuple[Cache, Any]]:
    """The ranks of a side with one group of full attention."""
    spec = attention(max(HEADS // width, 1), block)
    kernel = more.pop("kernel", None)
    return [(make_cache([(spec, LAYERS)], layout, kernel), model_of((n, width), HEADS, **more)) for n in range(width)]


@pytest.mark.parametrize("decode", [(1, "LBHNC", 16), (2, "LBNHC", 32), (8, "BLNHC", 16)])
@pytest.mark.parametrize("prefill", [(1, "LBHNC", 16), (2, "BLHNC", 16), (1, "LBNHC", 32), (2, "BHLNC", 32)])
@pytest.mark.parametrize("prefix", [0, 32])
def test_tokens_arrive_in_every_layout_width_and_block_size(prefill: Any, decode: Any, prefix: int) -> None:
    truth = truth_of(1, HEADS, 16)
    with sides(full(*prefill), full(*decode)) as (sources, targets):
        tables = blocks(1, -(-TOKENS // prefill[2])), blocks(2, -(-TOKENS // decode[2]))
        for rank in sources:
            write(rank, 0, tables[0], truth, range(TOKENS))
        untouched = [read(rank, 0, tables[1], range(prefix)) for rank in targets] if prefix else []
        hand(sources, targets, TOKENS, prefix, [tables[0]], [tables[1]])
        for rank in targets:
            arrived = read(rank, 0, tables[1], range(prefix, TOKENS))
            assert torch.equal(arrived, truth[list(LAYERS)][:, prefix:, heads_of(rank)])
        for rank, before in zip(targets, untouched, strict=prefix > 0) if prefix else ():
            here = read(rank, 0, tables[1], range(prefix))
            assert torch.equal(here.view(torch.int32), before.view(torch.int32))  # noise may be no number


@pytest.mark.parametrize("widths", [(1, 1), (2, 1), (1, 2)])
def test_opaque_pages_arrive_by_head(widths: tuple[int, int]) -> None:
    truth = truth_of(2, HEADS, 16)
    prefill, decode = (full(width, "LBHNC", 16, backend="CPU_ATTN") for width in widths)
    with sides(prefill, decode) as (sources, targets):
        tables = blocks(3, 5), blocks(4, 5)
        for rank in sources:
            assert rank.groups[0].component.buffers[0].layout.axes == ("head", "cell")
            write(rank, 0, tables[0], truth, range(TOKENS))
        hand(sources, targets, TOKENS, 0, [tables[0]], [tables[1]])
        for rank in targets:
            assert torch.equal(read(rank, 0, tables[1], range(TOKENS)), truth[list(LAYERS)][:, :, heads_of(rank)])


@pytest.mark.parametrize("widths", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("blocks_of", [(16, 16), (16, 32), (32, 16)])
def test_pages_of_which_the_operator_says_how_they_are_filled(
    widths: tuple[int, int], blocks_of: tuple[int, int]
) -> None:
    """All keys of a head before its values, as the stand-ins for a CPU's kernels have them."""
    truth = truth_of(13, HEADS, 16)
    prefill, decode = (
        full(width, "LBHNC", block, backend="CPU_ATTN", pages={"CPU_ATTN": "halves"})
        for width, block in zip(widths, blocks_of, strict=True)
    )
    with sides(prefill, decode) as (sources, targets):
        tables = [blocks(14 + n, -(-TOKENS // size)) for n, size in enumerate(blocks_of)]
        for rank in sources:
            for token in range(TOKENS):
                keys, values = halves(rank, tables[0], token)
                content = truth[list(LAYERS), token][:, heads_of(rank)]
                keys[:], values[:] = content[..., :8], content[..., 8:]
        hand(sources, targets, TOKENS, 0, [tables[0]], [tables[1]])
        for rank in targets:
            found = torch.stack([torch.cat(halves(rank, tables[1], token), dim=-1) for token in range(TOKENS)], dim=1)
            assert torch.equal(found, truth[list(LAYERS)][:, :, heads_of(rank)])


def halves(rank: Rank, table: Sequence[int], token: int) -> list[torch.Tensor]:
    """The key and the value of a token in all layers: views of ``[layers, heads, 8]``."""
    (one, *_), size = rank.tensors(0).values(), rank.cache.config.kv_cache_groups[0].kv_cache_spec.block_size
    whole = one.as_strided((len(LAYERS), *one.shape), (one.numel(), *one.stride()))
    page = whole[:, table[token // size]].view(len(LAYERS), one.shape[1], 2, size, 8)
    return [page[:, :, part, token % size] for part in range(2)]


def test_keys_and_values_are_described_as_arrays_of_their_own() -> None:
    """An engine that has them in separate arrays, tokens before heads, finds no difference."""
    shape = 9, 32, HEADS, 8
    other = {layer: (torch.zeros(shape), torch.zeros(shape)) for layer in LAYERS}
    apart = state.describe("other", [state.kv_pages(other, heads=HEADS)])
    for given in ({}, {"backend": "CPU_ATTN", "pages": {"CPU_ATTN": "halves"}}):
        fused = state.describe("vllm", described(*full(1, "LBHNC", 16, **given)[0])[0])
        assert apart.diff(fused) == []


def test_quantised_pages_are_not_taken_apart() -> None:
    spec = attention(HEADS, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD, state_content_bytes=68)
    [component], _ = described(make_cache([(spec, LAYERS)]), model_of())
    assert [buffer.name for buffer in component.component.buffers] == ["layers.0.kv", "layers.3.kv"]
    assert component.component.format == "pairs INT8_PER_TOKEN_HEAD"


def test_groups_of_one_type_are_numbered() -> None:
    window, states = attention(HEADS, window=32), recurrent("MAMBA1", (2, 8), (8, 4))
    chunks = attention(HEADS, chunk=64)
    groups = [(window, (0, 1)), (attention(HEADS), (2,)), (window, (3, 4)), (states, (5,)), (chunks, (6, 7))]
    components, _ = described(make_cache(groups), model_of())
    found = [(each.component.name, each.component.type) for each in components]
    assert found == [
        ("swa.0", "swa"),
        ("kv", "kv"),
        ("swa.1", "swa"),
        ("mamba", "mamba"),
        ("chunked_local", "chunked_local"),
    ]


def test_blocks_that_attention_splits_are_moved_in_its_parts() -> None:
    truth = truth_of(3, HEADS, 16)
    with sides(full(1, "LBHNC", 32, kernel=16), full(1, "LBHNC", 16)) as (sources, targets):
        assert (sources[0].groups[0].ratio, sources[0].groups[0].component.page) == (2, 16)
        tables = blocks(5, 3), blocks(6, 5)
        write(sources[0], 0, tables[0], truth, range(TOKENS))
        hand(sources, targets, TOKENS, 0, [tables[0]], [tables[1]])
        assert torch.equal(read(targets[0], 0, tables[1], range(TOKENS)), truth[list(LAYERS)])


@pytest.mark.parametrize("tokens", [20, 47, 48, 49, 63, 64, 65, 75])
def test_a_window_is_what_the_next_token_sees(tokens: int) -> None:
    """Decode computes the token after the state: with a window W it sees W - 1 tokens of the state."""
    window, truth = 32, truth_of(4, HEADS, 16)
    side = [(make_cache([(attention(HEADS), LAYERS), (attention(HEADS, window=window), (5, 6))]), model_of())]
    other = [(make_cache([(attention(HEADS), LAYERS), (attention(HEADS, window=window), (5, 6))]), model_of())]
    truth = torch.cat([truth, truth, truth])[:7]
    first = max(0, tokens - window + 1)
    with sides(side, other) as (sources, targets):
        count = -(-tokens // 16)
        tables = [blocks(7, 2 * count), blocks(8, 2 * count)]
        pairs = [(table[:count], table[count:]) for table in tables]
        for number, (_, behind) in enumerate(pairs):
            for gone in range(first // 16):  # vLLM has given these blocks back, on both sides
                behind[gone] = 0
            if number == 0:
                write(sources[0], 0, pairs[0][0], truth, range(tokens))
                write(sources[0], 1, pairs[0][1], truth, range(first, tokens))
        hand(sources, targets, tokens, 0, pairs[0], pairs[1])
        assert torch.equal(read(targets[0], 0, pairs[1][0], range(tokens)), truth[list(LAYERS)][:, :tokens])
        assert torch.equal(read(targets[0], 1, pairs[1][1], range(first, tokens)), truth[[5, 6]][:, first:tokens])


@pytest.mark.parametrize(
    ("prefill", "decode", "kernel", "tokens", "lacks"),
    [
        (32, 32, None, 84, False),
        (16, 32, None, 84, True),  # of tokens 32 to 63, those from 48 on come
        (16, 32, None, 96, False),  # the window begins and ends with a block
        (32, 16, None, 84, False),
        (32, 32, 16, 84, True),  # attention has two items for a block, and needs the second one
    ],
)
@pytest.mark.parametrize("width", [1, 2])
def test_a_block_that_lacks_tokens_in_front_of_a_window_is_named(
    prefill: int, decode: int, kernel: int | None, tokens: int, lacks: bool, width: int
) -> None:
    def side(block: int, width: int, kernel: int | None) -> list[tuple[Cache, Model]]:
        spec = attention(HEADS // width, block, window=32)
        return [(make_cache([(spec, LAYERS)], kernel=kernel), model_of((n, width), HEADS)) for n in range(width)]

    with sides(side(prefill, 1, None), side(decode, width, kernel)) as (sources, targets):
        tables = [[*range(1, 1 + -(-tokens // block))] for block in (prefill, decode)]
        rooms = hand(sources, targets, tokens, 0, [tables[0]], [tables[1]])
        for rank, room in zip(targets, rooms, strict=True):
            (group,) = rank.groups
            found = group.lacking(group.indices(tables[1], tokens, 0), room.report.moved["swa"].nbytes)
            assert found == ({2} if lacks else set())


def test_a_block_that_is_needed_and_gone_is_named() -> None:
    components, groups = described(make_cache([(attention(HEADS), LAYERS)]), model_of())
    assert len(components) == 1
    with pytest.raises(StatelinkError, match="'kv' is not held any more"):
        groups[0].indices([3, 0, 5], 48, 0)


@pytest.mark.parametrize("width", [1, 2])
def test_latents_are_the_same_on_every_rank(width: int) -> None:
    truth = truth_of(5, 1, 24)
    prefill = [(make_cache([(latent(), LAYERS)]), model_of((n, width), 1)) for n in range(width)]
    with sides(prefill, [(make_cache([(latent(32), LAYERS)]), model_of(heads=1))]) as (sources, targets):
        tables = blocks(9, 5), blocks(10, 3)
        for rank in sources:
            write(rank, 0, tables[0], truth, range(TOKENS))
        hand(sources, targets, TOKENS, 0, [tables[0]], [tables[1]])
        assert torch.equal(read(targets[0], 0, tables[1], range(TOKENS)), truth[list(LAYERS)])


# Recurrent layers: heads of 4 x 3 numbers; convolutions of two inputs.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("widths", [(1, 1), (2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("orders", [(False, False), (True, False), (True, True)])
def test_recurrent_states_are_cut_for_every_width_and_order(
    kind: str, widths: tuple[int, int], orders: tuple[bool, bool]
) -> None:
    layer = KINDS[kind]
    truth = layer.truth(groups=2, layers=1)
    prefill = layer.side(widths[0], orders[0], 1024)
    decode = layer.side(widths[1], orders[1], 2048 if widths[0] != widths[1] else 1024)
    with sides(prefill, decode) as (sources, targets):
        for rank in sources:
            for group, block in enumerate((3, 4)):
                for ours, right in layer.pairs(rank, group, block, truth, orders[0]):
                    ours[:] = right
        hand(sources, targets, TOKENS, 0, [[0, 0, 3], [0, 0, 4]], [[0, 6], [0, 7]])
        for rank in targets:
            for group, block in enumerate((6, 7)):
                for ours, right in layer.pairs(rank, group, block, truth, orders[1]):
                    assert torch.equal(ours, right)


def test_a_state_of_which_only_the_size_is_known_moves_between_equal_widths_only() -> None:
    def side(width: int) -> list[tuple[Cache, Any]]:
        spec = recurrent("GDN_ATTN", (2, 12 // width), (4 // width, 4, 3))  # 12 channels are fewer than the values
        return [(make_cache([(spec, (1,))]), model_of((n, width))) for n in range(width)]

    with sides(side(2), side(2)) as (sources, targets):
        for rank in sources:
            rank.tensors(0)[1][3] = torch.arange(rank.tensors(0)[1][3].numel()).to(torch.int8) + rank.tp[0]
        hand(sources, targets, TOKENS, 0, [[3]], [[5]])
        for source, target in zip(sources, targets, strict=True):
            assert torch.equal(source.tensors(0)[1][3], target.tensors(0)[1][5])
    with sides(side(2), side(1)) as (sources, targets), pytest.raises(StatelinkError, match="extent of axis 'rank'"):
        hand(sources, targets, TOKENS, 0, [[3]], [[5]])


def test_blocks_for_speculation_come_after_the_state() -> None:
    spec = recurrent("MAMBA1", (2, 8), (8, 4), num_speculative_blocks=2)
    _, groups = described(make_cache([(spec, (1,))]), model_of())
    assert groups[0].indices([0, 0, 9, 4, 5], TOKENS, 0).tolist() == [9]


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("stages", [(2, 1), (1, 2), (2, 2)])
def test_the_layers_of_a_pipelines_stages_arrive_where_they_are_held(stages: tuple[int, int], width: int) -> None:
    """Every rank has the layers of its stage; other numbers of stages have other layers together."""
    truth = truth_of(31, HEADS, 16)

    def side(count: int, width: int, block: int) -> list[tuple[Any, ...]]:
        spec = attention(HEADS // width, block)
        held = [LAYERS] if count == 1 else [(layer,) for layer in LAYERS]
        return [
            (make_cache([(spec, layers)]), model_of((rank, width), HEADS), (stage, count))
            for stage, layers in enumerate(held)
            for rank in range(width)
        ]

    with sides(side(stages[0], width, 16), side(stages[1], 1, 32)) as (sources, targets):
        tables = blocks(32, 5), blocks(33, 3)
        for rank in sources:
            write(rank, 0, tables[0], truth, range(TOKENS))
        hand(sources, targets, TOKENS, 0, [tables[0]], [tables[1]])
        for rank in targets:
            layers = list(rank.tensors(0))
            assert torch.equal(read(rank, 0, tables[1], range(TOKENS)), truth[layers])
        assert [layer for rank in targets for layer in rank.tensors(0)] == list(LAYERS)


def of_groups(*groups: tuple[Any, Sequence[int]]) -> list[tuple[Cache, Model]]:
    """The only rank of a side with such groups of layers."""
    return [(make_cache(groups), model_of())]


FULL, LONGER = (attention(HEADS), LAYERS), (attention(HEADS), (*LAYERS, 4))


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        (*(full(1, "LBHNC", block, backend="CPU_ATTN") for block in (16, 32)), "extent of axis 'cell'"),
        (
            *(full(1, "LBHNC", 16, backend=name) for name in ("FLASH_ATTN", "CPU_ATTN")),
            "kv: format: 'CPU_ATTN' on decode, '' on prefill",
        ),
        # Both servers need the same draft model: what it computed of the prompt is state, too.
        (of_groups(FULL), of_groups(LONGER), r"kv/layers\.4\..*present on decode, absent on prefill"),
        (of_groups(LONGER), of_groups(FULL), r"kv/layers\.4\..*absent on decode, present on prefill"),
        (
            of_groups(FULL),
            of_groups(FULL, (attention(HEADS, window=32), (4,))),
            r"component swa \(type swa\).*present on decode, absent on prefill",
        ),
    ],
    ids=["sizes", "backends", "a layer more on decode", "a layer more on prefill", "a group more"],
)
def test_servers_that_do_not_fit_are_refused_by_name(prefill: Any, decode: Any, said: str) -> None:
    with sides(prefill, decode) as (one, other), pytest.raises(StatelinkError, match=said):
        hand(one, other, 16, 0, [[1]], [[1], [2]])


def test_a_layer_that_shares_a_cache_is_listed_once() -> None:
    cache = make_cache([(attention(HEADS), LAYERS)])
    cache.config.kv_cache_groups[0].layer_names.append("model.layers.9.attn")
    cache.tensors["model.layers.9.attn"] = cache.tensors["model.layers.3.attn"]
    components, _ = described(cache, model_of())
    assert [buffer.layer for buffer in components[0].component.buffers] == [0, 0, 3, 3]


def _with_sinks() -> Cache:
    spec = SinkFullAttentionSpec(block_size=16, num_kv_heads=HEADS, head_size=8, dtype=torch.float32, sink_len=16)
    return make_cache([(spec, LAYERS)])


def _of_no_group() -> Cache:
    cache = make_cache([(attention(HEADS), LAYERS)])
    return Cache(cache.config, {**cache.tensors, "model.layers.9.attn": torch.zeros(BLOCKS, HEADS, 16, 16)})


def _twice() -> Cache:
    cache = make_cache([(attention(HEADS), LAYERS)])
    cache.config.kv_cache_groups[0].layer_names[1] = "draft.layers.0.attn"
    first, second = cache.tensors.values()
    return Cache(cache.config, {"model.layers.0.attn": first, "draft.layers.0.attn": second})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_with_sinks, "specification is SinkFullAttentionSpec"),
        (_of_no_group, r"layers of no group: model\.layers\.9\.attn"),
        (_twice, "two layers of group 'kv' have one number"),
        (lambda: make_cache([(attention(HEADS, num_head_slots=8), LAYERS)]), "pack their heads"),
    ],
)
def test_what_cannot_be_described_is_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(StatelinkError, match=said):
        described(make(), model_of())


def test_a_number_of_heads_that_nobody_knows_is_refused() -> None:
    with pytest.raises(StatelinkError, match="the number of KV heads of group 'kv' in the whole model is not known"):
        described(make_cache([(attention(1), LAYERS)]), model_of((0, 2), 8))


def test_groups_have_the_same_bytes_and_one_region() -> None:
    spec = recurrent("MAMBA1", (2, 8), (8, 4), page=attention(HEADS).page_size_bytes)
    cache = make_cache([(spec, (1, 2)), (attention(HEADS), LAYERS)])
    inventory = state.describe("p", described(cache, model_of())[0])
    assert len(inventory.regions) == 1
    assert [each.type for each in inventory.components] == ["mamba", "kv"]
    assert len({each.buffers[0].offset for each in inventory.components}) == 1
