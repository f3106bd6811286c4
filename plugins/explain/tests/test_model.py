"""Sections of [model], against bytes worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from statelink.errors import ConfigError
from statelink_explain import Layout, Model, Report, Side, explain, inventories

HEADS = {"heads": 2, "dim": 64}
SSM = {"conv": [[64, 8]], "kernel": 4, "state": [8, 8, 16]}


def model(layers: int, pattern: list[Any], **sections: Any) -> Model:
    return Model.read({"name": "m", "layers": layers, "pattern": pattern, **sections}, "model")


def run(described: Model, tokens: int, prefill: dict[str, Any] | None = None) -> Report:
    sides = (Side(model=described, layout=Layout(page=16, **more)) for more in (prefill or {}, {}))
    return explain(*sides, tokens=tokens)


def moved(described: Model, tokens: int, **prefill: Any) -> dict[str, int]:
    return {total.component: total.nbytes for total in run(described, tokens, prefill).totals}


def test_chunked_local_attention_moves_its_open_chunk() -> None:
    chunked = model(4, ["chunk", "chunk", "chunk", "full"], attention=HEADS, chunk={**HEADS, "tokens": 64})
    row = 2 * 2 * 64 * 2
    assert moved(chunked, 64 * 3 + 32) == {"kv": 224 * row, "chunked_local": 3 * 32 * row}
    assert moved(chunked, 64 * 3) == {"kv": 192 * row, "chunked_local": 0}
    assert moved(chunked, 64 * 3 + 32, tp=2) == moved(chunked, 64 * 3 + 32)
    # Its pool holds an attention chunk, not the request.
    small = Side(model=model(1, ["chunk"], chunk={**HEADS, "tokens": 64}), layout=Layout(page=16, pool_tokens=96))
    assert explain(small, small, tokens=64 * 9 + 32).nbytes == 32 * row


def test_layers_without_state_count_when_stages_are_cut() -> None:
    mixed = model(8, ["full", [], [], []], attention=HEADS)
    held = [
        [buffer.layer for component in rank.components for buffer in component.buffers]
        for rank in inventories(Side(model=mixed, layout=Layout(pp=2)))
    ]
    assert held == [[0, 0], [4, 4]], "keys and values"
    assert run(mixed, 64, {"pp": 2}).nbytes == 2 * 64 * 512
    assert [rank.nbytes for rank in run(mixed, 64, {"pp": 2}).prefill] == [64 * 512] * 2


def test_a_stage_without_any_state_sends_nothing() -> None:
    mixed = model(4, ["full", "full", [], []], attention=HEADS)
    report = run(mixed, 64, {"pp": 2})
    assert [rank.nbytes for rank in report.prefill] == [2 * 64 * 512, 0]
    assert report.prefill[1].told_by == 0


def test_a_recurrent_state_needs_no_convolution() -> None:
    lightning = model(2, ["mamba"], mamba={"state": [4, 8, 8]})
    assert moved(lightning, 64) == {"mamba": 2 * 4 * 8 * 8 * 4}
    assert moved(lightning, 64, tp=2) == moved(lightning, 64)
    short = model(2, ["mamba"], mamba={"conv": [[64, 64]], "kernel": 3})
    assert moved(short, 64) == {"mamba": 2 * 64 * 2 * 2}


def test_keys_and_values_of_a_window_may_differ_in_width() -> None:
    unequal = model(
        2, ["full", "window"], attention=HEADS, window={"heads": 4, "dim": 24, "value_dim": 16, "tokens": 32}
    )
    assert moved(unequal, 128) == {"kv": 128 * 512, "swa": 32 * 4 * 40 * 2}


def test_a_layer_may_keep_several_things() -> None:
    both = model(3, [["full", "mamba"]], attention=HEADS, mamba=SSM)
    alone = model(6, ["full", "mamba"], attention=HEADS, mamba=SSM)
    assert moved(both, 64) == moved(alone, 64) == {"kv": 3 * 64 * 512, "mamba": 3 * (64 * 3 * 2 + 8 * 8 * 16 * 4)}
    (rank,) = inventories(Side(model=both))
    assert {buffer.layer for component in rank.components for buffer in component.buffers} == {0, 1, 2}


def test_an_index_has_layers_and_a_type_of_its_own() -> None:
    sparse = model(
        3,
        ["full", ["full", "index"], ["full", "index"]],
        attention=HEADS,
        index={"width": 32, "type": "minimax_index_k"},
    )
    assert moved(sparse, 64) == {"kv": 3 * 64 * 512, "minimax_index_k": 2 * 64 * 32 * 2}
    scaled = model(2, [["full", "index"]], latent={"width": 40}, index={"width": 32, "dtype": "uint8", "scale": 4})
    assert moved(scaled, 64) == {"kv": 2 * 64 * 80, "dsa": 2 * 64 * 36}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"pattern": [[]]}, "model 'm' keeps nothing"),
    ({"pattern": [["full", "full"]], "attention": HEADS}, "names a kind of a layer twice"),
    ({"pattern": ["moe"]}, "bad value in the model"),
    ({"pattern": ["full", "chunk"], "attention": HEADS}, "has layers of kind 'chunk': it has no section for them"),
    ({"attention": HEADS, "index": {"width": 8}}, "has no layers of kind 'index': it has 'index' for them"),
    # Only the layers that there are count: the pattern has a third entry.
    (
        {"pattern": ["full", "full", "window"], "attention": HEADS, "window": {**HEADS, "tokens": 8}},
        "no layers of kind 'window'",
    ),
    ({"pattern": ["mamba"], "mamba": {}}, "it has neither 'conv' nor 'state'"),
    ({"pattern": ["mamba"], "mamba": {"conv": [[8, 8]]}}, "'conv' stands alone"),
    ({"pattern": ["mamba"], "mamba": {"kernel": 4, "state": [4]}}, "'kernel' stands alone"),
    ({"pattern": ["chunk"], "chunk": {**HEADS, "tokens": 1}}, "tokens: a whole number >= 2 is expected"),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_a_model_that_contradicts_itself_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        Model.read({"name": "m", "layers": 2, **given}, "model")
    assert said in str(error.value)
