"""Kimi-Linear and Kimi-K3: states of which each channel of the key decays at a pace of its own (KDA).

``S = exp(g) S``, then ``S = S + k (beta (v - S k))`` and ``o = S q``, as in the gated delta nets beside this, where a
head has one pace. The formulas are those of ``vllm/models/kimi_k3/nvidia/ops/third_party/kda.py`` in Triton. vLLM's
classes are those for AMD's GPUs.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn import functional

from .delta import normal
from .latents import allow

__all__ = ["define"]


def initial(state: Any, indices: Any, has: Any) -> Any:
    """The states that requests go on from, ``[requests, heads, key, value]``: zero where one begins."""
    return torch.where(has[:, None, None, None], state[indices.long()].float(), 0.0)


def convolve(
    x: Any,
    weight: Any,
    bias: Any,
    activation: str,
    conv_states: Any,
    has_initial_state: Any,
    cache_indices: Any,
    query_start_loc: Any,
    **others: Any,
) -> Any:
    """x is ``[channels, tokens]``; a state has the inputs before."""
    out, width = torch.empty_like(x), weight.shape[1]
    for row, (first, last) in enumerate(itertools.pairwise(query_start_loc.tolist())):
        if first == last:
            continue
        at = int(cache_indices[row])
        before = conv_states[at].float() if bool(has_initial_state[row]) else torch.zeros(len(x), width - 1)
        inputs = torch.cat((before[:, -(width - 1) :], x[:, first:last].float()), dim=-1)
        made = functional.conv1d(inputs[None], weight.float()[:, None], groups=len(x))[0]
        out[:, first:last] = functional.silu(made).to(out.dtype)
        conv_states[at] = inputs[:, -(width - 1) :].to(conv_states.dtype)
    return out


def convolve_one(
    x: Any, states: Any, weight: Any, bias: Any, activation: str, conv_state_indices: Any, out: Any, **others: Any
) -> Any:
    """One token of each request, ``[requests, channels]``."""
    for row in range(len(x)):
        at = int(conv_state_indices[row])
        inputs = torch.cat((states[at].float(), x[row].float()[:, None]), dim=-1)
        out[row] = functional.silu((inputs * weight.float()).sum(-1)).to(out.dtype)
        states[at] = inputs[:, 1:].to(states.dtype)
    return out


def gates(raw_g: Any, raw_beta: Any, decay: Any, bias: Any, bound: Any) -> tuple[Any, Any]:
    """The paces, as logarithms, and how much of a value is written."""
    g, decay = raw_g.float() + bias.view(raw_g.shape[-2:]), decay.float().flatten().exp()[:, None]
    pace = -decay * functional.softplus(g) if bound is None else bound * torch.sigmoid(decay * g)
    return pace, torch.sigmoid(raw_beta.float())


def step(state: Any, q: Any, k: Any, v: Any, pace: Any, beta: Any) -> tuple[Any, Any]:
    """One token: state ``[heads, key, value]``, q, k and pace ``[heads, key]``, v ``[heads, value]``."""
    q, k = normal(q.float()) * q.shape[-1] ** -0.5, normal(k.float())
    state = state * pace.exp()[:, :, None]
    written = (v.float() - torch.einsum("hk,hkv->hv", k, state)) * beta[:, None]
    state = state + k[:, :, None] * written[:, None]
    return state, torch.einsum("hk,hkv->hv", q, state)


def chunk(
    q: Any,
    k: Any,
    v: Any,
    raw_g: Any,
    raw_beta: Any,
    A_log: Any,
    g_bias: Any,
    lower_bound: Any,
    initial_state: Any,
    cu_seqlens: Any,
    **others: Any,
) -> tuple[Any, Any]:
    """Several tokens of each request, one behind the other; also the states behind them."""
    pace, beta = (each[0] for each in gates(raw_g, raw_beta, A_log, g_bias, lower_bound))
    q, k, v = q[0], k[0], v[0]
    out, ends = torch.empty_like(v), initial_state.clone()
    for row, (first, last) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        state = ends[row].float()
        for t in range(first, last):
            state, made = step(state, q[t], k[t], v[t], pace[t], beta[t])
            out[t] = made.to(out.dtype)
        ends[row] = state
    return out[None], ends


def one(
    mixed_qkv: Any,
    raw_g: Any,
    raw_beta: Any,
    A_log: Any,
    dt_bias: Any,
    lower_bound: Any,
    initial_state: Any,
    state_indices: Any,
    **others: Any,
) -> tuple[Any, Any]:
    """One token of each request; the states are read and written in the pool."""
    pace, beta = (each[0] for each in gates(raw_g, raw_beta, A_log, dt_bias, lower_bound))
    q, k, v = mixed_qkv.unflatten(-1, (3, *raw_g.shape[-2:])).unbind(1)
    out = torch.empty_like(v)
    for row in range(len(v)):
        at = int(state_indices[row])
        state, made = step(initial_state[at].float(), q[row], k[row], v[row], pace[row], beta[row])
        initial_state[at], out[row] = state.to(initial_state.dtype), made.to(out.dtype)
    return out[None], initial_state


def define(kernel: Any) -> None:
    """Put them in their places."""
    import vllm.models.kimi_k3 as family

    try:
        import vllm.models.kimi_k3.nvidia.ops.third_party.kda as kda
    except ValueError:  # vLLM 0.31 has a kernel that the Triton of the newest release does not take
        return
    from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn as layer
    from vllm.models.kimi_k3.amd import linear
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    # vLLM's own kernel is compiled for blocks of 16, and the stand-in takes any; the pages of states need larger ones.
    backend: Any = CPUMLABackend
    backend.get_supported_kernel_block_sizes = staticmethod(lambda kv_cache_spec=None: [MultipleOf(16)])
    backend.supports_block_size = classmethod(lambda cls, size: True)
    family.KimiLinearForCausalLM = linear.KimiLinearForCausalLM
    layer.gather_initial_states, layer.causal_conv1d_fn, layer.causal_conv1d_update = initial, convolve, convolve_one
    kda.chunk_kda_with_fused_gate, kda.fused_recurrent_kda_packed_decode = chunk, one
    allow(lambda config: config.model_type == "kimi_linear", chunks=False)
