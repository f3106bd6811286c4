"""Every preset, through the planner, against numbers worked out by hand from the models' public configurations."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from statelink.errors import ConfigError
from statelink_explain import Layout, Report, Side, explain, inventories, preset, presets

TOKENS = 8192

# Bytes of a request of 8192 tokens, decode on one rank; element sizes: bfloat16 2, float32 4, float8 1.
BY_HAND = {
    # 32 layers, K and V, 8 heads of 128
    "llama-3-8b": {"kv": 8192 * 131_072},
    # 80 layers
    "llama-3-70b": {"kv": 8192 * 327_680},
    # 12 of 48 layers with 2 heads of 256; 36 with 8192 channels × 3 taps and 32 × 128 × 128
    "qwen3-next-80b": {"kv": 8192 * 24_576, "mamba": 36 * (49_152 + 2_097_152)},
    # 61 layers of 576 elements; an index key of 128 bytes and a scale of 4
    "deepseek-v3.2": {"kv": 8192 * 70_272, "dsa": 8192 * 8_052},
    # 21 layers of ratio 4, 20 of ratio 128, a row of 512 elements, an index row of 128; 43 windows, in a page of 256;
    # 21 × 4 rows of 2 × 2 × (512 + 128) float32; no open group of 128
    "deepseek-v4-flash": {
        "dsv4": 21 * 2048 * (1024 + 256) + 20 * 64 * 1024,
        "swa": 43 * 256 * 1024,
        "dsv4_c4_state": 21 * 4 * 10_240,
        "c128_state": 0,
    },
    # 18 layers with 8 heads of 64, 18 of the same with a window of 128
    "gpt-oss-120b": {"kv": 8192 * 36_864, "swa": 128 * 36_864},
    # 4 of 32 layers; 28 with 8192 channels × 3 taps and 8192 × 16
    "jamba-v0.1": {"kv": 8192 * 16_384, "mamba": 28 * (49_152 + 524_288)},
    # 3 of 32 layers; 29 with (8192 + 128 + 128) channels × 3 taps and 128 × 64 × 128
    "bamba-9b": {"kv": 8192 * 12_288, "mamba": 29 * (50_688 + 4_194_304)},
    # 61 layers of 576 elements
    "deepseek-v3": {"kv": 8192 * 70_272},
    "deepseek-r1": {"kv": 8192 * 70_272},
    "kimi-k2": {"kv": 8192 * 70_272},
    # 7 of 27 layers of 576 elements; 20 with 3 × 4096 channels × 3 taps and 32 × 128 × 128
    "kimi-linear-48b": {"kv": 8192 * 8_064, "mamba": 20 * (73_728 + 2_097_152)},
    # 92 layers, K and V, 8 heads of 128
    "glm-4.5": {"kv": 8192 * 376_832},
    # 78 layers of 576 elements; an index key of 128 bytes and a scale of 4
    "glm-5": {"kv": 8192 * 89_856, "dsa": 8192 * 10_296},
    # 15 of 60 layers with 2 heads of 256; 45 with 12288 channels × 3 taps and 64 × 128 × 128
    "qwen3.5-397b": {"kv": 8192 * 30_720, "mamba": 45 * (73_728 + 4_194_304)},
    # 10 of 40 layers with 2 heads of 256; 30 with 8192 channels × 3 taps and 32 × 128 × 128
    "qwen3.5-35b": {"kv": 8192 * 20_480, "mamba": 30 * (49_152 + 2_097_152)},
    # 62 layers with 8 heads of 128
    "minimax-m2": {"kv": 8192 * 253_952},
    # 60 layers with 4 heads of 128; 57 index keys of 128 elements
    "minimax-m3": {"kv": 8192 * 122_880, "minimax_index_k": 8192 * 14_592},
    # 6 of 52 layers with 2 heads of 128; 23 with (4096 + 1024 + 1024) channels × 3 taps and 64 × 64 × 128
    "nemotron-3-nano-30b": {"kv": 8192 * 6_144, "mamba": 23 * (36_864 + 2_097_152)},
    # 4 of 56 layers with 8 heads of 128; 27 with (10240 + 1024 + 1024) channels × 3 taps and 128 × 80 × 128
    "nemotron-nano-9b-v2": {"kv": 8192 * 16_384, "mamba": 27 * (73_728 + 5_242_880)},
    # 44 layers with 2 heads of 128, and with (3072 + 256 + 256) channels × 3 taps and 24 × 128 × 256
    "falcon-h1-7b": {"kv": 8192 * 45_056, "mamba": 44 * (21_504 + 3_145_728)},
    # 4 of 40 layers with 4 heads of 128; 36 with (3072 + 128 + 128) channels × 3 taps and 48 × 64 × 128
    "granite-4.0-h-tiny": {"kv": 8192 * 8_192, "mamba": 36 * (19_968 + 1_572_864)},
    # 12 layers with 8 heads of 64, 12 of the same with a window of 128
    "gpt-oss-20b": {"kv": 8192 * 24_576, "swa": 128 * 24_576},
    # 10 of 62 layers with 16 heads of 128; 52 of the same with a window of 1024
    "gemma-3-27b": {"kv": 8192 * 81_920, "swa": 1024 * 425_984},
    # 12 of 48 layers with 8 heads of 128; no open attention chunk
    "llama-4-scout": {"kv": 8192 * 49_152, "chunked_local": 0},
}
# What each further rank of decode receives again, since all ranks hold it.
REPLICATED = {
    "deepseek-v3.2": BY_HAND["deepseek-v3.2"],
    "deepseek-v4-flash": BY_HAND["deepseek-v4-flash"],
    "bamba-9b": {"mamba": 29 * 256 * 3 * 2},
    **{name: BY_HAND[name] for name in ("deepseek-v3", "deepseek-r1", "kimi-k2", "glm-5")},
    "kimi-linear-48b": {"kv": 8192 * 8_064},
    "minimax-m3": {"minimax_index_k": 8192 * 14_592},
    "falcon-h1-7b": {"mamba": 44 * 512 * 3 * 2},
    "granite-4.0-h-tiny": {"mamba": 36 * 256 * 3 * 2},
}
TOPOLOGIES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"tp": 2}, {}),
    ({}, {"tp": 2}),
    ({"tp": 4}, {"tp": 2}),
    ({"pp": 3}, {}),
]


def run(name: str, prefill: dict[str, Any], decode: dict[str, Any], tokens: int = TOKENS, prefix: int = 0) -> Report:
    model = preset(name)
    sides = (Side(model=model, layout=Layout(**each)) for each in (prefill, decode))
    return explain(*sides, tokens=tokens, prefix=prefix)


def test_every_preset_has_a_line_above() -> None:
    assert set(presets()) == set(BY_HAND)


@pytest.mark.parametrize(("prefill", "decode"), TOPOLOGIES)
@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_bytes_are_those_worked_out_by_hand(name: str, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    report = run(name, prefill, decode)
    again = REPLICATED.get(name, {})
    expected = {part: n + again.get(part, 0) * (decode.get("tp", 1) - 1) for part, n in BY_HAND[name].items()}
    assert {total.component: total.nbytes for total in report.totals} == expected
    assert report.nbytes == sum(rank.nbytes for rank in report.prefill) == sum(rank.nbytes for rank in report.decode)
    assert len({rank.nbytes for rank in report.decode}) == 1


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_the_numbers_of_a_preset_have_a_source(name: str) -> None:
    model = preset(name)
    assert model.name == name
    assert "config.json of " in model.source


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_a_stage_holds_its_own_layers(name: str) -> None:
    model = preset(name)
    sizes = (model.layers - 9, 4, 5)
    held = [
        {buffer.layer for component in inventory.components for buffer in component.buffers}
        for inventory in inventories(Side(model=model, layout=Layout(pp=3, stages=sizes)))
    ]
    stages = (0, model.layers - 9, model.layers - 5, model.layers)
    assert held == [{n for n in range(*stage) if model.kinds(n)} for stage in itertools.pairwise(stages)]


def test_the_layers_of_each_kind_are_the_published_ones() -> None:
    def layers(name: str, component: str) -> list[int]:
        (only,) = inventories(Side(model=preset(name)))
        return sorted({buffer.layer for buffer in only.component(component).buffers if buffer.layer is not None})

    assert layers("qwen3-next-80b", "kv") == [3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47]
    assert layers("gpt-oss-120b", "swa") == list(range(0, 36, 2))
    assert layers("jamba-v0.1", "kv") == [4, 12, 20, 28]
    assert layers("bamba-9b", "kv") == [9, 18, 27]
    assert layers("nemotron-3-nano-30b", "kv") == [5, 12, 19, 26, 33, 42]
    assert layers("kimi-linear-48b", "kv") == [3, 7, 11, 15, 19, 23, 26]
    assert layers("granite-4.0-h-tiny", "kv") == [5, 15, 25, 35]
    assert layers("falcon-h1-7b", "kv") == layers("falcon-h1-7b", "mamba") == list(range(44))
    assert layers("minimax-m3", "minimax_index_k") == list(range(3, 60))
    assert layers("gemma-3-27b", "kv") == list(range(5, 62, 6))
    assert layers("llama-4-scout", "kv") == list(range(3, 48, 4))
    assert layers("deepseek-v4-flash", "dsv4_c4_state") == list(range(2, 43, 2))
    assert layers("deepseek-v4-flash", "c128_state") == list(range(3, 43, 2))


def test_open_groups_of_deepseek_v4_move_only_where_there_are_some() -> None:
    totals = {total.component: total.nbytes for total in run("deepseek-v4-flash", {}, {}, tokens=8192 + 2).totals}
    # Two open positions and the group before them; one page of 128 keys and scores.
    assert totals["dsv4_c4_state"] == 21 * 6 * 10_240
    assert totals["c128_state"] == 20 * 128 * 4096


def test_rings_of_different_length_pair_up_by_position() -> None:
    report = run("deepseek-v4-flash", {}, {"c4_ring": 16, "c128_ring": 256}, tokens=8202)
    assert report.nbytes == run("deepseek-v4-flash", {}, {}, tokens=8202).nbytes


@pytest.mark.parametrize(("tokens", "prefill", "decode"), [(1000, 64, 64), (1000, 16, 64), (100, 256, 16), (1, 64, 64)])
@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_decode_may_hold_the_whole_prompt_wherever_it_ends(name: str, tokens: int, prefill: int, decode: int) -> None:
    first, second = ({} if name == "deepseek-v4-flash" else {"page": page} for page in (prefill, decode))
    report = run(name, first, second, tokens=tokens, prefix=tokens)
    # What has positions is there. States of a request, and open groups of positions, come whatever decode holds.
    left = {total.component for total in report.totals if total.nbytes}
    assert left <= {"mamba", "dsv4_c4_state", "c128_state"}
    assert ("mamba" in left) == ("mamba" in BY_HAND[name])


def test_the_open_attention_chunk_moves() -> None:
    totals = {total.component: total.nbytes for total in run("llama-4-scout", {}, {}, tokens=9024).totals}
    assert totals == {"kv": 9024 * 49_152, "chunked_local": (9024 - 8192) * 36 * 4096}
    small = run("llama-4-scout", {"pool_tokens": 65_536}, {"pool_tokens": 65_536}, tokens=65_536 - 64)
    assert {total.component: total.nbytes for total in small.totals}["chunked_local"] == (8192 - 64) * 36 * 4096


def test_a_name_without_a_preset_has_the_right_suggestion() -> None:
    for name, meant in (("deepseek_v3", "deepseek-v3"), ("deepseek-v31", "deepseek-v3"), ("glm-4", "glm-4.5")):
        with pytest.raises(ConfigError) as error:
            preset(name)
        assert error.value.hint == f"did you mean {meant!r}?"


def test_a_prefix_leaves_what_decode_holds() -> None:
    totals = {total.component: total.nbytes for total in run("qwen3-next-80b", {"tp": 2}, {}, prefix=8192).totals}
    assert totals == {"kv": 0, "mamba": BY_HAND["qwen3-next-80b"]["mamba"]}
    totals = {total.component: total.nbytes for total in run("gpt-oss-120b", {}, {}, prefix=8064).totals}
    assert totals == {"kv": 128 * 36_864, "swa": 128 * 36_864}
