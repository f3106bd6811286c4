"""Tiny models of the families that public recipes deploy, with random weights, by the classes of `transformers`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

from .families import LATENT, add_mtp, write
from .models import COMMON, save

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DEPLOYED", "DRAFTS", "Deployed", "Drafts"]


class Deployed(NamedTuple):
    """A model, and what its tests have to know.

    Attributes:
        make: Makes it in a folder.
        options: Arguments of vLLM's engine.
        lengths: Of prompts: one token, and those at and around the end of a block, a window and a compressor's group.
        says: The components that an engine says it moves.
        round: Lets `transformers` round what the engine rounds before it keeps it. Called once in a process. Without
            it, the two are not compared.
        within: How far logprobs may be apart. What is rounded to FP8 may go either way, and much may depend on it.
    """

    make: Callable[[Path], Path]
    options: Mapping[str, Any]
    lengths: Sequence[int]
    says: Sequence[str]
    round: Callable[[], None] | None = None
    within: float = 1e-3


def _publish(folder: Path, model: Any, changes: Mapping[str, str], config: Mapping[str, Any]) -> Path:
    """Save a model as it is published, as far as vLLM looks, and as `transformers` saves it in a folder within.

    Args:
        folder: Where it goes.
        model: The model.
        changes: Parts of names as `transformers` saves them, and what they are in what is published.
        config: The configuration for vLLM.
    """
    from safetensors.torch import load_file, save_file

    weights = load_file(save(folder / "transformers", model) / "model.safetensors")
    for was, wanted in changes.items():
        weights = {name.replace(was, wanted): each for name, each in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    named = {"architectures": [type(model).__name__], **config}
    (folder / "config.json").write_text(json.dumps(named))
    return folder


def _plain(config: Any) -> dict[str, Any]:
    """A configuration without what it does not say."""
    return {name: each for name, each in config.to_dict().items() if each is not None}


def minimax_m3(folder: Path) -> Path:
    """A dense layer, and three whose index chooses two blocks of 128 tokens; experts."""
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
    mapping: Any = conversion_mapping
    named = mapping.get_checkpoint_conversion_mapping("minimax_m3_vl")
    mapping.register_checkpoint_conversion_mapping(config.model_type, named, overwrite=True)
    model = MiniMaxM3VLForCausalLM(config)
    changes = {"language_model.lm_head": "lm_head", "layers.0.block_sparse_moe": "layers.0.mlp"}
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
    return _publish(folder, model, changes, whole)


def round_minimax_m3() -> None:
    """vLLM has keys of the index in bf16, and queries for them."""
    module = _modeling("minimax_m3_vl")
    turn = module.apply_rotary_pos_emb

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

    more = {"num_hidden_layers": 4, "index_topk_freq": 2, "index_skip_topk_offset": 1, "indexer_rope_interleave": True}
    return save(folder, GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**{**INDEX, **more})))


def deepseek_v4(folder: Path) -> Path:
    """A layer with a window alone, and two each whose compressors make a latent of 4 and of 128 tokens; an index."""
    import torch
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    ratios = {"sliding": 0, "compressed_sparse": 4, "heavily_compressed": 128}
    kinds = ["sliding", *["compressed_sparse", "heavily_compressed"] * 2]
    config = DeepseekV4Config(
        **{**COMMON, "num_key_value_heads": 1, "intermediate_size": 64},
        num_hidden_layers=len(kinds),
        layer_types=[f"{kind}_attention" for kind in kinds],
        mlp_layer_types=["hash_moe"] + ["moe"] * (len(kinds) - 1),
        head_dim=512,
        q_lora_rank=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        hc_mult=2,
        sliding_window=128,
        o_groups=2,
        o_lora_rank=64,
        index_n_heads=16,
        index_head_dim=128,
        index_topk=16,
        num_nextn_predict_layers=0,
        swiglu_limit=1000.0,  # experts on a CPU have none
    )
    model = DeepseekV4ForCausalLM(config)
    draw = torch.Generator().manual_seed(21)
    with torch.no_grad():
        for name, each in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("tid2eid"):
                each.copy_(torch.stack([torch.randperm(4, generator=draw)[:2] for _ in range(len(each))]))
            elif name.endswith(("sinks", "base", "correction_bias")):
                each.copy_(torch.randn(each.shape, generator=draw) * 0.2)
    own = {
        "expert_dtype": "bf16",
        "topk_method": "noaux_tc",
        "compress_ratios": [ratios[kind] for kind in kinds],
        "num_hash_layers": 1,
    }
    theirs = {"layer_types", "mlp_layer_types", "compress_rates"}  # what `transformers` makes of the last two
    plain = {name: each for name, each in _plain(config).items() if name not in theirs}
    changes = {".attn.norm.": ".attn.kv_norm.", "model.hc_head.hc_": "hc_head_", "embed_tokens.": "embed."}
    return _publish(folder, model, {**changes, "model.": ""}, {**plain, **own})


def kimi_linear(folder: Path) -> Path:
    """A layer of latents among three of KDA. vLLM's class for AMD cannot load plain experts on two ranks."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    full = [1]
    layers = range(4)
    config = KimiLinearConfig(
        **{**COMMON, "num_key_value_heads": 4},
        num_hidden_layers=len(layers),
        **{name: LATENT[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
        linear_head_dim=32,
        linear_num_heads=4,
        layer_types=["full_attention" if number in full else "linear_attention" for number in layers],
        mlp_layer_types=["dense"] * len(layers),
    )
    own = {
        "mla_use_nope": True,
        "first_k_dense_replace": len(layers),
        "linear_attn_config": {
            "kda_layers": [number + 1 for number in layers if number not in full],
            "full_attn_layers": [number + 1 for number in full],
            "head_dim": 32,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    }
    changes = {"block_sparse_moe": "mlp"}
    return _publish(folder, KimiLinearForCausalLM(config), changes, {**_plain(config), **own})


def _modeling(name: str) -> Any:
    """A module of `transformers` with a model's own code."""
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def _round_index(name: str) -> None:
    """vLLM has keys of the index in FP8, and queries for them."""
    import inspect
    import textwrap

    from .kernels.dsa import restored

    module = _modeling(name)
    (indexer,) = (each for each in vars(module).values() if getattr(each, "__name__", "").endswith("Indexer"))
    source = textwrap.dedent(inspect.getsource(indexer.forward))
    for was, wanted in (
        ("q = torch.cat([q_rot, q_pass], dim=-1)", "q = restored(torch.cat([q_rot, q_pass], dim=-1))"),
        ("k = torch.cat([k_rot, k_pass], dim=-1)", "k = restored(torch.cat([k_rot, k_pass], dim=-1))"),
    ):
        assert was in source, was
        source = source.replace(was, wanted)
    found: dict[str, Any] = {}
    exec(source, {**vars(module), "restored": restored}, found)
    indexer.forward = found["forward"]


class Drafts(NamedTuple):
    """What drafts tokens for one of these models.

    Attributes:
        of: The model, by its name in `DEPLOYED`.
        make: Makes it for the model in the first folder: a model of its own in the second, or there the model with it.
        beside: Whether it is a model of its own.
        given: What vLLM's ``speculative_config`` says of it.
        says: The components that an engine says it moves, beside the model's.
    """

    of: str
    make: Callable[[Path, Path], Path]
    beside: bool
    given: Mapping[str, Any]
    says: Sequence[str]


def _layer(weights: Mapping[str, Any], was: str, own: str, draw: Any) -> dict[str, Any]:
    """Weights of a layer like another one, random where they are no vectors."""
    import torch

    return {
        name.replace(was, own): torch.randn(each.shape, generator=draw) * 0.2 if each.dim() > 1 else each.clone()
        for name, each in weights.items()
        if name.startswith(was)
    }


def add_mtp_m3(model: Path, folder: Path) -> Path:
    """A MiniMax-M3 with a module that drafts tokens (MTP): a layer with an index."""
    import torch
    from safetensors.torch import load_file

    draw, own = torch.Generator().manual_seed(8), "model.mtp.layers.0."
    weights, config = load_file(model / "model.safetensors"), json.loads((model / "config.json").read_text())
    text = config["text_config"]
    hidden, last = text["hidden_size"], text["num_hidden_layers"] - 1
    made = _layer(weights, f"model.layers.{last}.", f"{own}transformer_layer.", draw)
    made[f"{own}eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=draw) * 0.2
    for name in ("enorm", "hnorm", "final_layernorm"):
        made[f"{own}{name}.weight"] = torch.zeros(hidden)  # to which these norms add one
    return write(folder, {**weights, **made}, {**config, "text_config": {**text, "num_mtp_modules": 1}})


def add_mtp_v4(model: Path, folder: Path) -> Path:
    """A DeepSeek V4 with a layer that drafts tokens (MTP): a window, and experts that a bias has a say in."""
    import torch
    from safetensors.torch import load_file

    draw, own = torch.Generator().manual_seed(9), "mtp.0."
    weights, config = load_file(model / "model.safetensors"), json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    made = {
        **_layer(weights, "layers.0.", own, draw),
        **_layer(weights, "layers.1.ffn.", f"{own}ffn.", draw),
        **{f"{own}{name}": weights[name].clone() for name in weights if name.startswith("hc_head_")},
        f"{own}head.weight": weights["head.weight"].clone(),
        f"{own}emb.tok_emb.weight": weights["embed.weight"].clone(),
    }
    del made[f"{own}ffn.gate.tid2eid"]
    for name in ("e_proj", "h_proj"):
        made[f"{own}{name}.weight"] = torch.randn(hidden, hidden, generator=draw) * 0.2
    for name in ("enorm", "hnorm", "norm"):
        made[f"{own}{name}.weight"] = torch.ones(hidden)
    more = {"num_nextn_predict_layers": 1, "compress_ratios": [*config["compress_ratios"], 0]}
    return write(folder, {**weights, **made}, {**config, **more})


def make_eagle3(model: Path, folder: Path) -> Path:
    """A head of one dense layer, which drafts tokens for a MiniMax-M3 from hidden states of three layers (EAGLE3)."""
    import torch

    draw, hidden, size = torch.Generator().manual_seed(7), COMMON["hidden_size"], 32
    heads, kv = COMMON["num_attention_heads"] * size, COMMON["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {
        "midlayer.self_attn.q_proj": (heads, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads),
        "midlayer.mlp.gate_proj": (COMMON["intermediate_size"], hidden),
        "midlayer.mlp.up_proj": (COMMON["intermediate_size"], hidden),
        "midlayer.mlp.down_proj": (hidden, COMMON["intermediate_size"]),
        "fc": (hidden, 3 * hidden),
        "lm_head": (COMMON["vocab_size"], hidden),
        "embed_tokens": (COMMON["vocab_size"], hidden),
        **dict.fromkeys((f"midlayer.{name}" for name in ("input_layernorm", "hidden_norm")), (hidden,)),
        **dict.fromkeys(("midlayer.post_attention_layernorm", "norm"), (hidden,)),
    }
    made = {
        f"{name}.weight": torch.randn(shape, generator=draw) * 0.2 if len(shape) > 1 else torch.ones(shape)
        for name, shape in shapes.items()
    }
    config = {
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "head_dim": size,
    }
    return write(folder, made, {**COMMON, **config})


M3 = Deployed(
    minimax_m3,
    {"block_size": 128, "kv_cache_memory_bytes": 96 << 20},
    (1, 7, 127, 128, 129, 256, 257, 600),
    ("kv (kv)", "dsa (dsa)"),
    round_minimax_m3,
)


def round_deepseek_v4() -> None:
    """vLLM has latents in FP8 and bf16, keys of the index in FP8, and queries for them. A projection is in bf16."""
    from .kernels.deepseek_v4 import rounded
    from .kernels.dsa import restored

    module = _modeling("deepseek_v4")
    turn, linear = module.apply_rotary_pos_emb, module.DeepseekV4GroupedLinear

    def kept(x: Any, *given: Any) -> Any:
        x = turn(x, *given)
        if x.shape[-1] == 128:
            return restored(x)
        return rounded(x) if x.shape[1] == 1 else x  # a latent has one head

    project = linear.forward

    def projected(self: Any, x: Any) -> Any:
        self.weight.data = self.weight.data.bfloat16().float()
        return project(self, x.bfloat16().float()).bfloat16().float()

    module.apply_rotary_pos_emb, linear.forward = kept, projected


DSA = Deployed(
    deepseek_v32,
    {"block_size": 64, "kv_cache_memory_bytes": 32 << 20},
    (1, 7, 33, 63, 64, 65, 128, 300, 600),
    ("kv (kv)", "dsa (dsa)"),
    lambda: _round_index("deepseek_v32"),
    0.05,
)
FP8 = {"kv_cache_dtype": "fp8", "attention_config": {"indexer_kv_dtype": "fp8"}}

DEPLOYED: dict[str, Deployed] = {
    "MiniMax-M3": M3,
    "MiniMax-M3 in FP8": M3._replace(options={**M3.options, **FP8}, round=None),
    "DeepSeek V3.2": DSA,
    "GLM-5": DSA._replace(make=glm_5, round=lambda: _round_index("glm_moe_dsa")),
    "Kimi-Linear": Deployed(
        kimi_linear, {"kv_cache_memory_bytes": 64 << 20}, (1, 7, 100, 300), ("kv (kv)", "mamba"), lambda: None
    ),
    "DeepSeek V4": Deployed(
        deepseek_v4,
        {"block_size": 256, "kv_cache_memory_bytes": 256 << 20},
        (1, 3, 4, 5, 127, 128, 129, 257),
        ("dsv4.c4", "dsv4.c128", "dsv4.c4.index", "swa"),
        round_deepseek_v4,
        0.2,
    ),
}
if version("vllm").startswith("0.31."):  # see `kernels.kda.define`
    del DEPLOYED["Kimi-Linear"]

MTP: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 3}

DRAFTS: dict[str, Drafts] = {
    "EAGLE3 with MiniMax-M3": Drafts(
        "MiniMax-M3",
        make_eagle3,
        beside=True,
        given={"method": "eagle3", "num_speculative_tokens": 3},
        says=("draft.kv (kv)",),
    ),
    "MTP of MiniMax-M3": Drafts(
        "MiniMax-M3", add_mtp_m3, beside=False, given=MTP, says=("draft.kv (kv)", "draft.dsa (dsa)")
    ),
    "MTP of DeepSeek V3.2": Drafts(
        "DeepSeek V3.2", add_mtp, beside=False, given=MTP, says=("draft.kv (kv)", "draft.dsa (dsa)")
    ),
    "MTP of DeepSeek V4": Drafts("DeepSeek V4", add_mtp_v4, beside=False, given=MTP, says=("draft.swa",)),
}
"""By the kind, as `test_speculation` runs them."""
