"""Mamba1 (Jamba): ``S = exp(dt A) S + dt x B`` and ``y = S C + D x`` for each channel."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn import functional

__all__ = ["define"]


def forward(
    x: Any,
    delta: Any,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    z: Any,
    bias: Any,
    softplus: bool,
    starts: Any,
    slots: Any,
    begun: Any,
    pool: Any,
    null: int,
    *others: Any,
) -> None:
    """Several tokens of each request, ``[channels, tokens]``. The result takes the place of ``z``, or of ``delta``."""
    pace = delta.float() + (0 if bias is None else bias.float()[:, None])
    if softplus:
        pace = functional.softplus(pace)
    b, c, y = b[0].float(), c[0].float(), torch.empty_like(pace)
    for row, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
        at = row if slots is None else int(slots[row].flatten()[0])
        if at == null:
            continue
        state = pool[at].float() if bool(begun[row]) else torch.zeros(pool.shape[1:])
        for t in range(first, last):
            state = torch.exp(pace[:, t, None] * a.float()) * state
            state = state + (pace[:, t] * x[:, t].float())[:, None] * b[:, t]
            y[:, t] = (state * c[:, t]).sum(-1) + (0 if d is None else d.float() * x[:, t].float())
        pool[at] = state
    if z is None:
        delta.copy_(y)
    else:
        z.copy_(y * functional.silu(z.float()))


def step(
    other: Any,
    pool: Any,
    x: Any,
    delta: Any,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    z: Any,
    bias: Any,
    softplus: bool,
    read: Any,
    write: Any,
    null: int,
    out: Any,
    *speculation: Any,
) -> None:
    """One token of each request, ``[requests, channels]``; ``other`` does the same for Mamba2, with heads."""
    if x.dim() != 2:
        other(pool, x, delta, a, b, c, d, z, bias, softplus, read, write, null, out, *speculation)
        return
    for row in range(len(x)):
        at = row if read is None else int(read.flatten()[row])
        if at == null:
            continue
        to = at if write is None else int(write.flatten()[row])
        pace = delta[row].float() + (0 if bias is None else bias.float())
        pace = functional.softplus(pace) if softplus else pace
        state = torch.exp(pace[:, None] * a.float()) * pool[at].float()
        state = state + (pace * x[row].float())[:, None] * b[row].float().flatten()
        pool[to] = state
        y = (state * c[row].float().flatten()).sum(-1) + (0 if d is None else d.float() * x[row].float())
        out[row] = y if z is None else y * functional.silu(z[row].float())


def define(kernel: Any) -> None:
    """Register it, and let the step that vLLM has for Mamba2 do Mamba1, too."""
    import vllm._custom_ops as operations

    kernel(
        "selective_scan_fwd(Tensor x, Tensor(a!) delta, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor(b!)? z, "
        "Tensor? bias, bool softplus, Tensor? starts, Tensor? slots, Tensor? begun, Tensor(c!) pool, int null, "
        "int block, Tensor? o, Tensor? p, Tensor? q, Tensor? r, Tensor? s) -> ()",
        forward,
    )
    other: Any = operations.selective_state_update_cpu
    operations.selective_state_update_cpu = lambda *given: step(other, *given)
