"""DeepSeek V3.2 and GLM-5: latents with an index, which chooses tokens. vLLM's classes for any device, and its backend
for Intel's GPUs, in plain torch. DeepSeek V4 has the same index.

The formulas are those of vLLM's kernels ``indexer_k_quant_and_cache``, ``concat_and_cache_mla``,
``triton_bf16_mla_sparse_interface``, ``fp8_paged_mqa_logits`` and ``top_k_per_row``.
"""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import torch

from .latents import allow

__all__ = ["define", "keep_index", "quantise", "restored"]

SIZE = 128
"""Numbers of an index key."""


def quantise(x: Any, block: int) -> tuple[Any, Any]:
    """Bytes of FP8, and the exponent of the scale of each block."""
    x = x.to(torch.bfloat16).float().unflatten(-1, (-1, block))
    exponent = torch.ceil(torch.log2(x.abs().amax(-1).clamp(min=1e-4) / 448.0))
    made = (x * torch.exp2(-exponent)[..., None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return made.flatten(-2).view(torch.uint8), exponent


def restored(x: Any) -> Any:
    """What a cache, or a query, has of vectors of 128 numbers."""
    data, exponent = quantise(x, SIZE)
    return data.view(torch.float8_e4m3fn).float() * torch.exp2(exponent)


def keep_index(cache: Any, page: int, slots: Any, keys: Any) -> None:
    """Keys into pages ``[pages, bytes]``: 128 bytes of each key, and then the scale of each, in float32."""
    wanted = slots >= 0
    at, keys = slots[wanted].long()[:, None], keys[: len(slots)][wanted]
    data, exponent = quantise(keys, SIZE)
    cache[at // page, at % page * SIZE + torch.arange(SIZE)] = data
    scales = torch.exp2(exponent).contiguous().view(torch.uint8)
    cache[at // page, page * SIZE + at % page * 4 + torch.arange(4)] = scales


def logits(q: Any, cache: Any, weight: Any, lengths: Any, table: Any, page: int, most: int) -> Any:
    """How much each token ``[tokens, heads, 128]`` wants each key of its request: ``[tokens, most]``."""
    out = torch.full((len(q), most), float("-inf"))
    here = torch.arange(min(int(lengths.max()), most))
    none = here >= lengths[:, None]
    at, row = table[:, here // page].long().masked_fill(none, 0)[..., None], (here % page)[:, None]
    keys = cache[at, row * SIZE + torch.arange(SIZE)].view(torch.float8_e4m3fn).float()
    scales = cache[at, page * SIZE + row * 4 + torch.arange(4)].view(torch.float32)
    wanted = torch.einsum("thd,tkd->thk", q.float(), keys * scales).relu()
    out[:, : len(here)] = (wanted * weight[..., None]).sum(1).masked_fill(none, float("-inf"))
    return out


def choose(scores: Any, lengths: Any, tables: Any, out: Any, page: int, raw: Any) -> None:
    """The numbers of the keys that each token wants most; -1 behind them."""
    raw.fill_(-1)
    for t, length in enumerate(lengths.tolist()):
        count = min(length, raw.shape[1])
        raw[t, :count] = scores[t, :length].topk(count).indices.to(raw.dtype)


def keep(self: Any, latent: Any, rotary: Any, cache: Any, slots: Any, *others: Any, **more: Any) -> None:
    """Latents and their rotary numbers, side by side, into pages ``[pages, rows, 576]``."""
    if cache.numel():
        slots = slots.flatten()
        wanted = slots >= 0
        at, page = slots[wanted].long(), cache.shape[1]
        rows = torch.cat((latent.flatten(1), rotary.flatten(1)), dim=-1)[: len(slots)][wanted]
        cache[at // page, at % page] = rows.to(cache.dtype)


def attend(self: Any, q: Any, rows: Any, chosen: Any, metadata: Any) -> Any:
    """Attention of ``[tokens, heads, 576]`` to the chosen rows of the cache."""
    none = chosen < 0
    held = rows[chosen.clamp(min=0).long()].float().masked_fill(none[..., None], 0.0)
    scores = torch.einsum("thd,tkd->thk", q.float(), held) * self.softmax_scale
    weights = scores.masked_fill(none[:, None], float("-inf")).softmax(-1)
    return torch.einsum("thk,tkd->thd", weights, held[..., : self.kv_lora_rank]).to(q.dtype)


def rows_of(requests: Any, table: Any, chosen: Any, **sizes: int) -> Any:
    """Where in the cache the chosen tokens of each request are."""
    at, page = chosen.clamp(min=0).long(), sizes["BLOCK_SIZE"]
    blocks = table[requests[: len(chosen)].long()[:, None], at // page].long()
    return torch.where(chosen >= 0, blocks * sizes["BLOCK_STRIDE_ROWS"] + at % page, -1)


def quantise_queries(x: Any, block: int, **more: Any) -> tuple[Any, Any]:
    data, exponent = quantise(x, block)
    return data.view(torch.float8_e4m3fn), torch.exp2(exponent)


def define(kernel: Any) -> None:
    """Register the kernels, and put the functions in their places."""
    import vllm.model_executor.layers.sparse_attn_indexer as indexer
    import vllm.model_executor.models.deepseek_v2 as model
    import vllm.v1.attention.backends.mla.xpu_mla_sparse as sparse
    from vllm.forward_context import get_forward_context
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    kernel(
        "fp8_paged_mqa_logits_cpu(Tensor q, Tensor cache, Tensor weight, Tensor lengths, Tensor table, int page, "
        "int most) -> Tensor",
        logits,
    )
    kernel(
        "topk_transform_512_cpu(Tensor scores, Tensor lengths, Tensor tables, Tensor(a!) out, int page, "
        "Tensor(b!)? raw) -> ()",
        choose,
    )
    layer: Any = indexer.SparseAttnIndexer
    source = textwrap.dedent(inspect.getsource(layer.forward_cpu))
    was = "assert topk_tokens == 512"  # the real kernel's; this one chooses any number
    assert was in source
    found: dict[str, Any] = {}
    exec(source.replace(was, "assert topk_tokens"), indexer.__dict__, found)

    def forward(self: Any, hidden: Any, q: Any, k: Any, weights: Any) -> Any:
        """vLLM has it for DeepSeek V4 alone, whose keys are in the cache already."""
        metadata = get_forward_context().attn_metadata
        if not self.skip_k_cache_insert and isinstance(metadata, dict):
            cache = self.k_cache.kv_cache
            slots = metadata[self.k_cache.prefix].slot_mapping
            keep_index(cache.view(len(cache), -1), cache.shape[1], slots, k)
        inserts, self.skip_k_cache_insert = self.skip_k_cache_insert, True
        try:
            return found["forward_cpu"](self, hidden, q, k, weights)
        finally:
            self.skip_k_cache_insert = inserts

    layer.forward_cpu = forward
    model.per_token_group_quant_fp8 = quantise_queries
    sparse.triton_convert_req_index_to_global_index = rows_of
    backend: Any = sparse.XPUMLASparseImpl
    backend._forward_bf16_kv, backend.do_kv_cache_update = attend, keep  # noqa: SLF001
    backend.record_logical_topk_ready = lambda self: None  # vLLM's layer calls it, and this backend lacks it
    platform: Any = CpuPlatform
    selected = platform.get_attn_backend_cls.__func__

    def select(cls: Any, backend: Any, attn_selector_config: Any, *given: Any, **more: Any) -> str:
        if attn_selector_config.use_sparse:
            return str(AttentionBackendEnum.XPU_MLA_SPARSE.get_path())
        return str(selected(cls, backend, attn_selector_config, *given, **more))

    platform.get_attn_backend_cls = classmethod(select)
    allow(lambda config: hasattr(config, "index_topk"), chunks=True)
