"""Kernels of recurrent layers: short convolutions, gated delta nets, Kimi's delta attention, and Mamba 2.

Tokens of all sequences of a batch stand one after the other. ``cu_seqlens`` and ``query_start_loc`` say where each one
begins; ``slots`` say in which slot of the pool its state is, and a negative slot is padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

__all__ = [
    "after_imports",
    "before_imports",
    "fused_gdn_gating",
    "fused_sigmoid_gating_delta_rule_update",
]

CHUNK = 64
"""Tokens between two states that the chunked kernels also return."""


def before_imports() -> None:
    """SGLang's branch for CPUs calls these by name, from a package that has no build for every CPU."""
    import importlib

    mamba: Any = importlib.import_module("sgl_kernel.mamba")
    mamba.causal_conv1d_fn_cpu = causal_conv1d_fn
    mamba.causal_conv1d_update_cpu = causal_conv1d_update
    mamba.chunk_gated_delta_rule_cpu = chunk_gated_delta_rule
    operators: Any = torch.ops.sgl_kernel
    operators.fused_gdn_gating_cpu = fused_gdn_gating
    operators.fused_sigmoid_gating_delta_rule_update_cpu = fused_sigmoid_gating_delta_rule_update


def after_imports() -> None:
    """SGLang has these in Triton only, and so it keeps no snapshots of states on a CPU, as it does on a card."""
    import sglang.kernels.ops.mamba.mamba_state_scatter_triton as scatter
    import sglang.srt.arg_groups.mamba_hook as arguments
    import sglang.srt.layers.attention.hybrid_linear_attn_backend as hybrid
    import sglang.srt.layers.attention.linear.kda_backend as kda
    import sglang.srt.layers.attention.linear.kernels.kda_triton as kda_kernels
    import sglang.srt.layers.attention.mamba.mamba as mixer

    platform: Any = arguments
    platform._platform_supports_mamba_cache_extra_buffer = lambda: True  # noqa: SLF001
    anything: Any = mixer
    anything.causal_conv1d_fn = anything.causal_conv1d_fn_triton = causal_conv1d_fn
    anything.causal_conv1d_update = anything.causal_conv1d_update_triton = causal_conv1d_update
    anything.mamba_chunk_scan_combined = mamba_chunk_scan_combined
    anything.selective_state_update = selective_state_update
    kernels: Any = kda_kernels
    kernels.chunk_kda = chunk_kda
    kernels.fused_sigmoid_gating_delta_rule_update = fused_sigmoid_gating_delta_rule_update
    backend: Any = kda
    backend.causal_conv1d_fn = causal_conv1d_fn
    for module in (scatter, hybrid):
        some: Any = module
        if hasattr(some, "track_mamba_states_all_layers"):
            some.track_mamba_states_all_layers = track_states_of_all_layers
        if hasattr(some, "track_mamba_states_if_needed"):
            some.track_mamba_states_if_needed = track_states


# Short convolutions.


