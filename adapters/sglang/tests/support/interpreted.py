"""Compares stand-ins for kernels with SGLang's own: Triton kernels, which an interpreter runs, and plain functions.

Run as ``python -m support.interpreted``, with ``TRITON_INTERPRET=1`` from the start: Triton asks when it is imported.
Prints the largest difference in each comparison, as JSON. The interpreter cannot run the other kernels that have
stand-ins: they use block pointers or masks that it does not know, or ask for the device.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import torch

from .kernels.attention import FP8, IndexKeys
from .kernels.deepseek_v4 import Rows, clear_unaccepted, combine, index_scores, split_sinkhorn
from .kernels.recurrent import fused_gdn_gating, fused_sigmoid_gating_delta_rule_update
from .newest import OLDER

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


# DeepSeek V4.

STREAMS, HIDDEN = 4, 16
KEYS, PAGE = 150, 64
"""Index keys, and how many of them a page has."""


def _hyper_connections() -> dict[str, float]:
    from sglang.kernels.ops.layernorm import mhc

    fn, base = torch.randn((2 + STREAMS) * STREAMS, STREAMS * HIDDEN), torch.randn((2 + STREAMS) * STREAMS)
    streams, scale = torch.randn(6, STREAMS, HIDDEN), torch.rand(3)
    flat = streams.flatten(1)
    mixes = torch.nn.functional.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
    before, after, beside = split_sinkhorn(mixes, scale, base, STREAMS, 5, 1e-6)
    theirs = vars(mhc)["_mhc_pre_torch"](streams, fn, scale, base, 1e-6, 1e-6, 1e-6, 2.0, 5)
    ours = after[..., None], beside, combine(flat, before, STREAMS, torch.float32)
    return {name: _largest(*pair) for name, *pair in zip(("after", "beside", "before"), ours, theirs, strict=True)}


def _index_keys() -> dict[str, float]:
    """SGLang's own scores of keys that lie where the stand-in has written them."""
    from sglang.srt.layers.attention.dsv4.indexer import fp8_paged_mqa_logits_torch

    pages = -(-KEYS // PAGE)
    buffer = torch.zeros(pages, PAGE * 132, dtype=torch.uint8)
    stored = IndexKeys(buffer, PAGE, 128)
    slots = torch.randperm(pages * PAGE).sort().values[:KEYS]
    stored.write(slots, torch.randn(KEYS, 128))
    queries, weights = torch.randn(2, 4, 128).to(FP8), torch.rand(2, 4)
    theirs = fp8_paged_mqa_logits_torch(
        queries[:, None],
        buffer.view(pages, PAGE, 1, 132),
        weights,
        torch.tensor([KEYS, 70]),
        torch.arange(pages).expand(2, -1),
        None,
        pages * PAGE,
        clean_logits=False,
    )
    ours = index_scores(queries, weights, stored.read(torch.arange(pages * PAGE)))
    pairs = {"all": (ours[0, :KEYS], theirs[0, :KEYS]), "some": (ours[1, :70], theirs[1, :70])}
    return {name: _largest(*pair) / float(pair[1].abs().max()) for name, pair in pairs.items()}


def _keys() -> dict[str, float]:
    """What SGLang's kernel reads of the keys that the stand-in has written."""
    from sglang.kernels.ops.attention.dsv4.dequant_k_cache import dequantize_k_cache_paged_dsv4

    buffer = torch.zeros(3, -(-PAGE * 584 // 576) * 576, dtype=torch.uint8)
    slots, stored = torch.arange(1, 3 * PAGE, 5), Rows(buffer, PAGE)
    stored.write(slots, torch.randn(len(slots), 512))
    theirs = dequantize_k_cache_paged_dsv4(buffer, slots, PAGE)
    return {"keys": _largest(stored.read(slots), theirs[:, 0])}


def _rejected() -> dict[str, float]:
    """Two requests with four drafted tokens each, of which the first ones are accepted, across the end of a ring."""
    from sglang.kernels.ops.kvcache.dsv4_c128_cleanup import clear_unaccepted_c128_draft_states

    ring, ours = 8, torch.randn(3 * 8, 32)
    theirs, given = ours.clone(), (torch.tensor([2, 0]), torch.tensor([6, 17]), torch.tensor([1, 3]))
    for clear, state in ((clear_unaccepted, ours), (clear_unaccepted_c128_draft_states, theirs)):
        clear(state, *given, ring_size=ring, num_draft_tokens=4)
    return {"rows": _largest(*(each.nan_to_num(neginf=-100.0) for each in (ours, theirs)))}


def main() -> None:
    torch.manual_seed(0)
    cpu: Any = torch.cpu
    cpu.device = lambda *given: contextlib.nullcontext()  # SGLang chooses the tensor's card before it starts a kernel
    found = {"gates": _gates(), "delta net": _step(kda=False), "Kimi's delta attention": _step(kda=True)}
    if not OLDER:
        found |= {"hyper-connections": _hyper_connections(), "index keys": _index_keys(), "keys": _keys()}
        found["rejected drafts"] = _rejected()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
