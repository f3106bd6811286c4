"""Causal convolutions of gated delta nets: each channel over its last inputs, of which a request's state has some."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn import functional

__all__ = ["define"]


def forward(
    x: Any, weight: Any, bias: Any, pool: Any, starts: Any, slots: Any, begun: Any, silu: bool, *others: Any
) -> Any:
    """Several tokens of each request, ``[channels, tokens]``; ``begun`` says whether its state has inputs already."""
    weight = weight.reshape(len(weight), -1).float()
    out, back = torch.empty_like(x), weight.shape[-1] - 1
    for row, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
        at = int(slots[row])
        before = pool[at, :, :back].float() if bool(begun[row]) else torch.zeros(x.shape[0], back)
        inputs = torch.cat((before, x[:, first:last].float()), dim=-1)
        made = functional.conv1d(
            inputs[None], weight[:, None], None if bias is None else bias.float(), groups=x.shape[0]
        )[0]
        out[:, first:last] = functional.silu(made) if silu else made
        pool[at, :, :back] = inputs[:, -back:]
    return out


def update(x: Any, pool: Any, weight: Any, bias: Any, silu: bool, accepted: Any, slots: Any, *others: Any) -> Any:
    """One token of each request, ``[requests, channels]``."""
    weight = weight.reshape(len(weight), -1).float()
    out, back = torch.empty_like(x), weight.shape[-1] - 1
    for row in range(x.shape[0]):
        at = int(slots[row])
        if at < 0:
            continue
        inputs = torch.cat((pool[at, :, :back].float(), x[row].float()[:, None]), dim=-1)
        made = (inputs * weight).sum(-1) + (0 if bias is None else bias.float())
        out[row] = functional.silu(made) if silu else made
        pool[at, :, :back] = inputs[:, 1:]
    return out


def drafted(
    x: Any, pool: Any, weight: Any, bias: Any, activation: Any, *, slots: Any, accepted: Any, starts: Any
) -> Any:
    """The next tokens of each request, ``[tokens, channels]``. The pool keeps all, also those that may not be taken."""
    out, back = torch.empty_like(x), weight.shape[1] - 1
    for request, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
        at, taken = int(slots[request].flatten()[0]), int(accepted[request]) - 1
        inputs = torch.cat((pool[at, :, taken : taken + back].float(), x[first:last].float().T), dim=-1)
        made = functional.conv1d(inputs[None], weight[:, None].float(), bias, groups=len(weight))[0].T
        out[first:last] = functional.silu(made) if activation == "silu" else made
        pool[at, :, : inputs.shape[1] - 1] = inputs[:, 1:]
    return out


def _draft() -> None:
    """vLLM's step of Mamba2 for a CPU knows no drafts. The formula is that of its kernel in Triton."""
    import vllm.model_executor.layers.mamba.mamba_mixer2 as mixer

    module: Any = mixer
    plain = module.causal_conv1d_update

    def update(
        *given: Any,
        conv_state_indices: Any = None,
        num_accepted_tokens: Any = None,
        query_start_loc: Any = None,
        **more: Any,
    ) -> Any:
        if num_accepted_tokens is None:
            return plain(*given, conv_state_indices=conv_state_indices, query_start_loc=query_start_loc, **more)
        return drafted(*given, slots=conv_state_indices, accepted=num_accepted_tokens, starts=query_start_loc)

    module.causal_conv1d_update = update


def define(kernel: Any) -> None:
    """Register them."""
    _draft()
    # 0.31 packs the weights of every convolution, also for layers that go on to read them as [channels, 1, width].
    kernel("causal_conv1d_weight_pack(Tensor weight) -> Tensor", lambda weight: weight[:, None].clone())
    kernel(
        "causal_conv1d_fwd_cpu(Tensor x, Tensor weight, Tensor? bias, Tensor(a!)? pool, Tensor? starts, Tensor? slots, "
        "Tensor? begun, bool silu, int null, bool packed) -> Tensor",
        forward,
    )
    kernel(
        "causal_conv1d_update_cpu(Tensor x, Tensor(a!) pool, Tensor weight, Tensor? bias, bool silu, Tensor? accepted, "
        "Tensor? slots, int null, bool packed) -> Tensor",
        update,
    )
