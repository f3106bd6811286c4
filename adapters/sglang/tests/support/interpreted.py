"""Compares stand-ins for kernels with SGLang's own Triton kernels, which Triton's interpreter runs on the CPU.

Run as ``python -m support.interpreted``, with ``TRITON_INTERPRET=1`` from the start: Triton asks when it is imported.
Prints the largest difference in each comparison, as JSON. The interpreter cannot run the other kernels that have
stand-ins: they use block pointers or masks that it does not know, or ask for the device.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import torch

from .kernels.recurrent import fused_gdn_gating, fused_sigmoid_gating_delta_rule_update

HEADS, VALUE_HEADS, WIDTH, SLOTS = 2, 4, 16, 3


def _largest(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.reshape(-1).float() - theirs.reshape(-1).float()).abs().max())


def _gates() -> dict[str, float]:
    from sglang.kernels.ops.attention.linear.fused_gdn_gating import fused_gdn_gating as theirs

    given = torch.rand(VALUE_HEADS), torch.randn(6, VALUE_HEADS), torch.randn(6, VALUE_HEADS), torch.randn(VALUE_HEADS)
    gate, beta = fused_gdn_gating(*given)
    their_gate, their_beta = theirs(*given)
    return {"gate": _largest(gate, their_gate), "beta": _largest(beta, their_beta)}


def _step(kda: bool) -> dict[str, float]:
    """The next token of two sequences, whose states are in two of three slots."""
    from sglang.kernels.ops.attention.linear import fused_sigmoid_gating_recurrent as module

    heads = VALUE_HEADS if kda else HEADS
    gates = VALUE_HEADS * (WIDTH if kda else 1)
    given: dict[str, Any] = {
        **{"A_log": torch.rand(VALUE_HEADS), "dt_bias": torch.randn(gates), "a": torch.randn(2, gates)},
        **{"q": torch.randn(1, 2, heads, WIDTH), "k": torch.randn(1, 2, heads, WIDTH)},
        **{"v": torch.randn(1, 2, VALUE_HEADS, WIDTH), "b": torch.randn(2, VALUE_HEADS)},
        "initial_state_indices": torch.tensor([2, 0], dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 1, 2], dtype=torch.int32),
        **{"use_qk_l2norm_in_kernel": True, "softplus_beta": 1.0, "softplus_threshold": 20.0, "is_kda": kda},
    }
    state = torch.randn(SLOTS, VALUE_HEADS, WIDTH, WIDTH)
    their_state = state.transpose(-1, -2).contiguous()  # on a card, a slot is (heads, V, K)
    out = fused_sigmoid_gating_delta_rule_update(initial_state_source=state, **given)
    their_out = module.fused_sigmoid_gating_delta_rule_update(initial_state_source=their_state, **given)
    return {"out": _largest(out, their_out), "state": _largest(state, their_state.transpose(-1, -2))}


def main() -> None:
    torch.manual_seed(0)
    cpu: Any = torch.cpu
    cpu.device = lambda *given: contextlib.nullcontext()  # SGLang chooses the tensor's card before it starts a kernel
    found = {"gates": _gates(), "delta net": _step(kda=False), "Kimi's delta attention": _step(kda=True)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
