"""SGLang's real pools, changed as other devices and models have them: described exactly, or refused by name."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.deepseek_v4 import make_v4, switched
from support.newest import OLDER, WHY
from support.pools import HEADS, PAGE, Made, listed, make, make_with_draft
from support.sides import FAILED, Lists, ask, reason, rooms, sides, until

from statelink.errors import StateError
from statelink_sglang.backend import describe_pools

if TYPE_CHECKING:
    from statelink.state import Described

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("sglang_context")]

Triples = tuple[list[int], list[int], list[int]]
NGRAM = (1 << 32) - 1
"""SGLang's id of a state that belongs to no layer."""


def found(made: Made) -> dict[str, Described]:
    return {each.component.name: each for each in describe_pools(made.pools, made.kv_args)[0]}


def again(made: Made, layers: int = 0, window: int = 0) -> Made:
    """The same pools, and what SGLang lists of them after a change."""
    pools = made.pools
    layers = layers or pools.config.num_hidden_layers
    return listed(pools.pages, pools.requests, layers, heads=HEADS, window=window, tp=pools.tp, draft=pools.draft)


def triples(*tensors: torch.Tensor) -> Triples:
    return (
        [each.data_ptr() for each in tensors],
        [each.nbytes for each in tensors],
        [each[0].nbytes for each in tensors],
    )


def names(described: Described) -> list[str]:
    return [buffer.name for buffer in described.component.buffers]


def at(described: Described, name: str, item: int, *where: int) -> bytes:
    """The bytes of one element, read through the numbers of the description alone."""
    buffer = next(each for each in described.component.buffers if each.name == name)
    (slab,) = buffer.layout.slabs
    place = sum((w - first) * stride for w, first, stride in zip(where, slab.start, slab.strides, strict=True))
    base = described.regions[buffer.region].address + buffer.offset + item * buffer.stride
    return ctypes.string_at(base + slab.offset + place, buffer.layout.itemsize)


@pytest.mark.parametrize("order", ["nhd", "hnd"])
def test_each_element_of_a_page_is_where_the_pools_layout_says(order: str) -> None:
    """On a GPU, some kernels keep the heads of a page before its tokens."""
    made = make("mha", (1, 2))
    pool = made.pools.pages
    pool.kv_cache_layout = order
    values = pool.v_buffer[1].view(torch.int32)
    values.copy_(torch.arange(values.numel(), dtype=torch.int32).view(values.shape))
    pages = values.numpy().reshape((-1, PAGE, 2, 8) if order == "nhd" else (-1, 2, PAGE, 8))
    kv = found(made)["kv"]
    for page, token, head, dim in [(0, 0, 2, 0), (1, 5, 3, 7), (3, 15, 2, 1), (64, 9, 3, 4)]:
        expected = pages[page, token, head - 2, dim] if order == "nhd" else pages[page, head - 2, token, dim]
        assert at(kv, "layers.1.v", page, token, head, dim) == expected.tobytes()


def test_scales_of_blocks_move_between_equal_tp_only() -> None:
    """They are in the order of a rank's own kernel."""
    with sides("mxfp8", 2, 1) as (sources, (target,)):
        room = next(rooms)
        for source in sources:
            source.sender(room)
        receiver = ask(target, room, Lists.draw(target, PAGE, 1), PAGE)
        until(receiver.poll, FAILED)
        assert "block_scale/layers.0-1.{k_scale,v_scale}: extent of axis 'rank': 1 on decode, 2 on prefill" in str(
            reason(receiver)
        )


def test_a_layer_that_shares_the_index_of_another_keeps_its_place() -> None:
    made = make("dsa")
    index = made.pools.pages.get_state_buf_infos()
    made.pools.pages.get_state_buf_infos = lambda: tuple([*each[:1], 0] for each in index)
    described = found(again(made))["dsa"]
    assert names(described) == ["layers.0.index_k", "layers.1.index_k"]
    assert [buffer.count > 0 for buffer in described.component.buffers] == [True, False]


def test_recurrent_state_that_only_the_pool_of_requests_has() -> None:
    made = make("mha", layers=3)
    described = found(again(made._replace(pools=made.pools._replace(requests=make("gdn").pools.requests))))
    assert [*described] == ["kv", "mamba", "aux"]
    assert names(described["mamba"]) == [f"layers.{layer}.{part}" for part in ("conv", "ssm") for layer in range(3)]


@pytest.mark.skipif(OLDER, reason=WHY)
def test_a_state_that_belongs_to_no_layer_moves_whole() -> None:
    made, history = make("gdn"), torch.zeros((9, 6), dtype=torch.int64)
    entry = ("ple_ngram", history, None, NGRAM)
    sibling = SimpleNamespace(iter_transfer_state_entries=lambda: iter([entry]))
    vars(made.pools.requests.mamba_pool)["_slot_siblings"] = (sibling,)
    buffer = found(again(made))["mamba"].component.buffers[-1]
    assert (buffer.name, buffer.layer, buffer.count, buffer.layout.shape) == ("ngram", None, 9, (48,))


