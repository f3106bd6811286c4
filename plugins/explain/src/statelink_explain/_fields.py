"""The vocabulary of a published ``config.json``: the words for layers, and which fields say something about state.

It follows the configuration classes of transformers 5.23.
"""

from __future__ import annotations

import re

from ._model import Dtype, Kind

__all__ = ["COMPRESSED", "DTYPES", "HARMLESS", "KINDS", "LETTERS", "MEANING", "NESTED", "STATE", "Kinds"]

Kinds = tuple[Kind, ...]

NESTED = ("text_config", "llm_config", "language_config")
"""Where a model that also sees or hears keeps the configuration of its language model."""
KINDS: dict[str, Kinds] = {
    "full_attention": ("full",),
    "attention": ("full",),
    "indexed_attention": ("full", "index"),
    "minimax_m3_sparse": ("full", "index"),
    "sliding_attention": ("window",),
    "chunked_attention": ("chunk",),
    "linear_attention": ("mamba",),
    "mamba": ("mamba",),
    "conv": ("mamba",),
    "attention and mamba": ("full", "mamba"),
    "mlp": (),
    "moe": (),
    "compressed_attention": ("compressed",),
}
"""What a layer keeps, by the word for it in ``layer_types`` and ``layers_block_type``."""
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""The letters of ``hybrid_override_pattern``."""
COMPRESSED = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""Tokens of one compressed row of DeepSeek-V4, by the word for the layer."""
DTYPES: dict[str, Dtype] = {name: name for name in ("bfloat16", "float16", "float32")}

MEANING: list[tuple[Kinds, re.Pattern[str]]] = [
    (("full", "window", "chunk"), re.compile(r"num_key_value_heads|(attention_)?head_dim|v_head_dim")),
    (
        ("full",),
        re.compile(r"global_head_dim|num_global_key_value_heads|attention_k_eq_v|kv_lora_rank|qk_rope_head_dim"),
    ),
    (("window", "compressed"), re.compile(r"sliding_window|swa_\w+")),
    (("chunk",), re.compile(r"attention_chunk_size")),
    (("index", "compressed"), re.compile(r"index_\w+|indexer_types")),
    (("mamba",), re.compile(r"mamba_\w+|linear_\w+|conv_\w+|ssm_state_size|n_groups|expand")),
]
"""Fields that mean something only for layers of some kinds."""
STATE = re.compile(
    r"""(^|_)
    (attention | attn | block | cache | caches | chunk | compress\w* | conv\w* | delta | gdn | global | gram | head_dim
    | hybrid | index\w* | interval | kda | kv | key | latent | layer | layers | lightning | linear | local | lora
    | mamba\w* | mem | memory | mixer | ngram\w* | pattern | period | recurrent | retention | rnn | rwkv | share
    | shared | short | sink | sinks | sliding | sparse | ssm | state | states | swa | token_shift | types | value
    | window | xlstm)
    (_|$)""",
    re.VERBOSE,
)
"""A field with such a word in its name may describe state. It is read, or in `HARMLESS`, or the file is refused."""
HARMLESS = re.compile(
    r"""
    # By the last word: how something is computed.
    (\w+_)?(activation | act | alpha | bias | biases | beta | clipping | coef | coeff | drop | dropout | eps | epsilon
    | fn | (alpha | beta | scaling | rotary | initializer)_factor | implementation | init | limit | max | min
    | multipliers? | norm | norms | pdrop | prob | scale | scalar | softcapping | std | theta | token | token_ids?
    | token_index | (tp | pp | ep)_plan)
    # By any word: parts of a layer that keep nothing.
    | (\w+_)?(expert | experts | moe | mlp | rope | rotary | router | layernorms? | layer_norm)(_\w+)?
    | (\w+_)?(intermediate_size | initializer)(_\w+)?
    # Draft layers, which are not described.
    | mtp_\w+ | num_mtp_\w+ | num_nextn_predict_layers
    # Queries, and what is computed from latents.
    | num_attention_heads | q_lora_rank | o_lora_rank | gated_norm_rank | qk_nope_head_dim | qk_head_dim
    | attn_output_gate | attention_value_scale | attn_temperature_tuning
    # Which keys are looked at: they are kept all the same.
    | index_topk | index_n_heads | index_topk_blocks | index_block_size | index_local_blocks
    # Which layers are computed in which way.
    | first_k_dense_replace | num_dense_layers | num_hash_layers | decoder_sparse_step | interleave_moe_layer_step
    | max_window_layers | no_rope_layers | no_rope_layer_interval | layer_rope_theta | activation_sparsity_pattern
    # Kernels.
    | block_size | (mamba_)?chunk_size | chunk_size_feed_forward | use_mamba_kernels | mamba_norm_before_gate
    | mamba_dt_\w+ | block_ffn_dim_multiplier | block_multiple_of | block_auto_adjust_ff_dim
    # What a caller of transformers chooses.
    | num_logits_to_keep | output_hidden_states | output_attentions | use_cache | cache_implementation
    | _attn_implementation\w* | keys_to_ignore_at_inference | id2label | label2id | position_embedding_type
    | tie_word_embeddings | vocab_size_per_layer_input | hidden_size_per_layer_input
    """,
    re.VERBOSE,
)
"""Fields with a word of `STATE` in their names that do not change what a request keeps."""
