"""MiniMax-M3: keys and values with an index, which chooses blocks of 128 tokens.

The formulas are those of vLLM's kernels: ``fused_minimax_m3_qknorm_rope_kv_insert`` in CUDA fills the caches, and the
Triton functions in ``vllm/models/minimax_m3/common/ops`` read them. Triton's interpreter cannot run that for decoding.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

__all__ = ["define"]

BLOCK = 128


def norm(x: Any, weight: Any, eps: float) -> Any:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float())


def gemma(self: Any, x: Any, residual: Any = None) -> Any:
    """In place of FlashInfer's norms."""
    if residual is None:
        return norm(x, self.weight, self.variance_epsilon).to(x.dtype)
    residual.add_(x)
    x.copy_(norm(residual, self.weight, self.variance_epsilon))
    return x, residual


def turn(x: Any, table: Any, positions: Any, dim: int) -> Any:
    """Rotary positions on the first ``dim`` numbers, in halves. x is ``[tokens, heads, size]``."""
    cos, sin = (each[:, None] for each in table[positions].float().chunk(2, dim=-1))
    one, two, rest = x[..., : dim // 2], x[..., dim // 2 : dim], x[..., dim:]
    return torch.cat((one * cos - two * sin, two * cos + one * sin, rest), dim=-1)


def insert(
    qkv: Any,
    q_weight: Any,
    k_weight: Any,
    table: Any,
    positions: Any,
    heads: int,
    kv_heads: int,
    dim: int,
    eps: float,
    index_q_weight: Any,
    index_k_weight: Any,
    index_heads: int,
    slots: Any,
    index_slots: Any,
    cache: Any,
    index_cache: Any,
    page: int,
    q_out: Any,
    index_q_out: Any,
    *others: Any,
) -> None:
    """Queries, keys and values of ``[tokens, ...]`` side by side: normed, turned, and kept in pages."""
    size = q_weight.shape[0]
    parts = [heads, kv_heads, kv_heads] + ([index_heads, 1] if index_heads else [])
    q, k, v, *index = (each.unflatten(-1, (-1, size)) for each in qkv.split([size * n for n in parts], dim=-1))
    turned = turn(norm(q, q_weight, eps), table, positions, dim).to(qkv.dtype)
    (q if q_out is None else q_out.unflatten(-1, (-1, size))).copy_(turned)
    k.copy_(turn(norm(k, k_weight, eps), table, positions, dim).to(qkv.dtype))
    if cache is not None:
        put(cache[..., :size], k, slots, page)
        put(cache[..., size:], v, slots, page)
    if index_heads:
        iq = turn(norm(index[0], index_q_weight, eps), table, positions, dim)
        index_q_out.copy_(iq.flatten(1).to(index_q_out.dtype))
        if index_cache is not None:
            ik = turn(norm(index[1], index_k_weight, eps), table, positions, dim)
            put(index_cache[:, None], ik, slots if index_slots is None else index_slots, page)


def put(cache: Any, rows: Any, slots: Any, page: int) -> None:
    """Rows ``[tokens, heads, size]`` into a cache ``[blocks, heads, page, size]``."""
    wanted = slots >= 0
    at, rows = slots[wanted].long(), rows[: len(slots)][wanted]
    if cache.dtype.itemsize == 1:
        cache.view(torch.uint8)[at // page, :, at % page] = rows.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        cache[at // page, :, at % page] = rows.to(cache.dtype)


def pages(cache: Any, blocks: Any) -> Any:
    if cache.dtype.itemsize == 1:
        return cache.view(torch.uint8)[blocks.long()].view(torch.float8_e4m3fn).float()
    return cache[blocks.long()].float()


def score(iq: Any, cache: Any, table: Any, starts: Any, lengths: Any, before: Any, *others: Any) -> Any:
    """The largest product of each query with a key of each block: ``[heads, tokens, blocks]``."""
    most = -(-max([1, *lengths.tolist()]) // BLOCK)
    out = torch.full((iq.shape[1], iq.shape[0], most), float("-inf"))
    for row, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
        count = -(-int(lengths[row]) // BLOCK)
        keys = pages(cache, table[row, :count]).flatten(0, 1)
        made = torch.einsum("thd,kd->htk", iq[first:last].float(), keys)
        here = torch.arange(first, last)[:, None] - first + int(before[row])
        made = made.masked_fill(torch.arange(count * BLOCK)[None] > here, float("-inf"))
        out[:, first:last, :count] = made.reshape(*made.shape[:2], count, BLOCK).amax(-1)
    return out


def choose(scores: Any, starts: Any, before: Any, most: int, topk: int, init: int, local: int, out: Any = None) -> Any:
    """The blocks that each query attends to: ``[heads, tokens, topk]``, and -1 behind them."""
    total = scores.shape[1]
    made = torch.full((scores.shape[0], total, topk), -1, dtype=torch.int32) if out is None else out[:, :total]
    made.fill_(-1)
    for row, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
        for token in range(first, last):
            valid = (int(before[row]) + token - first + BLOCK) // BLOCK
            here = scores[:, token, :valid].clone()
            here[:, :init] = 1e30
            here[:, max(0, valid - local) :] = 1e29
            count = min(topk, valid)
            made[:, token, :count] = here.topk(count, dim=-1).indices.to(torch.int32)
    return made


def choose_one(
    iq: Any,
    cache: Any,
    table: Any,
    lengths: Any,
    longest: int,
    topk: int,
    init: int,
    local: int,
    kv_heads: int,
    each: int,
    most: int,
    out: Any = None,
    score_out: Any = None,
) -> Any:
    """The same for a step of decoding, with ``each`` tokens of each request."""
    starts, before = torch.arange(0, len(lengths) * each + 1, each), lengths - each
    return choose(score(iq, cache, table, starts, lengths, before), starts, before, each, topk, init, local, out)


def attend(
    q: Any,
    cache: Any,
    chosen: Any,
    table: Any,
    starts: Any,
    lengths: Any,
    before: Any,
    most: int,
    kv_heads: int,
    scale: float,
    out: Any,
    **scales: Any,
) -> None:
    """Attention of ``[tokens, heads, size]`` to the tokens of the chosen blocks."""
    size, share = q.shape[-1], q.shape[1] // kv_heads
    for row, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
        count = -(-int(lengths[row]) // BLOCK)
        held = pages(cache, table[row, :count]).transpose(0, 1).flatten(1, 2)
        picks = chosen[:, first:last].long()
        blocks = torch.zeros(kv_heads, last - first, count + 1, dtype=torch.bool)
        blocks.scatter_(2, picks.where(picks >= 0, torch.full_like(picks, count)), value=True)
        seen = blocks[..., :count].repeat_interleave(BLOCK, dim=-1)
        here = torch.arange(first, last)[:, None] - first + int(before[row])
        seen &= torch.arange(count * BLOCK)[None] <= here
        held = held.masked_fill(~seen.any(1)[..., None], 0.0)  # nobody reads it, and a weight of zero hides no NaN
        query = q[first:last].float().unflatten(1, (kv_heads, share))
        scores = torch.einsum("thgd,hkd->htgk", query, held[..., :size]) * scale
        weights = scores.masked_fill(~seen[:, :, None], float("-inf")).softmax(-1)
        made = torch.einsum("htgk,hkd->thgd", weights, held[..., size:])
        out[first:last] = made.flatten(1, 2).to(out.dtype)


def attend_one(
    q: Any,
    cache: Any,
    chosen: Any,
    table: Any,
    lengths: Any,
    kv_heads: int,
    scale: float,
    out: Any,
    each: int,
    **scales: Any,
) -> None:
    """The same for a step of decoding."""
    starts, before = torch.arange(0, len(lengths) * each + 1, each), lengths - each
    attend(q, cache, chosen, table, starts, lengths, before, each, kv_heads, scale, out)


def route(routing: Any) -> Any:
    """Each expert has a score by itself, and a bias has a say in who is chosen. vLLM has that on a CPU with groups."""

    def chosen(self: Any, hidden: Any, logits: Any, *given: Any, **more: Any) -> Any:
        if self.scoring_func != "sigmoid" or self.use_grouped_topk or self.custom_routing_function is not None:
            return routing(self, hidden, logits, *given, **more)
        weights, bias = torch.sigmoid(logits.float()), self.e_score_correction_bias
        experts = (weights if bias is None else weights + bias).topk(self.top_k, dim=-1).indices
        taken = weights.gather(1, experts)
        return taken / taken.sum(-1, keepdim=True) * self.routed_scaling_factor, experts.to(torch.int32)

    return chosen


def _allow_bytes() -> None:
    """Let dense layers keep keys and values in FP8, which the stand-in for their attention does not take.

    vLLM's own kernel needs a processor with AVX-512 for that. The stand-in runs on any.
    """
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

    module: Any = cpu_attn
    isa = module._get_attn_isa  # noqa: SLF001
    module._get_attn_isa = lambda *given: isa(*given[:3])  # noqa: SLF001
    known = module.CPUAttentionBackend.supports_kv_cache_dtype
    module.CPUAttentionBackend.supports_kv_cache_dtype = classmethod(
        lambda cls, kind: known(kind) or kind in cls.supported_kv_cache_dtypes
    )
    keep, read = ops.cpu_attn_reshape_and_cache, ops.cpu_attention_with_kv_cache

    def kept(key: Any, value: Any, keys: Any, values: Any, *others: Any, **more: Any) -> None:
        if keys.dtype.itemsize == 1:
            key, value = (each.to(torch.float8_e4m3fn).view(torch.uint8) for each in (key, value))
            keys, values = keys.view(torch.uint8), values.view(torch.uint8)
        keep(key, value, keys, values, *others, **more)

    def whole(*given: Any, **more: Any) -> None:
        for name in ("key_cache", "value_cache"):
            if name in more and more[name].dtype.itemsize == 1:
                more[name] = more[name].contiguous().view(torch.float8_e4m3fn).float()
        read(*given, **more)

    ops.cpu_attn_reshape_and_cache, ops.cpu_attention_with_kv_cache = kept, whole


def _name_drafts() -> None:
    """Let a module that drafts tokens have names of its own. What is published has the model within one that sees."""
    from vllm.models.minimax_m3.nvidia.mtp import MiniMaxM3MTP

    start = MiniMaxM3MTP.__init__

    def named(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        start(self, vllm_config=vllm_config, prefix=prefix or "mtp")

    MiniMaxM3MTP.__init__ = named


def define(kernel: Any) -> None:
    """Register the kernel, and put the functions in their places."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    from vllm.models.minimax_m3.common import indexer, sparse_attention
    from vllm.models.minimax_m3.nvidia import model

    kernel(
        "fused_minimax_m3_qknorm_rope_kv_insert(Tensor(a!) qkv, Tensor qw, Tensor kw, Tensor table, Tensor positions, "
        "int heads, int kv_heads, int dim, float eps, Tensor? iqw, Tensor? ikw, int index_heads, Tensor? slots, "
        "Tensor? index_slots, Tensor(b!)? cache, Tensor(c!)? index_cache, int page, Tensor(d!)? q_out, "
        "Tensor(e!)? index_q_out, str dtype, bool skip, Tensor(f!)? q8, float q8_scale, "
        "Tensor? k_scale=None, Tensor? v_scale=None) -> ()",  # vLLM 0.31 has no scales
        insert,
    )
    router: Any = CPURouter
    router._compute_routing = route(router._compute_routing)  # noqa: SLF001
    model.MiniMAXGemmaRMSNorm.forward = gemma
    indexer.select_indexer_impl_cls = lambda **given: indexer.MiniMaxM3IndexerTritonImpl  # also for FP8, as on a GPU
    indexer.minimax_m3_index_score, indexer.minimax_m3_index_topk = score, choose
    indexer.minimax_m3_index_decode = choose_one
    sparse_attention.minimax_m3_sparse_attn = attend
    sparse_attention.minimax_m3_sparse_attn_decode = attend_one
    experts: Any = CPUUnquantizedExperts
    known = experts._supports_activation  # noqa: SLF001
    experts._supports_activation = staticmethod(  # noqa: SLF001
        lambda name: name == MoEActivation.SWIGLUOAI_UNINTERLEAVE or known(name)
    )
    _allow_bytes()
    _name_drafts()
