"""Tiny models of large families with random weights, by the classes of `transformers`, and draft models for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .models import COMMON, VOCABULARY, add_tokenizer, save

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FAMILIES", "add_adapter", "add_mtp", "make_eagle", "make_llava", "write"]

LATENT: dict[str, Any] = {
    **COMMON,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}


def deepseek_v2(folder: Path) -> Path:
    """Latent attention and experts."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **LATENT, q_lora_rank=None, n_routed_experts=4, n_group=1, topk_method="greedy", norm_topk_prob=False
    )
    return save(folder, DeepseekV2ForCausalLM(config))


def deepseek_v3(folder: Path) -> Path:
    """The same with compressed queries, and experts in groups."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    more: dict[str, Any] = {
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",  # vLLM looks for it; the class of transformers knows nothing else
    }
    config = DeepseekV3Config(**LATENT, q_lora_rank=64, n_routed_experts=8, n_group=2, **more)
    return save(folder, DeepseekV3ForCausalLM(config))


def gpt_oss(folder: Path) -> Path:
    """Learned sinks, windows beside full attention, and experts."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    kinds = ["sliding_attention", "full_attention"] * 2
    model = GptOssForCausalLM(
        GptOssConfig(
            **COMMON,
            num_hidden_layers=4,
            head_dim=32,
            sliding_window=64,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=kinds,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.uniform_(0.0, 3.0)
    return save(folder, model)


def qwen3_next(folder: Path) -> Path:
    """Three gated delta nets, one layer of full attention, and experts."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **COMMON,
        num_hidden_layers=4,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        decoder_sparse_step=1,
    )
    return save(folder, Qwen3NextForCausalLM(config))


def jamba(folder: Path) -> Path:
    """Mamba1 beside full attention."""
    from transformers import JambaConfig, JambaForCausalLM

    config = JambaConfig(
        **COMMON,
        num_hidden_layers=4,
        attn_layer_period=4,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=1,
        num_experts_per_tok=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    )
    return save(folder, JambaForCausalLM(config))


def lfm2(folder: Path) -> Path:
    """Short convolutions beside full attention."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        **COMMON,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "conv"],
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
    )
    model = Lfm2ForCausalLM(config)
    config.conv_dim = config.block_dim = config.hidden_size  # vLLM asks for these, and transformers has one name
    return save(folder, model)


def llama4(folder: Path) -> Path:
    """Chunked local attention beside full attention, and experts."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **COMMON,
        intermediate_size_mlp=256,
        num_hidden_layers=4,
        head_dim=32,
        attention_chunk_size=64,
        no_rope_layers=[1, 1, 1, 0],  # the last one has full attention
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
    )
    return save(folder, Llama4ForCausalLM(config))


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "DeepSeek V2": deepseek_v2,
    "DeepSeek V3": deepseek_v3,
    "gpt-oss": gpt_oss,
    "Qwen3-Next": qwen3_next,
    "Jamba": jamba,
    "LFM2": lfm2,
    "Llama 4": llama4,
}


def add_mtp(model: Path, folder: Path) -> Path:
    """A DeepSeek V3 with one layer more, which drafts tokens (MTP): random weights, and the model's own vocabulary."""
    import torch
    from safetensors.torch import load_file

    draw = torch.Generator().manual_seed(5)
    weights, config = load_file(model / "model.safetensors"), json.loads((model / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    last, own = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    made = {
        name.replace(last, own): torch.randn(each.shape, generator=draw) * 0.2 if each.dim() > 1 else each.clone()
        for name, each in weights.items()
        if name.startswith(last)
    }
    made[f"{own}eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=draw) * 0.2
    for name in ("enorm", "hnorm", "shared_head.norm"):
        made[f"{own}{name}.weight"] = torch.ones(hidden)
    made[f"{own}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    made[f"{own}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    return write(folder, {**weights, **made}, {**config, "num_nextn_predict_layers": 1})


def make_eagle(model: Path, folder: Path) -> Path:
    """A head of one layer that drafts tokens for a Llama (EAGLE)."""
    import torch
    from safetensors.torch import load_file

    draw = torch.Generator().manual_seed(6)
    weights, config = load_file(model / "model.safetensors"), json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    made = {
        name.removeprefix("model."): torch.randn(each.shape, generator=draw) * 0.2 if each.dim() > 1 else each.clone()
        for name, each in weights.items()
        if name.startswith("model.layers.0.") and not name.endswith("input_layernorm.weight")
    }
    made["embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    made["fc.weight"] = torch.randn(hidden, 2 * hidden, generator=draw) * 0.2
    return write(folder, made, {**config, "num_hidden_layers": 1})


def add_adapter(model: Path, folder: Path, seed: int) -> Path:
    """A LoRA adapter of a Llama, which changes its queries and values."""
    import torch
    from safetensors.torch import load_file, save_file

    draw, rank, made = torch.Generator().manual_seed(seed), 8, {}
    for name, each in load_file(model / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            own = f"base_model.model.{name.removesuffix('.weight')}"
            made[f"{own}.lora_A.weight"] = torch.randn(rank, each.shape[1], generator=draw) * 0.2
            made[f"{own}.lora_B.weight"] = torch.randn(each.shape[0], rank, generator=draw) * 0.2
    folder.mkdir()
    save_file(made, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    kind = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "base_model_name_or_path": str(model)}
    layers = {"r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**kind, **layers}))
    return folder


def make_llava(folder: Path) -> Path:
    """A Llama that sees: an image of 28 pixels a side is four tokens."""
    from safetensors.torch import load_file, save_file
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    seen: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "projection_dim": 64,
    }
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(hidden_size=64, intermediate_size=128, hidden_act="gelu", **seen),
        text_config=LlamaConfig(**COMMON, num_hidden_layers=3, head_dim=32),
        image_token_index=VOCABULARY - 1,
        vision_feature_layer=-1,
    )
    save(folder, LlavaForConditionalGeneration(config))
    weights, was, wanted = folder / "model.safetensors", "vision_tower.", "vision_tower.vision_model."
    named = {name.replace(was, wanted): each for name, each in load_file(weights).items()}  # as vLLM knows them
    save_file(named, weights, metadata={"format": "pt"})
    image = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}, "crop_size": 28}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    strategy = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "LlavaProcessor", "image_token": "<image>", **strategy})
    )
    return add_tokenizer(folder, image=VOCABULARY - 1)


def write(folder: Path, weights: dict[str, Any], config: dict[str, Any]) -> Path:
    """Write a model's weights and its configuration into a folder."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
