"""Tiny models of the families that public recipes deploy, with random weights, by the classes of `transformers`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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


M3 = Deployed(
    minimax_m3,
    {"block_size": 128, "kv_cache_memory_bytes": 96 << 20},
    (1, 7, 127, 128, 129, 256, 257, 600),
    ("kv (kv)", "dsa (dsa)"),
    round_minimax_m3,
)
FP8 = {"kv_cache_dtype": "fp8", "attention_config": {"indexer_kv_dtype": "fp8"}}

DEPLOYED: dict[str, Deployed] = {
    "MiniMax-M3": M3,
    "MiniMax-M3 in FP8": M3._replace(options={**M3.options, **FP8}, round=None),
}