def _convolve(
    before: torch.Tensor, new: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A depthwise, causal convolution over ``new`` (channels, tokens), after ``before`` (channels, width - 1).

    Returns:
        The outputs, and all inputs, with those before.
    """
    inputs = torch.cat([before.to(new.dtype), new], 1)
    biased = None if bias is None else bias.to(new.dtype)
    outputs = F.conv1d(inputs[None], weight[:, None].to(new.dtype), biased, groups=new.shape[0])[0]
    return (F.silu(outputs) if silu else outputs), inputs


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    query_start_loc: Any = None,
    cache_indices: Any = None,
    has_initial_state: Any = None,
    conv_states: Any = None,
    activation: str | None = "silu",
    pad_slot_id: int = -1,
    **more: Any,
) -> torch.Tensor:
    """Convolve whole chunks: ``x`` is (channels, tokens), and a slot of ``conv_states`` keeps the last inputs."""
    kept = weight.shape[1] - 1
    out = torch.zeros_like(x)
    for number, begin, end in _sequences(query_start_loc):
        slot = number if cache_indices is None else int(cache_indices[number])
        if slot == pad_slot_id or begin == end:
            continue
        before = x.new_zeros(x.shape[0], kept)
        if has_initial_state is not None and bool(has_initial_state[number]):
            before = conv_states[slot][:, -kept:]
        out[:, begin:end], inputs = _convolve(before, x[:, begin:end], weight, bias, activation in ("silu", "swish"))
        if conv_states is not None:
            conv_states[slot][:, -kept:] = inputs[:, -kept:].to(conv_states.dtype)
    return out


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Any = None,
    cache_seqlens: Any = None,
    conv_state_indices: Any = None,
    pad_slot_id: int = -1,
    intermediate_conv_window: Any = None,
    intermediate_state_indices: Any = None,
    **more: Any,
) -> torch.Tensor:
    """Convolve the next token, or tokens, of each sequence: ``x`` is (sequences, channels[, tokens]).

    For tokens that may be rejected, ``intermediate_conv_window`` gets the last inputs after each, and the state stays.
    """
    kept, one = weight.shape[1] - 1, x.dim() == 2
    tokens = x[:, :, None] if one else x
    out = torch.zeros_like(tokens)
    for number in range(len(tokens)):
        slot = number if conv_state_indices is None else int(conv_state_indices[number])
        if slot == pad_slot_id:
            continue
        silu = activation in (True, "silu", "swish")
        out[number], inputs = _convolve(conv_state[slot][:, -kept:], tokens[number], weight, bias, silu)
        if intermediate_conv_window is None:
            conv_state[slot][:, -kept:] = inputs[:, -kept:].to(conv_state.dtype)
            continue
        at = number if intermediate_state_indices is None else int(intermediate_state_indices[number])
        for token in range(tokens.shape[2]):
            window = inputs[:, token + 1 : token + 1 + kept]
            intermediate_conv_window[at, token] = window.to(intermediate_conv_window.dtype)
    return out[:, :, 0] if one else out


# Gated delta nets, and Kimi's delta attention, whose gates differ by channel.


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _for_each_value_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.repeat_interleave(heads // x.shape[-2], -2)


def _delta_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of the gated delta rule.

    Args:
        q: (heads, K), scaled.
        k: (heads, K).
        v: (heads, V).
        gate: The logarithm of the decay: (heads,), or (heads, K).
        beta: (heads,).
        state: (heads, K, V).
    """
    state = state * (gate.exp()[:, None, None] if gate.dim() == 1 else gate.exp()[:, :, None])
    change = (v - (state * k[:, :, None]).sum(1)) * beta[:, None]
    state = state + k[:, :, None] * change[:, None, :]
    return (state * q[:, :, None]).sum(1), state


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    use_qk_l2norm_in_kernel: bool = False,
    initial_state_indices: Any = None,
    scale: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None, torch.Tensor | None]:
    """Whole chunks. q and k are (1, tokens, heads, K), v is (1, tokens, value heads, V), a slot is (value heads, K, V).

    Returns:
        The outputs, nothing, and the state before every 64th token of each sequence.
    """
    q, k, v = q[0].float(), k[0].float(), v[0].float()
    heads = v.shape[1]
    gates = g.reshape(-1, heads, *g.shape[3:] if g.dim() == 4 else ()).float()
    betas = beta.reshape(-1, heads).float()
    if use_qk_l2norm_in_kernel:
        q, k = _unit(q), _unit(k)
    scaled = _for_each_value_head(q, heads) * (q.shape[-1] ** -0.5 if scale is None else scale)
    keys = _for_each_value_head(k, heads)
    out, between = torch.zeros_like(v), []
    for number, begin, end in _sequences(cu_seqlens):
        slot = number if initial_state_indices is None else int(initial_state_indices[number])
        if slot < 0 or begin == end:
            continue
        state = initial_state[slot].float()
        for at in range(begin, end):
            if (at - begin) % CHUNK == 0:
                between.append(state)
            out[at], state = _delta_step(scaled[at], keys[at], v[at], gates[at], betas[at], state)
        initial_state[slot] = state.to(initial_state.dtype)
    return out[None], None, torch.stack(between)[None] if between else None


