"""Mixtures of experts: each token through the experts that its router chose."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

__all__ = ["define"]


def activate(name: str, x: Any) -> Any:
    """The gate and the value of an expert's first layer, put together."""
    if name.startswith("swigluoai"):  # of gpt-oss, whose gates and values take turns, and of MiniMax-M3
        gate, value = (x[..., ::2], x[..., 1::2]) if name == "swigluoai" else x.chunk(2, dim=-1)
        gate, value = gate.clamp(max=7.0), value.clamp(-7.0, 7.0)
        return (value + 1) * gate * torch.sigmoid(1.702 * gate)
    gate, value = x.chunk(2, dim=-1)
    return (functional.silu(gate) if name == "silu" else functional.gelu(gate)) * value


def mix(
    out: Any,
    x: Any,
    first: Any,
    second: Any,
    first_bias: Any,
    second_bias: Any,
    weights: Any,
    chosen: Any,
    unweighted: bool,
    activation: str,
    isa: str,
) -> None:
    """Input ``[tokens, hidden]``; ``weights`` and ``chosen`` are ``[tokens, experts of a token]``."""
    made = torch.zeros(out.shape, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        if expert < 0:
            continue
        token, place = (chosen == expert).nonzero(as_tuple=True)
        hidden = x[token].float() @ first[expert].float().T
        if first_bias is not None:
            hidden = hidden + first_bias[expert].float()
        hidden = activate(activation, hidden) @ second[expert].float().T
        if second_bias is not None:
            hidden = hidden + second_bias[expert].float()
        if not unweighted:
            hidden = hidden * weights[token, place].float()[:, None]
        made.index_add_(0, token, hidden)
    out.copy_(made)


def pack(weight: Any, out: Any, isa: str) -> None:
    out.copy_(weight)


def define(kernel: Any) -> None:
    """Register them."""
    kernel("prepack_moe_weight(Tensor weight, Tensor(a!) out, str isa) -> ()", pack)
    kernel(
        "cpu_fused_moe(Tensor(a!) out, Tensor x, Tensor first, Tensor second, Tensor? first_bias, Tensor? second_bias, "
        "Tensor weights, Tensor chosen, bool unweighted, str activation, str isa) -> ()",
        mix,
    )
