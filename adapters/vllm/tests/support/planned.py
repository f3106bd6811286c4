"""Caches of large models, grouped and laid out by vLLM's own planner from the specifications of their layers.

Models of this size cannot run on a CPU. Their layers' specifications are those that vLLM's model classes return:
``deepseek_v2.py``, ``mla_attention.py``, ``minimax_m3``, ``deepseek_v4`` and ``sparse_swa.py`` in vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

try:
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
except ImportError:  # before 0.33, one function makes the groups and lays them out
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    get_global_kv_cache_groups = None
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SparseCacheRole,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from statelink import state
from statelink_vllm.connector import Model

from .caches import Cache

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MODELS", "Planned", "plan"]

BLOCKS = 48
LONGEST = 1024
PLANNED_FOR = 32
"""vLLM wants blocks for a request of this many tokens. Requests here need fewer than it counts."""
BYTES, BF16, F32 = torch.uint8, torch.bfloat16, torch.float32
Specs = dict[str, KVCacheSpec]


class Planned(NamedTuple):
    """A model's layers.

    Attributes:
        specs: The specification of each layer, by name.
        backend: The names of backends of attention, by the last part of a layer's name; the others have the first.
        heads: KV heads of the whole model, and of its draft model.
        block: Tokens of a block, as ``--block-size`` says.
        layouts: The layouts that the kernels take.
        dcp: Ranks of decode context parallelism.
    """

    specs: Specs
    backend: Mapping[str, str]
    heads: tuple[int, int] = (1, 0)
    block: int = 64
    layouts: Sequence[str] = tuple(KVCacheLayout.__members__)
    dcp: int = 1


def make(kind: Any, **given: Any) -> Any:
    """A layer's specification. Some releases say less in it: then what they do not say is left out.

    Whether a draft model has the layer, a server knows from the layer itself.
    """
    unsaid = {"is_draft", "topk_buffer_width"} - {field.name for field in fields(kind)}
    made = kind(**{name: value for name, value in given.items() if name not in unsaid})
    object.__setattr__(made, "of_draft", given.get("is_draft", False))
    return made


def of_draft(spec: Any) -> bool:
    """Whether a draft model has a layer that `make` specified."""
    return bool(spec.of_draft)


def latents(block: int, *, packed: bool = True, **more: Any) -> MLAAttentionSpec:
    """Latents of DeepSeek V3: 512 numbers and 64 rotary ones, in bf16 or quantised with their scales."""
    kind: dict[str, Any] = (
        {"dtype": BYTES, "cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 656}
        if packed
        else {"dtype": BF16, "cache_dtype_str": "auto"}
    )
    return make(MLAAttentionSpec, block_size=block, num_kv_heads=1, max_tp_shards=1, head_size=576, **kind, **more)


def index(block: int, size: int = 132, dtype: torch.dtype = BYTES, **more: Any) -> MLAAttentionSpec:
    role = SparseCacheRole.INDEXER
    return make(
        MLAAttentionSpec,
        block_size=block,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=size,
        dtype=dtype,
        cache_role=role,
        **more,
    )


def dense(width: int, *, block: int = 64) -> Planned:
    """Qwen3-32B: eight KV heads."""
    specs: Specs = {f"model.layers.{number}.self_attn.attn": heads(block, max(8 // width, 1)) for number in range(2)}
    return Planned(specs, {"": "FLASHINFER"}, (8, 0), block)


def latent(
    width: int, *, block: int = 64, quantised: bool = False, dcp: int = 1, states: bool = False, drafts: int = 0
) -> Planned:
    """DeepSeek R1 and Kimi-K2: latents, also one byte for each number. Kimi-K3: recurrent layers, and DSpark, too."""
    specs: Specs = {}
    kind: dict[str, Any] = (
        {"dtype": BYTES, "cache_dtype_str": "fp8", "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}
        if quantised
        else {"dtype": BF16, "cache_dtype_str": "auto"}
    )
    for number in range(4):
        name = f"model.layers.{number}.self_attn"
        if states and number % 2:
            specs[f"{name}.kda"] = make(
                MambaSpec,
                block_size=block * dcp,
                shapes=MambaStateShapeCalculator.kda_state_shape(width, 16, 32),
                dtypes=(BF16, F32),
                mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
                mamba_cache_mode="align",
                num_speculative_blocks=4,
                page_size_padded=block * 576,
            )
        else:
            specs[f"{name}.attn"] = make(
                MLAAttentionSpec, block_size=block, num_kv_heads=1, max_tp_shards=1, head_size=576, **kind
            )
    for number in range(4, 4 + drafts):
        specs[f"model.layers.{number}.self_attn.attn"] = make(
            MLAAttentionSpec, block_size=block, num_kv_heads=1, max_tp_shards=1, head_size=576, is_draft=True, **kind
        )
    return Planned(specs, {"": "FLASHINFER_MLA"}, block=block, dcp=dcp)


def sparse(width: int, *, block: int = 64, packed: bool = True, leaders: int = 1, mtp: int = 0) -> Planned:
    """DeepSeek V3.2 and GLM-5: latents and an index, of one layer in ``leaders``, and layers for MTP."""
    specs: Specs = {}
    for number in range(4 + mtp):
        draft: dict[str, Any] = {"is_draft": number >= 4}
        leads = number % leaders == 0
        specs[f"model.layers.{number}.self_attn.attn"] = latents(
            block, packed=packed, is_index_group_leader=leads, topk_buffer_width=2048, **draft
        )
        if leads:
            specs[f"model.layers.{number}.self_attn.indexer.k_cache"] = index(block, **draft)
    return Planned(specs, {"": "FLASHMLA_SPARSE", "k_cache": "DEEPSEEK_V32_INDEXER"}, block=block)


def minimax(
    width: int, *, block: int = 128, mtp: int = 0, own: int = 0, quantised: bool = False, index_bytes: bool = False
) -> Planned:
    """MiniMax-M3: one dense layer, and three with keys for an index beside keys and values; EAGLE, or its own MTP."""
    specs: Specs = {}
    kind: dict[str, Any] = {"dtype": BYTES, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR} if quantised else {}
    for number in range(4):
        specs[f"model.layers.{number}.self_attn.attn"] = heads(block, max(4 // width, 1), **kind)
        if number:
            name = f"model.layers.{number}.self_attn.index_cache"
            specs[name] = index(block, 128, BYTES if index_bytes else BF16)
    if mtp:
        specs["model.layers.4.self_attn.attn"] = heads(block, max(8 // width, 1), is_draft=True, **kind)
    for number in range(own):
        name = f"mtp.layers.{number}.self_attn"
        specs[f"{name}.attn"] = heads(block, max(4 // width, 1), is_draft=True, **kind)
        specs[f"{name}.index_cache"] = index(block, 128, BYTES if index_bytes else BF16, is_draft=True)
    backend = {"": "MINIMAX_M3_SPARSE", "index_cache": "MINIMAX_M3_SPARSE_INDEXER"}
    return Planned(specs, backend, (4, 4 if own else 8), block)


def heads(block: int, count: int, size: int = 128, **more: Any) -> FullAttentionSpec:
    return make(
        FullAttentionSpec, **{"block_size": block, "num_kv_heads": count, "head_size": size, "dtype": BF16, **more}
    )


def drafted(width: int, *, block: int = 16, count: int = 4, size: int = 64, prefix: str = "draft_model.") -> Planned:
    """A model with a separate draft model, whose layers have the model's numbers; or with a head such as EAGLE's."""
    specs: Specs = {f"model.layers.{number}.self_attn.attn": heads(block, 8 // width) for number in range(3)}
    first = 0 if prefix else 3
    for number in range(first, first + 2):
        name = f"{prefix}model.layers.{number}.self_attn.attn"
        specs[name] = heads(block, count // width, size, is_draft=True)
    return Planned(specs, {"": "FLASH_ATTN"}, (8, count), block)


def v4(width: int, *, block: int = 256, packed: bool = True, mtp: int = 0, fp4: bool = False) -> Planned:
    """DeepSeek V4: windows in each layer; latents of 4 or of 128 tokens, their compressors, and an index."""
    specs: Specs = {}
    one: dict[str, Any] = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": 576 if packed else 512}
    row: dict[str, Any] = (
        {"dtype": BYTES, "cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 584}
        if packed
        else {"dtype": BF16, "cache_dtype_str": "auto"}
    )
    row = {"head_size": 512, "model_version": "deepseek_v4", **row}
    for number, ratio in enumerate([1, 4, 128, 4, 128, *[1] * mtp]):
        draft = {"is_draft": number >= 5}
        name = f"model.layers.{number}.attn"
        specs[f"{name}.swa_cache"] = make(
            SlidingWindowMLASpec, block_size=64, sliding_window=128, **one, **row, **draft
        )
        if ratio == 1:
            continue
        specs[name] = make(MLAAttentionSpec, block_size=block, tokens_per_state=ratio, **one, **row)
        twice = 2 if ratio == 4 else 1
        states: dict[str, Any] = {"block_size": 4 if twice == 2 else 8, "sliding_window": twice * ratio, "dtype": F32}
        specs[f"{name}.compressor.state_cache"] = make(SlidingWindowMLASpec, head_size=2 * twice * 512, **states, **one)
        if twice == 2:
            specs[f"{name}.indexer.k_cache"] = make(
                MLAAttentionSpec, block_size=block, head_size=68 if fp4 else 132, dtype=BYTES, tokens_per_state=4, **one
            )
            specs[f"{name}.indexer.compressor.state_cache"] = make(
                SlidingWindowMLASpec, head_size=2 * twice * 128, **states, **one
            )
    backend = {"": "FLASHMLA_SPARSE_DSV4", "k_cache": "DEEPSEEK_V4_INDEXER", "state_cache": "COMPRESSOR"}
    return Planned(specs, backend, block=block, layouts=("BLHNC", "BLNHC"))


MODELS: dict[str, Callable[..., Planned]] = {
    "dense": dense,
    "latent": latent,
    "sparse": sparse,
    "minimax": minimax,
    "drafted": drafted,
    "v4": v4,
}


def plan(folder: Path, model: Planned, rank: int = 0, width: int = 1) -> tuple[Cache, Model]:
    """The cache of a rank as vLLM plans it, and what the adapter knows of its model. The memory has random bytes."""
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST, seed=0
        ),
        cache_config=CacheConfig(block_size=model.block, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=LONGEST,
            max_model_len=LONGEST,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        device_config=DeviceConfig("cpu"),
    )
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.cache_config.block_size = model.block
    config.cache_config.num_gpu_blocks = None
    config.cache_config.num_gpu_blocks_override = BLOCKS
    config.cache_config.kv_cache_layout = None
    layout = resolve_kv_cache_layout(config, [list(model.layouts)], list(model.specs.values()))
    groups = [] if get_global_kv_cache_groups is None else [get_global_kv_cache_groups(config, [model.specs])]
    config.model_config.max_model_len = PLANNED_FOR
    (made,) = get_kv_cache_configs(config, [model.specs], [1 << 40], *groups)
    size = max(tensor.size for tensor in made.kv_cache_tensors)
    raw = torch.randint(-128, 128, (size,), dtype=torch.int8)
    tensors: dict[str, torch.Tensor] = {}
    for tensor in made.kv_cache_tensors:
        views = create_kv_cache_views(raw, model.specs[tensor.layers[0]], made.num_blocks, layout, tensor, None)
        tensors.update(zip(tensor.layers, views, strict=True))
    return Cache(made, tensors), _known(model, rank, width)


def _known(model: Planned, rank: int, width: int) -> Model:
    return Model(
        tp=(rank, width),
        heads=model.heads[0],
        groups=None,
        channels_first=False,
        backend=lambda name: model.backend.get(name.rpartition(".")[2], model.backend[""]),
        number=extract_layer_index,
        draft=lambda name: of_draft(model.specs[name]),
        draft_heads=model.heads[1],
        positions=state.Partition("cyclic", model.dcp, rank % model.dcp, 1) if model.dcp > 1 else state.Partition(),
    )


def layers_of(cache: Cache) -> Iterator[tuple[int, str, Any]]:
    """Each layer with the number of its group and its own specification."""
    for number, group in enumerate(cache.config.kv_cache_groups):
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            yield number, name, group.kv_cache_spec if inner is None else inner[name]
