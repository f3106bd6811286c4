"""Gated delta nets (Qwen3-Next): ``S = exp(g) S``, then ``S = S + k (beta (v - S k))`` and ``o = S q``, token by token.

A state is ``[head, key, value]``. Keys and queries are normalised; several value heads may share one key head.
"""

from __future__ import annotations

import inspect
import itertools
import re
from typing import Any

import torch
from torch.nn import functional

__all__ = ["define"]


def gates(decay: Any, a: Any, b: Any, bias: Any) -> tuple[Any, Any]:
    """The decay of the state, as a logarithm, and how much of a value is written."""
    pace = -decay.float().exp() * functional.softplus(a.float() + bias.float())
    return pace.unsqueeze(0), torch.sigmoid(b.float()).unsqueeze(0)


def normal(x: Any) -> Any:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def step(state: Any, q: Any, k: Any, v: Any, pace: Any, beta: Any) -> tuple[Any, Any]:
    """One token: q and k ``[key heads, key]``, v ``[heads, value]``, pace and beta ``[heads]``."""
    share = v.shape[0] // q.shape[0]
    q = normal(q.float()).repeat_interleave(share, 0) * q.shape[-1] ** -0.5
    k = normal(k.float()).repeat_interleave(share, 0)
    state = state * pace.exp()[:, None, None]
    written = (v.float() - torch.einsum("hk,hkv->hv", k, state)) * beta[:, None]
    state = state + k[:, :, None] * written[:, None, :]
    return state, torch.einsum("hk,hkv->hv", q, state)


def chunk(
    q: Any, k: Any, v: Any, pace: Any, beta: Any, pool: Any, final: bool, starts: Any, *others: Any
) -> tuple[Any, Any]:
    """Several tokens of each request, one behind the other; the states are read and written in the pool."""
    *_, slots, _ = others
    q, k, v, pace, beta = (each[0] for each in (q, k, v, pace, beta))
    out = torch.empty_like(v)
    for row, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
        at = int(slots[row])
        state = pool[at].float()
        for t in range(first, last):
            state, out[t] = step(state, q[t], k[t], v[t], pace[t], beta[t])
        pool[at] = state
    return out.unsqueeze(0), pool.new_zeros(1)


def update(decay: Any, bias: Any, q: Any, k: Any, v: Any, a: Any, b: Any, pool: Any, slots: Any, *others: Any) -> Any:
    """One token of each request."""
    q, k, v = (each[0] if each.dim() == 4 else each for each in (q, k, v))
    pace, beta = (each[0] for each in gates(decay, a, b, bias))
    out = torch.empty_like(v)
    for row in range(v.shape[0]):
        at = int(slots[row])
        if at >= 0:
            pool[at], out[row] = step(pool[at].float(), q[row], k[row], v[row], pace[row], beta[row])
    return out.unsqueeze(1)


def _allow_float32() -> None:
    """vLLM's own kernels take bf16 alone. These compute in float32, and only so are tokens of two TP widths equal."""
    import vllm.model_executor.layers.mamba.ops.cpu.gdn_attention as module

    source = inspect.getsource(module.cpu_gdn_attention_core)
    # Some releases say why on the same line, and others on lines of their own.
    check = r"    assert mixed_qkv\.dtype == torch\.bfloat16, (\(\n.*?\n    \)|\".*?\")\n"
    changed, count = re.subn(check, "", source, flags=re.DOTALL)
    assert count == 1
    exec(changed, module.__dict__)


def define(kernel: Any) -> None:
    """Register them."""
    _allow_float32()
    kernel("fused_gdn_gating_cpu(Tensor decay, Tensor a, Tensor b, Tensor bias) -> (Tensor, Tensor)", gates)
    kernel(
        "chunk_gated_delta_rule_cpu(Tensor q, Tensor k, Tensor v, Tensor pace, Tensor beta, Tensor(a!) pool, "
        "bool final, Tensor starts, bool head_first, bool normal, Tensor slots, float eps) -> (Tensor, Tensor)",
        chunk,
    )
    kernel(
        "fused_sigmoid_gating_delta_rule_update_cpu(Tensor decay, Tensor bias, Tensor q, Tensor k, Tensor v, Tensor a, "
        "Tensor b, Tensor(a!) pool, Tensor slots, Tensor starts, bool normal, float beta, float threshold) -> Tensor",
        update,
    )
