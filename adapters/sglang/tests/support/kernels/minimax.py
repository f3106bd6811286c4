"""MiniMax-M3: its indexer chooses blocks of keys, and attention is over those.

The formulas are those of SGLang's Triton kernels in ``kernels/ops/attention/minimax_sparse``. Where MiniMax-M3 is among
transformers' models, its tokens say that they are right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .attention import attend

__all__ = ["after_imports"]

FIRST, LOCAL = 1e30, 1e29
"""Scores of blocks that are always chosen: the first ones, and those next to the query."""


def after_imports() -> None:
    """Put the kernels where SGLang looks for them."""
    import sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse as sparse
    import sglang.srt.layers.moe.fused_moe_native as experts
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    anything: Any = sparse
    anything.flash_prefill_with_topk_index = choose_in_prefill
    anything.flash_decode_with_topk_idx = choose_in_decode
    anything.flash_prefill_with_gqa_share_sparse = attend_in_prefill
    anything.flash_decode_with_gqa_share_sparse = attend_in_decode
    native: Any = experts
    alternating, original = native.swiglu_gpt_oss_sigmoid_alpha, native.moe_forward_native

    def forward(layer: Any, x: Any, topk_output: Any, config: Any) -> Any:
        """SGLang's plain code takes it that gates and values alternate. Its kernel asks the configuration."""
        native.swiglu_gpt_oss_sigmoid_alpha = (
            alternating if config.gate_up_interleaved else fused_moe.swiglu_no_interleaved_with_alpha_and_limit
        )
        return original(layer, x, topk_output, config)

    native.moe_forward_native = forward


def _queries(slot_ids: Any, seq_lens: Any, prefix_lens: Any) -> Iterator[tuple[int, int, int]]:
    """For each query, the one after the other: its number, its request's row, and how many tokens it sees."""
    at = 0
    for row, before, length in zip(slot_ids.tolist(), prefix_lens.tolist(), seq_lens.tolist(), strict=True):
        for seen in range(before + 1, length + 1):
            yield at, row, seen
            at += 1


def choose_in_prefill(
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    slot_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    block_size_k: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    score_type: str,
    disable_index_value: bool,
    **more: Any,
) -> tuple[None, torch.Tensor]:
    """The best blocks for each query, ``(heads, queries, topk)``, in order, with -1 behind the last.

    q is (queries, index heads, D), and k_cache is (slots, 1, D).
    """
    assert disable_index_value, "SGLang moves no index with values"
    assert score_type == "max", "no model of the tests scores blocks otherwise"
    out = torch.full((q.shape[1], len(q), topk), -1, dtype=torch.int32)
    for at, row, seen in _queries(slot_ids, seq_lens, prefix_lens):
        keys = k_cache[req_to_token[row, :seen].long(), 0].float()
        scores = q[at].float() @ keys.T
        blocks = -(-seen // block_size_k)
        padded = torch.nn.functional.pad(scores, (0, blocks * block_size_k - seen), value=float("-inf"))
        best = padded.view(-1, blocks, block_size_k).amax(-1)
        best[:, :init_blocks] = FIRST
        best[:, max(0, blocks - local_blocks) :] = LOCAL
        count = min(topk, blocks)
        out[:, at, :count] = best.topk(count).indices.sort().values.to(torch.int32)
    return None, out


def choose_in_decode(*, seq_lens: torch.Tensor, block_size: int, **more: Any) -> tuple[None, torch.Tensor, None]:
    """The same for one query of each request."""
    assert not more["use_dense_main_attn"], "these kernels are of a card"
    return *choose_in_prefill(seq_lens=seq_lens, prefix_lens=seq_lens - 1, block_size_k=block_size, **more), None


def attend_in_prefill(
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    sink: Any,
    req_to_token: torch.Tensor,
    slot_ids: torch.Tensor,
    topk_idx: torch.Tensor,
    block_size_k: int,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    sm_scale: float | None,
    **more: Any,
) -> torch.Tensor:
    """q is (queries, heads, D), caches are (slots, KV heads, D), and topk_idx is (KV heads, queries, topk)."""
    assert sink is None, "no model of the tests has these"
    kv_heads = k_cache.shape[1]
    out = torch.empty(*q.shape[:2], v_cache.shape[2], dtype=q.dtype)
    for at, row, seen in _queries(slot_ids, seq_lens, prefix_lens):
        for head in range(kv_heads):
            places = _tokens(topk_idx[head, at].tolist(), block_size_k, seen)
            slots = req_to_token[row, places].long()
            group = slice(head * q.shape[1] // kv_heads, (head + 1) * q.shape[1] // kv_heads)
            keys, values = k_cache[slots, head, None], v_cache[slots, head, None]
            mask = torch.ones(1, len(slots), dtype=torch.bool)
            scale = q.shape[2] ** -0.5 if sm_scale is None else sm_scale
            out[at, group] = attend(q[at, None, group], keys, values, mask, scale, 0.0)[0].to(out.dtype)
    return out


def attend_in_decode(*, seq_lens: torch.Tensor, block_size: int, **more: Any) -> torch.Tensor:
    """The same for one query of each request."""
    assert more["hisparse_slots"] is None
    return attend_in_prefill(seq_lens=seq_lens, prefix_lens=seq_lens - 1, block_size_k=block_size, **more)


def _tokens(blocks: Sequence[int], block: int, seen: int) -> torch.Tensor:
    """Positions of the chosen blocks, as far as the query sees them."""
    chosen = [torch.arange(each * block, min(seen, (each + 1) * block)) for each in blocks if each >= 0]
    return torch.cat(chosen)
