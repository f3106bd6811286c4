"""Kernels that fuse a norm, a gate or a product into one step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["after_imports", "before_imports"]


def before_imports() -> None:
    """SGLang's branch for CPUs calls these by name. Its models that need them are not registered otherwise."""
    operators: Any = torch.ops.sgl_kernel
    operators.fused_sigmoid_mul_cpu = _multiply_by_gate
    operators.fused_qkvzba_split_reshape_cat_contiguous_cpu = _split_projections


def after_imports() -> None:
    """SGLang has these in Triton only."""
    import sglang.kernels.ops.attention.fla.fused_norm_gate as norms
    import sglang.kernels.ops.elementwise.elementwise as elementwise
    import sglang.srt.layers.rotary_embedding.base as rotary
    import sglang.srt.models.qwen2_moe as qwen

    anything: Any = norms
    anything.layer_norm_gated_fwd = layer_norm_gated_fwd
    for module in (elementwise, qwen):
        some: Any = module
        if hasattr(some, "fused_gate_sigmoid_mul_add"):
            some.fused_gate_sigmoid_mul_add = add_gated
    original = rotary.RotaryEmbedding.forward_native

    def forward_native(self: Any, positions: Any, query: Any, key: Any, *more: Any, **named: Any) -> Any:
        """A DP rank without requests has no tokens to rotate. The kernels take that, and the plain code does not."""
        return (query, key) if not query.numel() else original(self, positions, query, key, *more, **named)

    rotary.RotaryEmbedding.forward_native = forward_native


def _multiply_by_gate(x: torch.Tensor, gate: torch.Tensor) -> None:
    x.mul_(gate.reshape(x.shape).sigmoid())


def _split_projections(qkvz: torch.Tensor, ba: torch.Tensor, hk: int, hv: int, dk: int, dv: int) -> tuple[Any, ...]:
    """What a gated delta net projects at once: q, k, v together, then z, b and a."""
    q, k, v, z = torch.split(qkvz, [hk * dk, hk * dk, hv * dv, hv * dv], -1)
    b, a = ba.chunk(2, -1)
    return torch.cat([q, k, v], -1), z.reshape(-1, hv, dv), b.contiguous(), a.contiguous()


def layer_norm_gated_fwd(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    residual: Any = None,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    is_rms_norm: bool = False,
    **more: Any,
) -> tuple[torch.Tensor, None, None, torch.Tensor]:
    """A norm over the last dimension, times a gate."""
    assert residual is None, "no model of the tests has a residual here"
    found = x.float()
    if is_rms_norm:
        found = found * torch.rsqrt(found.pow(2).mean(-1, keepdim=True) + eps)
    else:
        found = F.layer_norm(found, found.shape[-1:], eps=eps)
    found = found if weight is None else found * weight.float()
    found = found if bias is None else found + bias.float()
    gate = g.reshape(-1, x.shape[-1]).float()
    found = found * (F.silu(gate) if activation in ("swish", "silu") else gate.sigmoid())
    return found.to(out_dtype or x.dtype), None, None, x


def add_gated(hidden: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor, final: torch.Tensor) -> None:
    """Add the shared expert's output to the experts', times a gate of one number for each token."""
    final.add_((hidden.float() @ weight.float()[:, None]).sigmoid().to(shared.dtype) * shared)
