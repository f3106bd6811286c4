"""Who sends what to whom, in how many blocks, and what is said of tiny ones."""

from __future__ import annotations

from typing import Any

import pytest

from statelink.errors import ConfigError, MismatchError, RoomError, StateError
from statelink.plan import match
from statelink_explain import Layout, Model, Report, Side, explain, inventories, preset

STAGED = "'staging' in both links' configuration gathers them into large blocks"


def side(name: str = "llama-3-8b", instance: str = "instance", **layout: Any) -> Side:
    return Side(model=preset(name), layout=Layout(**layout), instance=instance)


def run(prefill: Side, decode: Side, tokens: int = 1024, prefix: int = 0) -> Report:
    return explain(prefill, decode, tokens=tokens, prefix=prefix)


def pairs(report: Report, component: str = "kv") -> dict[tuple[int, int], int]:
    return {(flow.source, flow.target): flow.nbytes for flow in report.flows if flow.component == component}


def marks(report: Report) -> set[str]:
    return {flow.mark for flow in report.flows}


KV = 1024 * 131_072


def test_heads_go_to_the_rank_that_holds_them() -> None:
    assert pairs(run(side(tp=4), side(tp=2))) == dict.fromkeys([(0, 0), (1, 0), (2, 1), (3, 1)], KV // 4)
    assert pairs(run(side(tp=2), side(tp=4))) == dict.fromkeys([(0, 0), (0, 1), (1, 2), (1, 3)], KV // 4)


def test_uneven_stages_send_their_layers() -> None:
    report = run(side(pp=3, stages=(20, 10, 2)), side())
    assert pairs(report) == {(0, 0): KV // 32 * 20, (1, 0): KV // 32 * 10, (2, 0): KV // 32 * 2}
    assert [rank.axes for rank in report.prefill] == [{"pp": 0}, {"pp": 1}, {"pp": 2}]


def test_even_stages_are_a_layer_longer_first() -> None:
    held = [len(each.component("kv").buffers) // 2 for each in inventories(side(pp=3))]
    assert held == [11, 11, 10]


def test_ranks_without_a_part_are_named_with_who_tells_them() -> None:
    latents = side("deepseek-v3.2", tp=16)
    idle = {rank.rank: rank.told_by for rank in run(latents, side("deepseek-v3.2"), tokens=64).prefill}
    assert set(idle.values()) == {None}  # replicas share the load
    tiny = Model.read({"name": "tiny", "layers": 1, "attention": {"heads": 1, "dim": 64}}, "model")
    prefill, decode = (Side(model=tiny, layout=Layout(tp=tp)) for tp in (4, 1))
    # All four ranks hold the one head, and a layer's keys and values go together.
    assert {rank.rank: (rank.nbytes, rank.told_by) for rank in run(prefill, decode, tokens=64).prefill} == {
        0: (16384, None),
        1: (0, 0),
        2: (0, 0),
        3: (0, 0),
    }


def test_context_parallel_prefill_sends_its_pages() -> None:
    report = run(side("deepseek-v3.2", cp=4), side("deepseek-v3.2"), tokens=64 * 10)
    row = 64 * 70_272
    assert pairs(report) == {(0, 0): 3 * row, (1, 0): 3 * row, (2, 0): 2 * row, (3, 0): 2 * row}


def test_decode_context_parallelism_deals_out_tokens() -> None:
    report = run(side("deepseek-v3.2"), side("deepseek-v3.2", tp=2, dcp=2), tokens=1024)
    assert pairs(report) == dict.fromkeys([(0, 0), (0, 1)], 512 * 70_272)
    assert {rank.nbytes for rank in report.decode} == {512 * (70_272 + 8_052)}


def test_pages_of_two_sizes_and_of_two_pools() -> None:
    report = run(side("gpt-oss-120b", page=48, window_page=32), side("gpt-oss-120b", page=64, window_page=16))
    totals = {total.component: total.nbytes for total in report.totals}
    assert totals == {"kv": 1024 * 36_864, "swa": 128 * 36_864}


def test_blocks_are_counted_for_consecutive_and_for_scattered_pages() -> None:
    (flow,) = run(side(), side()).flows
    assert (flow.blocks, flow.blocks_random) == (64, 64 * 16)
    assert marks(run(side(), side())) == {""}


def test_unequal_tp_shatters_nhd_pages_and_not_hnd_ones() -> None:
    report = run(side(tp=2), side())
    assert {(flow.blocks, flow.blocks_random) for flow in report.flows} == {(64 * 1024, 64 * 1024)}
    assert marks(report) == {
        "shatters: one block per token and buffer, of 1024 bytes; "
        f"equal tp, or order 'hnd' on both sides, moves in larger ones, or {STAGED}"
    }
    assert marks(run(side(tp=2, order="hnd"), side(order="hnd"))) == {""}


def test_two_orders_shatter_more() -> None:
    assert marks(run(side(order="hnd"), side())) == {
        "shatters: 8 blocks per token and buffer, of 256 bytes; pages of one order on both sides move in larger ones, "
        f"or {STAGED}"
    }


def test_small_pages_are_told_from_what_shatters() -> None:
    assert marks(run(side(page=1), side(page=1))) == {
        f"small pages: 2048 bytes a block where pages are scattered; {STAGED}"
    }


def test_dealt_out_tokens_shatter() -> None:
    found = marks(run(side("deepseek-v3.2"), side("deepseek-v3.2", tp=2, dcp=2)))
    assert f"shatters: one block per token and buffer, of 1152 bytes; {STAGED}" in found


def test_a_transposed_convolution_falls_into_rows() -> None:
    def blocks(transposed: bool) -> int:
        found = side("qwen3-next-80b", tp=2, transposed=transposed), side("qwen3-next-80b", transposed=transposed)
        return next(flow.blocks for flow in run(*found).flows if flow.component == "mamba")

    assert blocks(transposed=False) == 36 * (3 + 1)
    assert blocks(transposed=True) == 36 * (3 * 3 + 1)


def test_metadata_comes_from_the_last_stage() -> None:
    assert pairs(run(side(pp=3, aux_bytes=512), side(aux_bytes=512)), "aux") == {(2, 0): 512}


REFUSED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"dtype": "float8_e4m3fn"}),
    ({}, {"name": "llama-3-70b"}),
    ({"aux_bytes": 64}, {}),
    ({"name": "qwen3-next-80b"}, {"name": "qwen3-next-80b", "state_dtype": "bfloat16"}),
    ({"name": "qwen3-next-80b", "tp": 2}, {"name": "qwen3-next-80b", "conv_dtype": "float32"}),
    ({"name": "deepseek-v4-flash"}, {"name": "deepseek-v4-flash", "tp": 2, "dcp": 2}),
]


@pytest.mark.parametrize(("first", "second"), REFUSED)
def test_what_matching_refuses_is_refused_in_its_words(first: dict[str, Any], second: dict[str, Any]) -> None:
    prefill, decode = side(instance="p", **first), side(instance="d", **second)
    with pytest.raises(MismatchError) as expected:
        match(inventories(prefill), inventories(decode))
    with pytest.raises(MismatchError) as found:
        run(prefill, decode)
    assert found.value.reason == expected.value.reason
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"tp": 3}, "8 heads of 'layers.0.k' cannot be shared by 3 ranks"),
        ({"tp": 12}, "cannot be shared by 12 ranks"),
    ],
)
def test_a_model_that_cannot_be_spread_is_refused(layout: dict[str, Any], said: str) -> None:
    with pytest.raises(StateError, match=said) as error:
        run(side(**layout), side())
    assert f"'tp' in [layout] is {layout['tp']}: choose one that divides" in error.value.hint


