"""Every preset, through the planner, against numbers worked out by hand from the models' public configurations."""

from __future__ import annotations

from typing import Any

import pytest

from statelink.explain import Layout, Report, Side, explain, inventories, preset, presets

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
}
# What each further rank of decode receives again, since all ranks hold it.
REPLICATED = {
    "deepseek-v3.2": BY_HAND["deepseek-v3.2"],
    "deepseek-v4-flash": BY_HAND["deepseek-v4-flash"],
    "bamba-9b": {"mamba": 29 * 256 * 3 * 2},
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
    assert held == [
        set(range(model.layers - 9)),
        set(range(model.layers - 9, model.layers - 5)),
        set(range(model.layers - 5, model.layers)),
    ]


def test_the_layers_of_each_kind_are_the_published_ones() -> None:
    def layers(name: str, component: str) -> list[int]:
        (only,) = inventories(Side(model=preset(name)))
        return sorted({buffer.layer for buffer in only.component(component).buffers if buffer.layer is not None})

    assert layers("qwen3-next-80b", "kv") == [3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47]
    assert layers("gpt-oss-120b", "swa") == list(range(0, 36, 2))
    assert layers("jamba-v0.1", "kv") == [4, 12, 20, 28]
    assert layers("bamba-9b", "kv") == [9, 18, 27]
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


def test_a_prefix_leaves_what_decode_holds() -> None:
    totals = {total.component: total.nbytes for total in run("qwen3-next-80b", {"tp": 2}, {}, prefix=8192).totals}
    assert totals == {"kv": 0, "mamba": BY_HAND["qwen3-next-80b"]["mamba"]}
    totals = {total.component: total.nbytes for total in run("gpt-oss-120b", {}, {}, prefix=8064).totals}
    assert totals == {"kv": 128 * 36_864, "swa": 128 * 36_864}
