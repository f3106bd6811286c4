"""Writes the defaults of ``config.json``'s fields, by model type: ``python -m tools.model_families``.

They come from the configuration classes of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

FILE = Path(__file__).parents[1] / "plugins/explain/src/statelink_explain/families.toml"
TYPES = """
apertus arcee bamba bitnet cohere cohere2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots1 ernie4_5 ernie4_5_moe
exaone4 falcon_h1 gemma gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite glm4v_moe_text
glm4v_text glm_moe_dsa gpt_oss granite granitemoe granitemoehybrid helium hunyuan_v1_dense hunyuan_v1_moe hy_v3
internlm3 jamba kimi_linear lfm2 lfm2_moe llama llama4_text mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text
ministral ministral3 mistral mixtral nemotron nemotron_h olmo olmo2 olmo3 olmoe phi phi3 phimoe qwen2 qwen2_5_vl_text
qwen2_moe qwen2_vl_text qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl_moe_text qwen3_vl_text
seed_oss smollm3 stablelm starcoder2
"""
FIELDS = """
hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim v_head_dim
sliding_window use_sliding_window max_window_layers attention_chunk_size num_kv_shared_layers
kv_lora_rank qk_rope_head_dim index_head_dim
linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim
linear_num_heads linear_head_dim linear_attn_alpha_factor
mamba_n_heads mamba_d_head mamba_d_ssm mamba_n_groups mamba_d_state mamba_d_conv mamba_expand mamba_dt_rank
mamba_num_heads mamba_head_dim n_groups ssm_state_size conv_kernel expand mamba_ssm_cache_dtype
conv_L_cache attn_layer_period attn_layer_offset
"""
PATTERNS = {
    # transformers' cache takes every layer for one with a window where only the window's length is given.
    **{type_: ["sliding_attention"] for type_ in ("mistral", "mixtral", "phi3", "phimoe", "starcoder2")},
    "falcon_h1": ["attention and mamba"],
}
"""Kinds of layers that a type has and no field of its class says, repeated until all layers have one."""
BESIDES: dict[str, dict[str, Any]] = {
    "gemma4_text": {"global_head_dim": 512},
    "mimo_v2_flash": {"told": ["swa_num_key_value_heads"]},
}
"""What a class or its model computes in its code: defaults, and fields that a file has to say itself."""
SAME = {"kimi_k2": "deepseek_v3"}
"""Types that have no class, and that the class of another type loads."""
NONE = ("bamba", "jamba", "kimi_linear", "nemotron_h", "minimax_m3_vl_text")
"""Types whose layers only the file itself can tell, or other fields of the class do."""


def pattern(type_: str) -> list[str] | None:
    """The shortest list that gives the default kinds of layers, whatever their number."""
    if type_ in PATTERNS:
        return PATTERNS[type_]
    if type_ in NONE:
        return None
    made = [AutoConfig.for_model(type_, num_hidden_layers=count) for count in (35, 47, 48)]
    lists = [list(getattr(config, "layer_types", None) or ()) for config in made]
    if not all(lists):
        return None
    for length in range(1, 13):
        if all(each[n] == each[n % length] for each in lists for n in range(len(each))):
            return lists[0][:length]
    return None


def defaults(type_: str) -> dict[str, Any]:
    """What an absent field means for a type."""
    kind = type(AutoConfig.for_model(type_))
    found = {
        name: getattr(kind, name, None) for name in FIELDS.split() if name not in getattr(kind, "attribute_map", {})
    }
    found = {name: value for name, value in found.items() if isinstance(value, (int, str, float))}
    found |= BESIDES.get(type_, {})
    return {**found, **({"pattern": said} if (said := pattern(type_)) else {})}


def render() -> str:
    """The whole file."""
    lines = [
        "# What an absent field of a config.json means, by model type: the defaults of transformers' classes.",
        "# `python -m tools.model_families` writes this file.",
        "# 'pattern' are the kinds of layers, repeated until all layers have one.",
        "# 'told' are fields without a default, because the code of the model does without them.",
    ]
    for type_ in sorted((*TYPES.split(), *SAME)):
        lines += ["", f"[{type_}]"]
        lines += [f"{name} = {json.dumps(value)}" for name, value in defaults(SAME.get(type_, type_)).items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
