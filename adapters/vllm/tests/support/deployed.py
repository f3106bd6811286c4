"""Tiny models of the families that public recipes deploy, with random weights, by the classes of `transformers`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .families import LATENT
from .models import COMMON, save

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DEPLOYED", "Deployed"]


class Deployed(NamedTuple):
    """A model, and what its tests have to know.

    Attributes:
        make: Makes it in a folder.
        options: Arguments of vLLM's engine.
        lengths: Of prompts: one token, and those at and around the end of a block, a window and a compressor's group.
        says: The components that an engine says it moves.
        round: Lets `transformers` round what the engine rounds before it keeps it. Called once in a process. Without
            it, the two are not compared.
    """

    make: Callable[[Path], Path]
    options: Mapping[str, Any]
    lengths: Sequence[int]
    says: Sequence[str]
    round: Callable[[], None] | None = None


def minimax_m3(folder: Path) -> Path:
    """A dense layer, and three whose index chooses two blocks of 128 tokens; experts."""
    from safetensors.torch import load_file, save_file
    from transformers import conversion_mapping
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

    layers = [0, 1, 1, 1]
    config = MiniMaxM3VLTextConfig(
        **{**COMMON, "intermediate_size": 64},
        num_hidden_layers=len(layers),
        head_dim=128,
        dense_intermediate_size=256,
        shared_intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        mlp_layer_types=["sparse" if each else "dense" for each in layers],
        layer_types=["minimax_m3_sparse" if each else "full_attention" for each in layers],
        index_n_heads=COMMON["num_key_value_heads"],
        index_topk_blocks=2,
    )
    # What is published has the model within one that sees, for which alone `transformers` knows the names.
    named = conversion_mapping.get_checkpoint_conversion_mapping("minimax_m3_vl")
    conversion_mapping.register_checkpoint_conversion_mapping(config.model_type, named, overwrite=True)
    save(folder / "transformers", MiniMaxM3VLForCausalLM(config))
    weights = load_file(folder / "transformers" / "model.safetensors")
    changes = {"language_model.lm_head": "lm_head", "layers.0.block_sparse_moe": "layers.0.mlp"}
    for was, wanted in changes.items():
        weights = {name.replace(was, wanted): each for name, each in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    text = {
        **config.to_dict(),
        "hidden_act": "swigluoai",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "n_shared_experts": 1,
        "num_mtp_modules": 0,
        "moe_layer_freq": layers,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": 128,
            "sparse_num_index_heads": config.index_n_heads,
            "sparse_topk_blocks": config.index_topk_blocks,
            "sparse_block_size": 128,
            "sparse_disable_index_value": layers,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": config.index_local_blocks,
            "sparse_attention_freq": layers,
        },
    }
    del text["model_type"]
    ids = {name: COMMON[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    whole = {"model_type": "minimax_m3_vl", "architectures": ["MiniMaxM3SparseForCausalLM"], "text_config": text, **ids}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def round_minimax_m3() -> None:
    """vLLM has keys of the index in bf16, and queries for them."""
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as module

    turn: Any = module.apply_rotary_pos_emb

    def rounded(q: Any, k: Any, *given: Any) -> Any:
        q, k = turn(q, k, *given)
        return (q.bfloat16().float(), k.bfloat16().float()) if k.shape[1] == 1 else (q, k)  # the index has one key

    module.apply_rotary_pos_emb = rounded


INDEX: dict[str, Any] = {
    **LATENT,
    "q_lora_rank": 64,
    "n_routed_experts": 8,
    "n_group": 2,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "index_topk": 32,
    "index_head_dim": 128,
    "index_n_heads": 16,  # with a few, many keys have the same score: none
}


def deepseek_v32(folder: Path) -> Path:
    """Latents, and an index in each layer, which chooses 32 tokens."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    return save(folder, DeepseekV32ForCausalLM(DeepseekV32Config(**INDEX)))


def glm_5(folder: Path) -> Path:
    """The same, where two of four layers do with the choice of the layer before them."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    more = {"num_hidden_layers": 4, "index_topk_freq": 2, "index_skip_topk_offset": 1}
    return save(folder, GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**{**INDEX, **more})))


def _round_index(name: str) -> None:
    """vLLM has keys of the index in FP8, and queries for them."""
    import importlib
    import inspect
    import textwrap

    from .kernels.dsa import quantise

    def rounded(x: Any) -> Any:
        import torch

        data, exponent = quantise(x, x.shape[-1])
        return data.view(torch.float8_e4m3fn).float() * torch.exp2(exponent)

    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    (indexer,) = (each for each in vars(module).values() if getattr(each, "__name__", "").endswith("Indexer"))
    source = textwrap.dedent(inspect.getsource(indexer.forward))
    for was, wanted in (
        ("q = torch.cat([q_rot, q_pass], dim=-1)", "q = rounded(torch.cat([q_rot, q_pass], dim=-1))"),
        ("k = torch.cat([k_rot, k_pass], dim=-1)", "k = rounded(torch.cat([k_rot, k_pass], dim=-1))"),
    ):
        assert was in source, was
        source = source.replace(was, wanted)
    found: dict[str, Any] = {}
    exec(source, {**vars(module), "rounded": rounded}, found)
    indexer.forward = found["forward"]


M3 = Deployed(
    minimax_m3,
    {"block_size": 128, "kv_cache_memory_bytes": 96 << 20},
    (1, 7, 127, 128, 129, 256, 257, 600),
    ("kv (kv)", "dsa (dsa)"),
    round_minimax_m3,
)
DSA = Deployed(
    deepseek_v32,
    {"block_size": 64, "kv_cache_memory_bytes": 32 << 20},
    (1, 7, 33, 63, 64, 65, 128, 300, 600),
    ("kv (kv)", "dsa (dsa)"),
    lambda: _round_index("deepseek_v32"),
)
FP8 = {"kv_cache_dtype": "fp8", "attention_config": {"indexer_kv_dtype": "fp8"}}

DEPLOYED: dict[str, Deployed] = {
    "MiniMax-M3": M3,
    "MiniMax-M3 in FP8": M3._replace(options={**M3.options, **FP8}, round=None),
    "DeepSeek V3.2": DSA,
    "GLM-5": DSA._replace(make=glm_5, round=lambda: _round_index("glm_moe_dsa")),
}
