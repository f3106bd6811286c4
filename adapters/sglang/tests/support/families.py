"""Tiny models of the families that people serve with prefill and decode apart, with random weights."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

from .models import ORACLE, make_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

__all__ = ["FAMILIES", "make_with_draft", "say_few_words"]

YARN = {
    **{"type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
}
LATENTS = {
    **{"num_hidden_layers": 3, "num_key_value_heads": 4, "head_dim": 8, "v_head_dim": 16},
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
    **{"rope_theta": 10000.0, "rope_scaling": YARN, "tie_word_embeddings": False},
}
EXPERTS = {
    **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "topk_method": "noaux_tc"},
    **{"scoring_func": "sigmoid", "norm_topk_prob": True, "moe_layer_freq": 1, "first_k_dense_replace": 1},
}


def make_deepseek(folder: Path) -> Path:
    """DeepSeek V3: latents, a dense layer, and two layers of experts."""
    named = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return make_model(folder, {**LATENTS, **EXPERTS, **named})


def make_sparse(folder: Path) -> Path:
    """DeepSeek V3.2: the same with an indexer, which chooses 64 tokens."""
    named = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "first_k_dense_replace": 3}
    indexer = {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 64}
    made = make_model(folder, {**LATENTS, **EXPERTS, **named, **indexer})
    # Older releases of transformers do not know the word that newer ones write for a kind of layer, and need none.
    config = json.loads((made / "config.json").read_text())
    config.pop("layer_types", None)
    (made / "config.json").write_text(json.dumps(config))
    return made


def make_qwen_next(folder: Path) -> Path:
    """Qwen3-Next: three gated delta nets, one layer of attention, and experts."""
    return make_model(
        folder,
        {
            **{"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 4},
            **{"layer_types": ["linear_attention"] * 3 + ["full_attention"], "full_attention_interval": 4},
            **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2},
            **{"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 32},
            **{"shared_expert_intermediate_size": 32, "partial_rotary_factor": 0.5, "rope_theta": 10000.0},
            "tie_word_embeddings": False,
        },
    )


def make_falcon(folder: Path) -> Path:
    """Falcon-H1: attention and Mamba 2 side by side in each layer."""
    return make_model(
        folder,
        {
            **{"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "num_hidden_layers": 3},
            **{"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16},
            **{"mamba_d_conv": 4, "mamba_expand": 1, "mamba_chunk_size": 16, "mamba_rms_norm": False},
            **{"rope_theta": 10000.0, "tie_word_embeddings": False},
        },
    )


def make_nemotron(folder: Path) -> Path:
    """Nemotron-H: two layers of Mamba 2, one of attention, and one without either."""
    made = make_model(
        folder,
        {
            **{"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "num_hidden_layers": 4},
            **{"hybrid_override_pattern": "M*M-", "layers_block_type": ["mamba", "attention", "mamba", "mlp"]},
            **{"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16, "conv_kernel": 4},
            **{"chunk_size": 16, "expand": 1, "mlp_hidden_act": "relu2", "attention_head_dim": 16},
            **{"layer_norm_epsilon": 1e-5, "norm_eps": 1e-5, "use_conv_bias": True, "n_routed_experts": 4},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False},
        },
    )
    # SGLang reads the layers and the groups from other names than transformers.
    _change(
        made, {"hybrid_override_pattern": "M*M-", "mamba_n_groups": 1}, without=("layers_block_type", "layer_types")
    )
    return made


def make_kimi(folder: Path) -> Path:
    """Kimi-Linear: three layers of Kimi's delta attention, one of latents without positions, and experts."""
    return make_model(
        folder,
        {
            **LATENTS,
            **{"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "num_hidden_layers": 4},
            **{"q_lora_rank": None, "head_dim": 24, "mla_use_nope": True, "rope_scaling": None},
            "linear_attn_config": {
                **{"full_attn_layers": [4], "kda_layers": [1, 2, 3]},
                **{"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4},
            },
            **{"first_k_dense_replace": 0, "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1},
            **{"moe_intermediate_size": 32, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid"},
            **{"moe_renormalize": True, "routed_scaling_factor": 1.0, "num_expert_group": 1, "topk_group": 1},
            "use_grouped_topk": True,
        },
    )


def make_minimax(folder: Path) -> Path:
    """MiniMax-M3: two layers of full attention, and two between them that choose blocks of keys; experts.

    transformers has other names for the weights, and for the numbers, than a checkpoint has. So its own are beside
    SGLang's.
    """
    from safetensors.torch import load_file

    sparse, experts = [0, 1, 1, 0], [0, 1, 1, 1]
    common = {
        **{"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8, "rope_theta": 10000.0},
        **{"intermediate_size": 32, "dense_intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"routed_scaling_factor": 2.0, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "tie_word_embeddings": False},
        "partial_rotary_factor": 0.5,
    }
    indexer = {
        **{"sparse_num_index_heads": 2, "sparse_index_dim": 16, "sparse_block_size": 16, "sparse_topk_blocks": 2},
        **{"sparse_init_block": 0, "sparse_local_block": 1, "sparse_score_type": "max"},
        **{"sparse_attention_freq": sparse, "sparse_disable_index_value": sparse},
    }
    theirs = make_model(
        folder / ORACLE,
        {
            **{**common, "architectures": ["MiniMaxM3VLForCausalLM"], "model_type": "minimax_m3_vl_text"},
            **{"shared_intermediate_size": 32, "sparse_attention_config": indexer, "moe_layer_freq": experts},
        },
    )
    weights: dict[str, torch.Tensor] = {}
    for name, each in load_file(theirs / "model.safetensors").items():
        name = name.replace("indexer.", "index_").replace("gate.e_score", "e_score")
        if name.endswith("experts.gate_up_proj"):
            for number, both in enumerate(each):
                for part, half in zip(("w1", "w3"), both.chunk(2), strict=True):
                    weights[f"{name.removesuffix('gate_up_proj')}{number}.{part}.weight"] = half.contiguous()
        elif name.endswith("experts.down_proj"):
            weights |= {f"{name.removesuffix('down_proj')}{n}.w2.weight": one.clone() for n, one in enumerate(each)}
        elif "gate_up_proj" in name:
            for part, half in zip(("gate", "up"), each.chunk(2), strict=True):
                weights[name.replace("gate_up", part)] = half.contiguous()
        else:
            weights[name] = each
    config = json.loads((theirs / "config.json").read_text())
    config |= {
        **{**common, "architectures": ["MiniMaxM3SparseForCausalLM"], "model_type": "minimax_m2"},
        **{"hidden_act": "swigluoai", "scoring_func": "sigmoid", "use_routing_bias": True, "n_shared_experts": 1},
        **{"use_qk_norm": True, "qk_norm_type": "per_head", "use_gemma_norm": True, "moe_layer_freq": experts},
        "sparse_attention_config": indexer,
    }
    config.pop("layer_types")
    return _beside(theirs, weights, config)


def make_deepseek_v4(folder: Path) -> Path:
    """DeepSeek V4: two layers of windows alone, and two of each compression; experts, of which a table chooses some."""
    import torch
    from safetensors.torch import load_file

    ratios = [0, 0, 4, 128, 4, 128]
    common = {
        **{"num_hidden_layers": 6, "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 32, "o_lora_rank": 32},
        **{"o_groups": 2, "index_head_dim": 128, "index_n_heads": 4, "index_topk": 16, "sliding_window": 128},
        **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "intermediate_size": 32},
        **{
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "scoring_func": "sqrtsoftplus",
        },
        **{"hc_mult": 4, "hc_sinkhorn_iters": 4, "hc_eps": 1e-6, "rope_theta": 10000, "compress_rope_theta": 40000},
        **{"num_nextn_predict_layers": 0, "tie_word_embeddings": False, "model_type": "deepseek_v4"},
    }
    yarn = {name: value for name, value in YARN.items() if not name.startswith("mscale")}
    turned = {"partial_rotary_factor": 64 / 512}
    theirs = make_model(
        folder / ORACLE,
        {
            **{**common, "architectures": ["DeepseekV4ForCausalLM"], "swiglu_limit": 1000.0},
            **{"compress_ratios": ratios, "num_hash_layers": 1},
            "rope_parameters": {
                "main": {**turned, "rope_type": "default", "rope_theta": 10000},
                "compress": {**turned, **yarn, "rope_theta": 40000, "attention_factor": 1.0},
            },
        },
    )
    weights: dict[str, torch.Tensor] = load_file(theirs / "model.safetensors")
    (table,) = (name for name in weights if name.endswith("tid2eid"))
    choices = torch.rand(len(weights[table]), 4, generator=torch.Generator().manual_seed(4))
    weights[table] = choices.topk(2).indices  # transformers makes a table of zeros
    _save(theirs, weights)
    ours = {
        "model.": "",
        **{"embed_tokens": "embed", "hc_head.hc_": "hc_head_", ".attn.norm.": ".attn.kv_norm."},
    }
    for before, after in ours.items():
        weights = {name.replace(before, after): each for name, each in weights.items()}
    weights |= _drafting(weights, "layers.1.", "mtp.0.") | {
        f"mtp.0.{name}": weights[name].clone()
        for name in ("hc_head_fn", "hc_head_base", "hc_head_scale", "norm.weight")
    }
    config = json.loads((theirs / "config.json").read_text())
    for name in ("layer_types", "mlp_layer_types", "rope_parameters", "compress_rates", "swiglu_limit"):
        config.pop(name)
    config |= {
        **{**common, "num_nextn_predict_layers": 1, "compress_ratios": [*ratios, 0]},
        **{"qk_rope_head_dim": 64, "window_size": 128, "rope_scaling": yarn},
        **{"n_hash_layers": 1, "num_hash_layers": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc"},
        **{"first_k_dense_replace": 0, "moe_layer_freq": 1},
    }
    return _beside(theirs, weights, config)


def _drafting(weights: dict[str, torch.Tensor], last: str, draft: str) -> dict[str, torch.Tensor]:
    """A layer as one of the model's that starts from hidden states, and from a little of the last token."""
    import torch

    (size,) = (len(each) for name, each in weights.items() if name in ("norm.weight", "model.norm.weight"))
    return {
        **{name.replace(last, draft): each.clone() for name, each in weights.items() if name.startswith(last)},
        f"{draft}e_proj.weight": 0.05 * torch.randn(size, size, generator=torch.Generator().manual_seed(3)),
        f"{draft}h_proj.weight": torch.eye(size),
        **{f"{draft}{part}norm.weight": torch.ones(size) for part in "eh"},
    }


def _beside(theirs: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    """SGLang's checkpoint, in the folder around transformers'."""
    folder = theirs.parent
    for file in theirs.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    _save(folder, weights)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def _save(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "deepseek": make_deepseek,
    "sparse": make_sparse,
    "qwen-next": make_qwen_next,
    "falcon": make_falcon,
    "nemotron": make_nemotron,
    "kimi": make_kimi,
    "minimax": make_minimax,
    "deepseek-v4": make_deepseek_v4,
}


def make_with_draft(folder: Path) -> Path:
    """DeepSeek V3 with one layer that predicts the token after the next, made so that some drafts are right."""
    import torch
    from safetensors.torch import load_file

    plain = make_deepseek(folder.with_name(f"{folder.name}-plain"))
    shutil.copytree(plain, folder)
    weights: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    draft = "model.layers.3."
    weights |= _drafting(weights, "model.layers.2.", draft)
    both = [weights.pop(f"{draft}{part}_proj.weight") for part in "eh"]
    weights |= {
        f"{draft}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        f"{draft}shared_head.head.weight": weights["lm_head.weight"].clone(),
        f"{draft}shared_head.norm.weight": weights["model.norm.weight"].clone(),
        f"{draft}eh_proj.weight": torch.cat(both, 1).contiguous(),
    }
    _save(folder, weights)
    _change(folder, {"num_nextn_predict_layers": 1})
    return folder


def say_few_words(folder: Path, count: int = 8) -> None:
    """Let a model say a few tokens alone, so that a draft that knows little is right sometimes."""
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    (head,) = (name for name in weights if name.endswith("head.weight"))
    weights[head][4 : 4 + count] *= 8.0
    _save(folder, weights)


def _change(folder: Path, more: dict[str, Any], without: tuple[str, ...] = ()) -> None:
    file = folder / "config.json"
    config = {name: value for name, value in json.loads(file.read_text()).items() if name not in without}
    file.write_text(json.dumps({**config, **more}, indent=1))