def test_a_list_of_known_bytes_or_of_none_is_no_loss() -> None:
    made = make("mha")
    pool = made.pools.pages
    pool.get_strange_buf_infos = lambda: triples(pool.k_buffer[1])
    pool.get_empty_buf_infos = lambda: ([], [], [])
    pool.get_state_of_buf_infos = lambda which: triples(torch.zeros(2, 2))
    assert [*found(made)] == ["kv", "aux"]


SPARE = torch.zeros((4, 8))


def attribute(name: str, value: Any) -> Callable[[Any], None]:
    return lambda pool: setattr(pool, name, value)


def lists(name: str, *value: Any) -> Callable[[Any], None]:
    """A method that returns these three lists, or one value."""
    return attribute(name, lambda: value if len(value) > 1 else value[0])


def raises(name: str, error: Exception) -> Callable[[Any], None]:
    def method() -> Any:
        raise error

    return attribute(name, method)


def both(*changes: Callable[[Any], None]) -> Callable[[Any], None]:
    def change(pool: Any) -> None:
        for each in changes:
            each(pool)

    return change


DIMS = lists("get_state_dim_per_tensor", [8] * 6)
RATIOS = attribute("compression_ratios", [0, 0, 4, 128, 4, 2, 0])
KV, STATE, SCALES = "get_contiguous_buf_infos", "get_state_buf_infos", "get_kv_scale_buf_infos"


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("mha", attribute("kv_cache_layout", "vectorized_5d"), "kv_cache_layout: pages in the layout 'vectorized_5d'"),
        ("mha", attribute("head_num", 2), "head_num: it is 2; rank 0 of 1 holds 4 of the 4 heads"),
        ("mha", attribute("start_layer", 1), "start_layer: it is 1; by this pipeline stage it is 0"),
        ("mha", attribute("index_k_pool", SPARE), "does not say which layers of the model are sparse"),
        ("mha", attribute(KV, None), f"{KV}: it does not have it: this is no pool of pages"),
        ("mha", raises(KV, NotImplementedError()), f"{KV}: it raised NotImplementedError"),
        ("mha", lists(KV, [16], [64], [16]), "lists 1 buffers; k of 2 layers, then v of 2 layers would be 4"),
        ("mha", lists(KV, [16] * 4, [64] * 4, [18] * 4), r"has 18 bytes: no whole \[16 tokens, 4 heads, dim\]"),
        ("mha", lists(KV, [16], [64, 64], [16]), "addresses, lengths and item sizes are expected"),
        ("mha", lists(KV, 3), "addresses, lengths and item sizes are expected"),
        ("mha", lists(KV, [0], [64], [16]), "entry 0 has 64 bytes at 0x0 in items of 16"),
        ("mha", lists(KV, [16], [64], [128]), "entry 0 has 64 bytes at 0x10 in items of 128"),
        ("mha", lists(KV, [16], [-64], [16]), "entry 0 has -64 bytes at 0x10"),
        (
            "mha",
            lists("get_strange_buf_infos", triples(SPARE)),
            "get_strange_buf_infos: it lists buffers that a pool of",
        ),
        ("mha", lists(STATE, triples(SPARE)), f"{STATE}: it lists buffers that a pool of this kind is not known to"),
        ("mha", raises(SCALES, RuntimeError("freed")), f"{SCALES}: it raised RuntimeError: freed"),
        ("swa", attribute("layers_mapping", None), "layers_mapping: it does not say which layers have a window"),
        ("swa", attribute("sliding_window", 64), "sliding_window: it is 64; the scheduler says 32 tokens a window"),
        ("swa", raises(SCALES, AttributeError("no scales", name="k_scale", obj=SPARE)), "no scales"),
        ("hybrid", lists("get_kv_layer_ids", [3]), "it has 1 values for the 2 buffers of get_contiguous_buf_infos"),
        ("hybrid", lists("get_kv_layer_ids", [2, 3]), r"layer 2 has 1 buffers; 2 are known \(k, v\)"),
        ("hybrid", lists("get_kv_layer_ids", [9, 9]), r"layer 9 is not in \[0, 4\)"),
        ("hybrid", lists("get_kv_layer_ids", []), "lists 2 buffers; k of 0 layers, then v of 0 layers would be 0"),
        ("hybrid", lists("get_state_dim_per_tensor", []), "does not say which axis of each tensor is shared out"),
        ("hybrid", lists("get_state_dim_per_tensor", [7] * 6), "an item of 'layers.0.conv' has .* rows of 7 units"),
        ("hybrid", lists("get_state_dim_per_tensor", [0] * 6), "'layers.0.conv' has dim 0 and 1 outer rows"),
        ("hybrid", lists("get_state_layer_ids", [NGRAM] * 6), f"layer {NGRAM} has 6 buffers; 1 are known"),
        ("hybrid", lists("get_state_layer_ids", [0] * 6), r"layer 0 has 6 buffers; 2 are known \(conv, ssm\)"),
        ("gdn", both(DIMS, lists("get_state_slice_outer_counts", [3] * 6)), "has 3 outer rows of units of 12 elements"),
        (
            "dsa",
            lists("get_compress_tail_buf_infos", triples(SPARE)),
            "get_compress_tail_buf_infos: it lists 1 buffers",
        ),
    ],
)
def test_what_cannot_be_described_is_refused_by_name(kind: str, change: Callable[[Any], None], said: str) -> None:
    made = make(kind)
    change(made.pools.pages)
    with pytest.raises(StateError, match=said):
        describe_pools(made.pools, made.kv_args)


