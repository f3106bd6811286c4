"""What is read from a model's ``config.json``, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from statelink.cli import main
from statelink.errors import ConfigError
from statelink_explain import Layout, Model, Side, explain, inventories, preset, read_side

from .published import NEMOTRON, PUBLISHED, QWEN

LLAMA = PUBLISHED["llama-3-8b"]


def read(folder: Path, given: Any) -> Model:
    (folder / "config.json").write_text(json.dumps(given))
    return read_side(folder, "prefill").model


def kept(model: Model, **layout: Any) -> list[tuple[str, str, tuple[int, ...], str]]:
    """Every buffer of a model: its component, name, shape of an item, and element type."""
    (only,) = inventories(Side(model=model, layout=Layout(**layout)))
    return [
        (component.name, buffer.name, buffer.layout.shape, buffer.layout.dtype)
        for component in only.components
        for buffer in component.buffers
    ]


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_published_file_describes_what_the_preset_says(name: str, tmp_path: Path) -> None:
    found, expected = read(tmp_path, PUBLISHED[name]), preset(name)
    assert kept(found) == kept(expected)
    assert [set(found.kinds(n)) for n in range(found.layers)] == [set(expected.kinds(n)) for n in range(found.layers)]
    assert (found.page, found.dtype, found.state_dtype) == (expected.page, expected.dtype, expected.state_dtype)


def test_what_was_read_is_said_and_what_is_a_default_of_the_type(tmp_path: Path) -> None:
    model = read(tmp_path, {"model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024})
    assert model.source == (
        "config.json of type gemma3_text: num_hidden_layers 34, sliding_window 1024, "
        "kinds of layers [5 × sliding_attention, 1 × full_attention] (by default), num_attention_heads 8 (by default), "
        "num_key_value_heads 4 (by default), head_dim 256 (by default)"
    )
    assert model.note == ""
    heads = {"heads": 4, "dim": 256}
    pattern = ["window"] * 5 + ["full"]
    said = {"layers": 34, "pattern": pattern, "attention": heads, "window": {**heads, "tokens": 1024}}
    assert kept(model) == kept(Model.read({"name": "gemma", **said}, "model"))


def test_a_type_that_is_not_known_is_read_by_its_fields_only(tmp_path: Path) -> None:
    plain = {"model_type": "novel", "num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 64}
    model = read(tmp_path, plain)
    assert kept(model) == kept(
        Model.read({"name": "novel", "layers": 2, "attention": {"heads": 4, "dim": 64}}, "model")
    )
    assert model.note == "model_type 'novel' is not known: only its fields were read."
    for name in plain.keys() - {"model_type"}:
        with pytest.raises(ConfigError, match=f"has no '{name}' .*'novel' is not known"):
            read(tmp_path, {key: value for key, value in plain.items() if key != name})


NOVEL = {"model_type": "novel", "num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 64, "hidden_size": 256}
REFUSED: dict[str, tuple[Any, str]] = {
    "state in words of its own": (
        {**NOVEL, "retention_state_dim": 8},
        "'retention_state_dim' in a model's configuration",
    ),
    "two of them": ({**NOVEL, "token_shift": 1, "ngram_size": 3}, "'ngram_size, token_shift' in a model's"),
    "a kind of layer": ({**NOVEL, "layer_types": ["full_attention", "hyena"]}, "layers of the kind 'hyena'"),
    "a letter": ({**NEMOTRON, "num_hidden_layers": 2, "hybrid_override_pattern": "MX"}, "layers of the kind 'X'"),
    "too few kinds": ({**NOVEL, "layer_types": ["full_attention"]}, "it has 1 entries for 2 layers"),
    "a window somewhere": ({**NOVEL, "sliding_window": 128}, "'sliding_window'.*no field says which layers have it"),
    "chunks somewhere": ({**NOVEL, "attention_chunk_size": 128}, "no field says which layers have it"),
    "an index somewhere": ({**NOVEL, "index_head_dim": 128}, "'index_head_dim'.*no field says which layers have it"),
    "linear attention somewhere": ({**NOVEL, "linear_num_key_heads": 4}, "no field says which layers have it"),
    "an index with values": (
        {
            **NOVEL,
            "sparse_attention_config": {
                "sparse_index_dim": 8,
                "sparse_attention_freq": [0, 1],
                "sparse_disable_index_value": [0, 0],
            },
        },
        "an index with values is not described",
    ),
    "two fields that differ": (
        {**NOVEL, "layer_types": ["full_attention"] * 2, "full_attention_interval": 2, "linear_num_key_heads": 4},
        "'layer_types, full_attention_interval'.*different things",
    ),
    "no widths": ({**NOVEL, "layer_types": ["linear_attention"] * 2}, "no known field gives their widths"),
    "widths of two kinds": (
        {**NOVEL, "layer_types": ["mamba"] * 2, "linear_num_key_heads": 4, "mamba_n_heads": 4},
        "it has linear_num_key_heads, mamba_n_heads",
    ),
    "a layer neither full nor linear": (
        {**PUBLISHED["kimi-linear-48b"], "num_hidden_layers": 28},
        "layers of the kind 'neither full nor KDA'",
    ),
    "ratios": ({**PUBLISHED["deepseek-v4-flash"], "compress_ratios": [2] * 43}, "the ratios 0, 4, 128 are described"),
    "a shared index": ({**PUBLISHED["glm-5"], "indexer_types": ["half"] * 78}, "'full' and 'shared' are known"),
    "heads of several widths": (
        {**LLAMA, "per_layer_config": {"1": {"head_dim": 64}}},
        "layers of the kind 'full' differ",
    ),
    "a window of one layer": (
        {**LLAMA, "per_layer_config": {"1": {"sliding_window": 64}}},
        "'per_layer_config'.*it has sliding_window",
    ),
    "all layers shared": ({**LLAMA, "num_kv_shared_layers": 32}, "it is 32 of 32 layers"),
    "an encoder": ({**LLAMA, "is_encoder_decoder": True}, "what an encoder leaves"),
    "an element type": ({**LLAMA, "torch_dtype": "int4"}, "bfloat16, float16, float32 are known, got 'int4'"),
    "quantised keys": (
        {**LLAMA, "quantization_config": {"kv_cache_scheme": {"num_bits": 4, "type": "int"}}},
        "not known",
    ),
    "a wrong number": ({**LLAMA, "num_hidden_layers": "32"}, "a whole number above 0 is expected, got '32'"),
    "heads for each layer": ({**LLAMA, "num_key_value_heads": [8] * 32}, "a whole number is expected"),
    "a wrong shape": ({**LLAMA, "linear_attn_config": 3}, "cannot be read .*: a field has an unexpected value"),
    "two language models": (
        {"model_type": "x", "text_config": LLAMA, "llm_config": LLAMA},
        "text_config and llm_config",
    ),
    "no model": ({"hidden_size": 3}, "has no 'model_type'"),
    "a list": ([], "it holds no JSON object"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_by_name(case: str, tmp_path: Path) -> None:
    given, said = REFUSED[case]
    with pytest.raises(ConfigError, match=said) as error:
        read(tmp_path, given)
    assert error.value.reason.who["file"] == tmp_path.name


def test_a_field_that_only_other_layers_need_means_nothing(tmp_path: Path) -> None:
    given = {**NOVEL, "layer_types": ["full_attention"] * 2, "sliding_window": 128, "conv_L_cache": 3}
    assert kept(read(tmp_path, given)) == kept(read(tmp_path, NOVEL))


def test_layers_that_share_an_index_or_keys_keep_none(tmp_path: Path) -> None:
    model = read(tmp_path, {**PUBLISHED["glm-5"], "index_topk_freq": 4, "index_skip_topk_offset": 3})
    assert [n for n in range(78) if "index" in model.kinds(n)] == [0, 1, *range(2, 78, 4)]
    pattern = "".join("F" if "index" in model.kinds(n) else "S" for n in range(78))
    assert kept(read(tmp_path, {**PUBLISHED["glm-5"], "index_topk_pattern": pattern})) == kept(model)
    shared = read(tmp_path, {"model_type": "gemma3n_text"})
    assert [n for n in range(35) if not shared.kinds(n)] == list(range(20, 35))


def test_a_hub_file_and_one_that_transformers_saves_say_the_same(tmp_path: Path) -> None:
    kimi = dict(PUBLISHED["kimi-linear-48b"])
    full = kimi.pop("linear_attn_config")["full_attn_layers"]
    saved = {
        **kimi,
        "layer_types": ["full_attention" if n + 1 in full else "linear_attention" for n in range(27)],
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
    }
    assert kept(read(tmp_path, saved)) == kept(read(tmp_path, PUBLISHED["kimi-linear-48b"]))
    words = {"M": "mamba", "E": "moe", "*": "full_attention"}
    listed = {**NEMOTRON, "layers_block_type": [words[each] for each in NEMOTRON["hybrid_override_pattern"]]}  # type: ignore[attr-defined]
    del listed["hybrid_override_pattern"], listed["num_hidden_layers"]
    assert kept(read(tmp_path, listed)) == kept(read(tmp_path, NEMOTRON))


def test_widths_of_windows_have_fields_of_their_own(tmp_path: Path) -> None:
    mimo = {
        "model_type": "mimo_v2_flash",
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "hybrid_layer_pattern": [0, 1, 1],
        "sliding_window": 128,
    }
    model = read(tmp_path, mimo)
    sides = Side(model=model), Side(model=model)
    totals = {total.component: total.nbytes for total in explain(*sides, tokens=1024).totals}
    # K of 192 and V of 128 elements: 4 heads of 1 layer, 8 heads of 2 layers.
    assert totals == {"kv": 1024 * 4 * 320 * 2, "swa": 128 * 2 * 8 * 320 * 2}


def test_full_layers_may_have_heads_of_their_own(tmp_path: Path) -> None:
    gemma = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
    }
    model = read(tmp_path, {**gemma, "attention_k_eq_v": True})
    shapes = {name: shape for name, _, shape, _ in kept(model, page=16)}
    assert shapes == {"kv": (16, 4, 512), "swa": (16, 16, 256)}
    with pytest.raises(ConfigError, match="'num_global_key_value_heads'"):
        read(tmp_path, gemma)


def test_element_types_come_from_the_file_unless_the_layout_has_them(tmp_path: Path) -> None:
    qwen = {**PUBLISHED["qwen3-next-80b"], "dtype": "float16", "mamba_ssm_dtype": "bfloat16"}
    model = read(tmp_path, qwen)
    assert {dtype for *_, dtype in kept(model)} == {"float16", "bfloat16"}
    assert {dtype for name, *_, dtype in kept(model, dtype="float8_e4m3fn") if name == "kv"} == {"float8_e4m3fn"}
    for scheme in ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, {"kv_cache_quant_algo": "FP8"}):
        assert read(tmp_path, {**LLAMA, "quantization_config": scheme}).dtype == "float8_e4m3fn"


def test_qwen_2_has_windows_only_where_it_says_that_it_uses_them(tmp_path: Path) -> None:
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 64, "max_window_layers": 28, "use_sliding_window": False}
    assert {model.kinds(n) for model in [read(tmp_path, qwen)] for n in range(32)} == {("full",)}
    model = read(tmp_path, {**qwen, "use_sliding_window": True})
    assert [n for n in range(32) if model.kinds(n) == ("window",)] == [28, 29, 30, 31]


def test_a_null_is_not_the_default_of_the_type(tmp_path: Path) -> None:
    mistral = {**LLAMA, "model_type": "mistral"}
    assert read(tmp_path, mistral).window is not None
    assert read(tmp_path, {**mistral, "sliding_window": None}).window is None


def test_a_side_names_its_config_beside_a_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen").mkdir()
    read(tmp_path / "qwen", {**QWEN, "model_type": "qwen3_next", "num_hidden_layers": 48, "linear_num_value_heads": 32})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("folder.toml").write_text('config = "qwen"\nlayout = { tp = 2 }')
    Path("file.toml").write_text('config = "qwen/config.json"\n')
    for decode in ("file.toml", "qwen", "qwen/config.json"):
        result = CliRunner().invoke(main, ["explain", "folder.toml", decode, "--tokens", "8192"])
        assert result.exit_code == 0, result.output
        assert "qwen3_next: 2 ranks of prefill can serve 1 rank of decode" in result.output
        assert "a request of 8,192 tokens: 265.7 MiB" in result.output
        assert "from: config.json of type qwen3_next: num_hidden_layers 48, full_attention_interval 4" in result.output
    found = json.loads(CliRunner().invoke(main, ["explain", "qwen", "qwen", "--json"]).output)
    assert found["source"]["prefill"] == found["source"]["decode"] == read_side(tmp_path / "qwen", "x").model.source
    Path("none.toml").write_text('config = "elsewhere"\n')
    result = CliRunner().invoke(main, ["explain", "none.toml", "qwen"])
    assert (result.exit_code, "elsewhere cannot be read (file none.toml)" in result.output) == (1, True)
