"""Latent attention (MLA): a step of decoding. Prefill is torch's own attention in vLLM, too."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["define"]


def decode(out: Any, query: Any, cache: Any, scale: float, tables: Any, lengths: Any) -> None:
    """Query ``[requests, heads, 576]``, cache ``[blocks, page, 576]``, result ``[requests, heads, 512]``."""
    page, latent = cache.shape[-2], out.shape[-1]
    for row, length in enumerate(lengths.tolist()):
        if length > 0:
            pages = cache[tables[row, : -(-length // page)].long()]
            held = pages.reshape(-1, cache.shape[-1])[:length].float()
            weights = torch.softmax(query[row].float() @ held.T * scale, dim=-1)
            out[row] = (weights @ held[:, :latent]).to(out.dtype)


def define(kernel: Any) -> None:
    """Register it."""
    kernel(
        "mla_decode_kvcache(Tensor(a!) out, Tensor query, Tensor cache, float scale, Tensor tables, Tensor lengths)"
        " -> ()",
        decode,
    )