@pytest.mark.parametrize(
    ("kind", "tp", "said"),
    [
        ("gdn", (3, 4), r"'layers.0.conv' has dim 32; rank 3 of 4 holds 24 of the groups \[16, 16, 64\]"),
        ("mha", (0, 3), "4 heads of 'kv' cannot be shared by 3 ranks"),
    ],
)
def test_ranks_among_which_state_cannot_be_shared_out(kind: str, tp: tuple[int, int], said: str) -> None:
    made = make(kind, tp)
    with pytest.raises(StateError, match=said):
        describe_pools(made.pools, made.kv_args)


def test_state_of_the_requests_that_the_pool_of_pages_lacks() -> None:
    made = make("gdn")
    made.pools.requests.get_state_buf_infos = lambda: triples(SPARE)
    with pytest.raises(StateError, match="it lists recurrent state that HybridLinearKVPool does not have"):
        describe_pools(made.pools, made.kv_args)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (attribute("page_size", 1), "page_size: it is 1; the model's is 16 tokens a page"),
        (attribute("layer_num", 0), "layer_num: the number of draft layers is not known"),
        (lists(SCALES, triples(SPARE)), f"{SCALES}: it lists buffers that a pool of this kind"),
        (attribute("compression_ratios", [0]), "compression_ratios: the model has none"),
        (both(attribute("full_kv_pool", SPARE), attribute("mamba_pool", SPARE)), "a draft of the kind 'hybrid'"),
    ],
)
def test_drafts_that_are_refused(change: Callable[[Any], None], said: str) -> None:
    made = make_with_draft("mla")
    change(made.pools.draft)
    with pytest.raises(StateError, match=said):
        describe_pools(made.pools, made.kv_args)


@pytest.mark.skipif(OLDER, reason=WHY)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (attribute("compression_ratios", [4]), r"the draft is not sliding-window only: it has ratios \[4\]"),
        (attribute("compression_ratios", None), "compression_ratios: the draft has none"),
        (attribute("compression_ratios", []), "compression_ratios: it has 0 for 1 draft layers"),
        (attribute("full_to_swa_index_mapping", None), "translates to the sliding pool in another way than the model"),
        (attribute("sliding_window", 64), "sliding_window: it is 64 for the draft, and 128 for the model"),
        (lists(KV, triples(SPARE)), f"{KV}: it lists 1 buffers"),
        (lists("get_swa_valid_from_buf_infos", triples(SPARE, SPARE)), "swa_valid_from of 1 layers would be 1"),
        (lists("get_unified_swa_ring_buf_infos", triples(SPARE)), "get_unified_swa_ring_buf_infos: it lists buffers"),
    ],
)
def test_drafts_beside_compressed_attention_that_are_refused(change: Callable[[Any], None], said: str) -> None:
    with switched("dspark") as variant:
        made = make_v4(variant)
        change(made.pools.draft)
        with pytest.raises(StateError, match=said):
            describe_pools(made.pools, made.kv_args)


@pytest.mark.skipif(OLDER, reason=WHY)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (both(RATIOS, attribute("sources_by_ratio", None)), r"layers \[5\] have ratios that no tensor"),
        (attribute("compression_ratios", [0, 0, 4]), "compression_ratios: it has 3 for 6 layers of the model"),
        (attribute("end_layer", 4), r"the pool holds layers \[0, 4\); the stage's are \(0, 6\)"),
        (attribute("sliding_window", 64), "sliding_window: it is 64; the scheduler says 128 tokens a window"),
        (lists(STATE, triples(SPARE)), "lists 1 buffers; swa of 6 layers, then c4_state of 2 layers, then"),
        (lists("get_request_state_buf_infos", triples(SPARE)), "lists 1 buffers; state of 2 layers would be 2"),
        (lists("get_c128_kv_buf_infos", triples(SPARE)), "get_c128_kv_buf_infos: it lists buffers"),
    ],
)
def test_pools_of_compressed_attention_that_are_refused(change: Callable[[Any], None], said: str) -> None:
    with switched("plain") as variant:
        made = make_v4(variant)
        change(made.pools.pages)
        with pytest.raises(StateError, match=said):
            describe_pools(made.pools, made.kv_args)


@pytest.mark.skipif(OLDER, reason=WHY)
def test_the_format_says_the_layout_and_the_pages_of_windows() -> None:
    with switched("plain") as variant:
        made = make_v4(variant)
        pool = made.pools.pages
        pool.pd_kv_layout, pool.swa_page_size = lambda: "v41", 4 * pool.swa_kv_pool.page_size
        formats = {each.component.format for name, each in found(again(made, window=128)).items() if name != "aux"}
        assert formats == {f"pd_kv_layout=v41; windows in pages of {pool.swa_kv_pool.page_size}"}
