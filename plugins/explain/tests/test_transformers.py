"""What is read from a configuration, against transformers: its defaults, and the caches of tiny models that run."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from tools import model_families
from transformers import AutoConfig, AutoModelForCausalLM

from statelink.errors import ConfigError
from statelink_explain import Layout, Model, Side, explain, inventories, read_side

if TYPE_CHECKING:
    from pathlib import Path

TOKENS, WINDOW, CHUNK = 20, 8, 8
NEW = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has an older transformers")
TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": WINDOW,
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": {},
    "qwen3_next": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 4,
        "shared_expert_intermediate_size": 8,
    },
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2},
    "nemotron_h": {
        "num_hidden_layers": None,
        "layers_block_type": ["mamba", "mlp", "attention", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 6,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 8,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 6,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "llama4_text": {"attention_chunk_size": CHUNK, "intermediate_size_mlp": 32},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
}


def read(folder: Path, given: dict[str, Any]) -> Model:
    (folder / "config.json").write_text(json.dumps(given, default=str))
    return read_side(folder, "prefill").model


def cached(layer: Any, kind: str) -> Counter[str]:
    """Bytes that a layer of transformers' cache needs, by component. All elements are float32."""
    found: Counter[str] = Counter()
    if (keys := getattr(layer, "keys", None)) is not None:
        heads, row = keys.shape[1], keys.shape[3] + layer.values.shape[3]
        tokens = {"sliding_attention": WINDOW, "chunked_attention": TOKENS % CHUNK}.get(kind, TOKENS)
        name = {"sliding_attention": "swa", "chunked_attention": "chunked_local"}.get(kind, "kv")
        found[name] = tokens * heads * row * 4
    for each in (getattr(layer, "conv_states", None) or {}).values():
        # transformers keeps the newest input of the convolution, too.
        found["mamba"] += each.shape[1] * (each.shape[2] - 1) * 4
    for each in (getattr(layer, "recurrent_states", None) or {}).values():
        found["mamba"] += 0 if each is None else each[0].numel() * 4
    return found


@NEW
@pytest.mark.parametrize("type_", sorted(MODELS))
def test_a_request_has_the_bytes_of_a_real_models_cache(type_: str, tmp_path: Path) -> None:
    given = {name: value for name, value in {**TINY, **MODELS[type_]}.items() if value is not None}
    config = AutoConfig.for_model(type_, **given, dtype="float32")
    with torch.no_grad():
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call] # transformers
        cache = model.eval()(torch.arange(3, 3 + TOKENS)[None], use_cache=True).past_key_values
    kinds = getattr(config, "layer_types", None) or [""] * len(cache.layers)
    expected = sum(map(cached, cache.layers, kinds), Counter())
    described = read(tmp_path, config.to_dict())
    side = Side(model=described, layout=Layout(page=1))
    totals = {total.component: total.nbytes for total in explain(side, side, tokens=TOKENS).totals}
    assert totals == expected
    assert described.layers == len(cache.layers)


# A file of these types has to say what the class has no default for, or another one than published models.
TOLD = {
    "bamba": "which layers have attention",
    "deepseek_v4": "the compression of each layer",
    "glm4_moe": "the width of a head",
    "glm4v_moe_text": "the width of a head",
    "lfm2_moe": "which layers have a convolution",
    "mimo_v2_flash": "the heads of windows: the code of its model doubles those of full attention",
}


@NEW
@pytest.mark.parametrize("type_", sorted(model_families.TYPES.split()))
def test_absent_fields_have_the_defaults_of_the_class(type_: str, tmp_path: Path) -> None:
    whole = AutoConfig.for_model(type_).to_dict()
    known = model_families.defaults(type_)
    hidden = {*known, *({"layer_types"} if "pattern" in known else ())}
    if type_ == "gemma4_text":
        hidden = {"per_layer_config"}  # its class makes this of fields that files have
    rest = {name: value for name, value in whole.items() if name not in hidden}
    if type_ in TOLD:
        for given in ({"model_type": type_}, {} if type_ == "deepseek_v4" else whole):
            with pytest.raises(ConfigError):
                read(tmp_path, given)
        return
    read_of = [inventories(Side(model=read(tmp_path, given))) for given in (whole, rest)]
    assert read_of[0] == read_of[1]


@NEW
def test_the_table_of_defaults_is_up_to_date() -> None:
    assert transformers.__version__.startswith("5.23")
    assert model_families.FILE.read_text() == model_families.render(), "run 'python -m tools.model_families'"