def fused_gdn_gating(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithm of the decay, and beta, of a gated delta net: (1, tokens, heads) each."""
    gate = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float(), beta, threshold)
    return gate[None], b.float().sigmoid()[None].to(b.dtype)


def fused_sigmoid_gating_delta_rule_update(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    is_kda: bool = False,
    disable_state_update: bool = False,
    intermediate_states_buffer: Any = None,
    intermediate_state_indices: Any = None,
    **more: Any,
) -> torch.Tensor:
    """The next token, or tokens, of each sequence, with their gates. Shapes as for `chunk_gated_delta_rule`."""
    q, k, v = q[0].float(), k[0].float(), v[0].float()
    heads, width = v.shape[1], q.shape[-1]
    raw, offset, decay = a.float().reshape(-1, heads), dt_bias.float(), A_log.float().exp()
    if is_kda:
        raw, offset = a.float().reshape(-1, heads, width), dt_bias.float().reshape(heads, width)
        decay = decay.reshape(heads, 1)
    gates = -decay * F.softplus(raw + offset, softplus_beta, softplus_threshold)
    betas = b.float().reshape(-1, heads).sigmoid()
    if use_qk_l2norm_in_kernel:
        q, k = _unit(q), _unit(k)
    scaled, keys = _for_each_value_head(q, heads) * width**-0.5, _for_each_value_head(k, heads)
    out = torch.zeros_like(v)
    for number, begin, end in _sequences(cu_seqlens):
        slot = int(initial_state_indices[number])
        if slot < 0:
            continue
        state = initial_state_source[slot].float()
        for at in range(begin, end):
            out[at], state = _delta_step(scaled[at], keys[at], v[at], gates[at], betas[at], state)
            if intermediate_states_buffer is not None:
                row = number if intermediate_state_indices is None else int(intermediate_state_indices[number])
                intermediate_states_buffer[row, at - begin] = state.to(intermediate_states_buffer.dtype)
        if not disable_state_update:
            initial_state_source[slot] = state.to(initial_state_source.dtype)
    return out[None]


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: Any = None,
    initial_state_indices: Any = None,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Any = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    beta_is_raw: bool = False,
    output_intermediate_states: bool = False,
    **more: Any,
) -> Any:
    """Whole chunks of Kimi's delta attention. The gates are computed here if their parameters are given."""
    assert lower_bound is None, "no model of the tests bounds its gates"
    heads, width = v.shape[2], q.shape[-1]
    gates = g.float().reshape(1, -1, heads, width)
    if A_log is not None and dt_bias is not None:
        decay = A_log.float().exp().reshape(1, 1, heads, 1)
        gates = -decay * F.softplus(gates + dt_bias.float().reshape(1, 1, heads, width))
    betas = beta.float().reshape(1, -1, heads)
    out, _, between = chunk_gated_delta_rule(
        *(q, k, v, gates, betas.sigmoid() if beta_is_raw else betas),
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        initial_state_indices=initial_state_indices,
        scale=scale,
    )
    return (out, between) if output_intermediate_states else out


# Mamba 2.


def _selective_step(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of the selective scan.

    Args:
        x: (heads, P).
        dt: (heads, 1), or (heads, P).
        A: Broadcast to the state with ``dt``.
        B: (heads, N).
        C: (heads, N).
        state: (heads, P, N).
    """
    state = state * (dt[:, :, None] * A).exp() + (dt * x)[:, :, None] * B[:, None, :]
    return (state * C[:, None, :]).sum(-1), state


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    initial_states: Any = None,
    cu_seqlens: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    out: Any = None,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: Any = None,
    return_track_states: bool = False,
    track_seq_idx: Any = None,
    track_end_locs: Any = None,
    **more: Any,
) -> Any:
    """Whole chunks. x is (1, tokens, heads, P), dt is (1, tokens, heads), B and C are (1, tokens, groups, N).

    Fills ``out``, and returns the states of all sequences, (sequences, heads, P, N). If asked, also those before each
    chunk of the whole batch, and those after as many tokens of the batch as ``track_end_locs`` says.
    """
    heads, groups, dtype = x.shape[2], B.shape[2], state_dtype or x.dtype
    steps = dt[0].float() + (0 if dt_bias is None else dt_bias.float())
    steps = (F.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
    Bs, Cs = (each[0].float().repeat_interleave(heads // groups, 1) for each in (B, C))
    places = dict.fromkeys([] if track_end_locs is None else track_end_locs.tolist(), torch.empty(0))
    ends, between = [], []
    for number, begin, end in _sequences(cu_seqlens):
        state = torch.zeros(heads, x.shape[3], B.shape[3])
        if initial_states is not None:
            state = initial_states[number].float()
        for at in range(begin, end):
            if at % chunk_size == 0:
                between.append(state)
            decay = A.float()[:, None, None]
            y, state = _selective_step(x[0, at].float(), steps[at][:, None], decay, Bs[at], Cs[at], state)
            if D is not None:
                y = y + (D.float()[:, None] if D.dim() == 1 else D.float()) * x[0, at].float()
            out[0, at] = (y if z is None else y * F.silu(z[0, at].float())).to(out.dtype)
            if at + 1 in places:
                places[at + 1] = state
        ends.append(state)
    states = torch.stack(ends).to(dtype)
    if return_track_states:
        tracked = torch.stack([places[each] for each in track_end_locs.tolist()])[None].to(dtype) if places else None
        return torch.stack(between)[None].to(dtype), states, tracked
    if return_varlen_states:
        return (states, states) if return_final_states else states
    return None


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    state_batch_indices: Any = None,
    pad_slot_id: int = -1,
    out: Any = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Any = None,
    intermediate_state_indices: Any = None,
    **more: Any,
) -> None:
    """The next token, or tokens, of each sequence: x and dt are (sequences[, tokens], heads, P). Fills ``out``."""
    one = x.dim() == 3
    if one:
        x, dt, B, C, out = x[:, None], dt[:, None], B[:, None], C[:, None], out[:, None]
        z = None if z is None else z[:, None]
    repeats = x.shape[2] // B.shape[2]
    for number in range(len(x)):
        slot = number if state_batch_indices is None else int(state_batch_indices[number])
        if slot == pad_slot_id:
            continue
        now = state[slot].float()
        for token in range(x.shape[1]):
            step = dt[number, token].float() + (0 if dt_bias is None else dt_bias.float())
            inputs = x[number, token].float()
            Bs, Cs = (each[number, token].float().repeat_interleave(repeats, 0) for each in (B, C))
            y, now = _selective_step(inputs, F.softplus(step) if dt_softplus else step, A.float(), Bs, Cs, now)
            if D is not None:
                y = y + D.float() * inputs
            out[number, token] = (y if z is None else y * F.silu(z[number, token].float())).to(out.dtype)
            if intermediate_states_buffer is not None:
                row = slot if intermediate_state_indices is None else int(intermediate_state_indices[number])
                intermediate_states_buffer[row, token] = now.to(intermediate_states_buffer.dtype)
        if not disable_state_update:
            state[slot] = now.to(state.dtype)


# States that SGLang keeps for its prefix cache.


def track_states(conv: Any, ssm: torch.Tensor, src: Any, mask: Any, dst: Any, *more: Any, **named: Any) -> None:
    """Copy the states of one layer from slot to slot, where the mask says so."""
    for each in [*([conv] if torch.is_tensor(conv) else conv), ssm]:
        for number in range(len(mask)):
            if bool(mask[number]):
                each[int(dst[number])] = each[int(src[number])]


def track_states_of_all_layers(
    conv: Any, ssm: torch.Tensor, src: Any, mask: Any, dst: Any, *more: Any, **named: Any
) -> None:
    """The same for all layers, which are the first dimension."""
    for each in [*([conv] if torch.is_tensor(conv) else conv), ssm]:
        for number in range(len(mask)):
            if bool(mask[number]):
                each[:, int(dst[number])] = each[:, int(src[number])]


def _sequences(starts: Any) -> Iterator[tuple[int, int, int]]:
    """The number of each sequence, its first token, and one past its last."""
    places = starts.tolist()
    for number, (begin, end) in enumerate(itertools.pairwise(places)):
        yield number, begin, end