@pytest.mark.parametrize(
    ("name", "layout", "said"),
    [
        (
            "llama-3-8b",
            {"pp": 3, "stages": (30, 1)},
            "2 stages of 31 layers together: pp is 3, and 'llama-3-8b' has 32",
        ),
        ("llama-3-8b", {"pp": 33}, "pp is 33: 'llama-3-8b' has 32 layers"),
        ("llama-3-8b", {"tp": 2, "cp": 2, "dcp": 2}, "a side has 'cp' or 'dcp'"),
        ("llama-3-8b", {"tp": 16, "dcp": 4}, "tp is 16, and 2 ranks hold each of 8 KV heads"),
        ("deepseek-v4-flash", {"page": 64}, "multiples of 128"),
        ("deepseek-v4-flash", {"c128_ring": 100}, "multiples of 128"),
        ("llama-3-8b", {"pool_tokens": 32}, "a pool holds a page at least"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(name: str, layout: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        side(name, **layout)
    assert said in str(error.value)


def test_a_request_has_to_fit_into_the_pools() -> None:
    with pytest.raises(ConfigError, match="raise 'pool_tokens' in the layout"):
        run(side(pool_tokens=512), side())
    small = side("gpt-oss-120b", pool_tokens=1024)
    assert run(small, small).nbytes == (1024 + 128) * 36_864


def test_a_prefix_ends_on_a_page_of_decode_whatever_prefill_has() -> None:
    with pytest.raises(RoomError, match="the prefix is 2000: a whole number from 0 to 1024 is expected"):
        run(side(), side(), prefix=2000)
    with pytest.raises(RoomError, match="prefix 32 ends inside a page"):
        run(side(page=16), side(page=64), prefix=32)
    assert run(side(page=64), side(page=16), prefix=32).nbytes == (1024 - 32) * 131_072
