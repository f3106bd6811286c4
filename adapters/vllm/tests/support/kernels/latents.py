"""Latent attention (MLA): a step of decoding. Prefill is torch's own attention in vLLM, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["allow", "define"]


def decode(out: Any, query: Any, cache: Any, scale: float, tables: Any, lengths: Any) -> None:
    """Query ``[requests, heads, 576]``, cache ``[blocks, page, 576]``, result ``[requests, heads, 512]``."""
    page, latent = cache.shape[-2], out.shape[-1]
    for row, length in enumerate(lengths.tolist()):
        if length > 0:
            pages = cache[tables[row, : -(-length // page)].long()]
            held = pages.reshape(-1, cache.shape[-1])[:length].float()
            weights = torch.softmax(query[row].float() @ held.T * scale, dim=-1)
            out[row] = (weights @ held[:, :latent]).to(out.dtype)


def allow(wanted: Callable[[Any], bool], *, chunks: bool) -> None:
    """Let models with latents have a prefix cache, and blocks of any size, which vLLM takes from them on a CPU.

    Args:
        wanted: Which models, by their configuration.
        chunks: Whether they have chunked prefill, too.
    """
    from vllm.platforms.cpu import CpuPlatform

    platform: Any = CpuPlatform
    settle = platform.check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        scheduler, cache = config.scheduler_config, config.cache_config
        was = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        cached, block = cache.enable_prefix_caching, cache.block_size
        settle(cls, config)
        if config.model_config is not None and wanted(config.model_config.hf_text_config):
            cache.enable_prefix_caching, cache.block_size = cached, block
            if chunks:
                scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = was

    platform.check_and_update_config = classmethod(check)


def define(kernel: Any) -> None:
    """Register it."""
    kernel(
        "mla_decode_kvcache(Tensor(a!) out, Tensor query, Tensor cache, float scale, Tensor tables, Tensor lengths)"
        " -> ()",
        decode,
    )
