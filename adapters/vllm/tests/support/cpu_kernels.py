"""Stands in for vLLM's compiled kernels for a CPU, which its wheel for other devices lacks: plain torch, and slow.

vLLM imports ``vllm._C`` in each of its processes, and then calls ``torch.ops._C``. So every process of a server must
have the stand-ins: `tools/engine-env.sh` puts this file into the environment's site-packages, with a ``.pth`` file that
imports it. It does nothing unless ``VLLM_TARGET_DEVICE=cpu``. A compiled extension is preferred, if there is one.

Here are the kernels of dense attention, also with sliding windows, and of Mamba2. A page of attention has the keys of
a head, token by token, and then its values. The real kernels pack keys in an order of their own.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import itertools
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import types

MODULES = ("vllm._C", "vllm._C_AVX2", "vllm._C_AVX512")
"""The extension's names, by what the processor can do."""


class KernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the extension. It comes last on the path, so that a compiled one is preferred."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in MODULES else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.kernels = define()  # type: ignore[attr-defined]  # keeps the registrations alive


def define() -> Any:
    """Register the kernels as ``torch.ops._C.*``. Returns what keeps them registered."""
    import torch
    from torch.nn import functional

    make: Any = torch.library.Library
    library = make("_C", "FRAGMENT")

    def kernel(signature: str, plain: Any, *, without_tensors: bool = False) -> None:
        library.define(signature)
        library.impl(signature.partition("(")[0], plain, "CompositeExplicitAutograd" if without_tensors else "CPU")

    # Start, sampling, and an activation.

    kernel("init_cpu_memory_env(SymInt[] nodes) -> ()", lambda nodes: None, without_tensors=True)
    kernel("greedy_argmax(Tensor logits) -> Tensor", lambda logits: torch.argmax(logits, dim=-1))

    def draw(logits: Any, seeds: Any) -> Any:
        rows = []
        for row, seed in zip(logits, seeds.tolist(), strict=True):
            noise = torch.empty_like(row).exponential_(generator=torch.Generator().manual_seed(seed))
            rows.append(torch.argmax(row - noise.log()))
        return torch.stack(rows)

    kernel("fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor", draw)

    def silu_and_mul(out: Any, gate_and_up: Any) -> None:
        gate, up = gate_and_up.chunk(2, dim=-1)
        torch.mul(functional.silu(gate), up, out=out)

    kernel("silu_and_mul(Tensor! out, Tensor gate_and_up) -> ()", silu_and_mul)

    # Attention.

    def slots(starts: Any, positions: Any, table: Any, out: Any, page: int) -> None:
        bounds = starts.tolist()
        for row, (first, last) in enumerate(itertools.pairwise(bounds)):
            at = positions[first:last]
            out[first:last] = table[row].to(at.dtype)[at // page] * page + at % page

    kernel(
        "compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor table, Tensor(a!) out, SymInt page)"
        " -> ()",
        slots,
    )
    kernel(
        "get_scheduler_metadata(SymInt requests, SymInt heads, SymInt kv_heads, SymInt dim, Tensor lengths, "
        "ScalarType dtype, Tensor starts, bool causal, SymInt window, str isa, bool split, Tensor? dynamic, "
        "str cache_dtype) -> Tensor",
        lambda *given: torch.zeros(1, dtype=torch.int32),
    )

    def keep(key: Any, value: Any, keys: Any, values: Any, slot: Any, *scales_and_kinds: Any) -> None:
        wanted = slot >= 0  # padding has no slot
        page, row = slot[wanted] // keys.shape[2], slot[wanted] % keys.shape[2]
        keys[page, :, row] = key[: len(slot)][wanted]
        values[page, :, row] = value[: len(slot)][wanted]

    kernel(
        "cpu_attn_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor slot, "
        "str isa, float k_scale, float v_scale, str cache_dtype) -> ()",
        keep,
    )

    def attention(
        query: Any,
        keys: Any,
        values: Any,
        out: Any,
        starts: Any,
        lengths: Any,
        scale: float,
        causal: bool,
        alibi: Any,
        window: int,
        table: Any,
        softcap: float,
        metadata: Any,
        sinks: Any,
        *others: Any,
    ) -> None:
        assert alibi is None, "the stand-in for vLLM's attention has no ALiBi"
        assert not softcap, "the stand-in for vLLM's attention has no soft cap of logits"
        page, bounds = keys.shape[2], starts.tolist()
        for row, length in enumerate(lengths.tolist()):
            first, last = bounds[row], min(bounds[row + 1], len(query))
            if first >= last:
                continue
            pages = table[row, : -(-length // page)].long()
            k, v = (
                cache[pages]
                .permute(1, 0, 2, 3)
                .flatten(1, 2)[:, :length]
                .repeat_interleave(query.shape[1] // keys.shape[1], dim=0)
                for cache in (keys, values)
            )
            behind = torch.arange(length - (last - first), length)[:, None] - torch.arange(length)
            seen = behind >= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
            if window >= 0:
                seen &= behind < window
            # A window has left blocks behind, where anything may stand: also NaN, which no weight of zero hides.
            k, v = (each.masked_fill(~seen.any(dim=0)[:, None], 0.0) for each in (k, v))
            q = query[first:last].transpose(0, 1).float()
            if sinks is None:
                made = functional.scaled_dot_product_attention(q, k.float(), v.float(), attn_mask=seen, scale=scale)
            else:  # of gpt-oss: each head attends to one place more, which has no value
                scores = (q @ k.float().transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
                more = sinks.float()[:, None, None].expand(-1, len(seen), 1)
                weights = torch.softmax(torch.cat((scores, more), dim=-1), dim=-1)
                made = weights[..., :-1] @ v.float()
            out[first:last] = made.transpose(0, 1).reshape(out[first:last].shape)

    kernel(
        "cpu_attention_with_kv_cache(Tensor query, Tensor keys, Tensor values, Tensor(a!) out, Tensor starts, "
        "Tensor lengths, float scale, bool causal, Tensor? alibi, SymInt window, Tensor table, float softcap, "
        "Tensor metadata, Tensor? sinks, Tensor? dynamic, float k_scale, float v_scale, str cache_dtype) -> ()",
        attention,
    )

    # Mamba2. A step: state = exp(dt A) state + dt x B; y = C state + D x.

    def step(state: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any) -> tuple[Any, Any]:
        """One token: state ``[heads, dim, n]``, x ``[heads, dim]``, b and c ``[groups, n]``; dt, a, d by head."""
        heads = x.shape[0] // b.shape[0]
        b, c = (each.float().repeat_interleave(heads, dim=0)[:, None] for each in (b, c))
        state = state * torch.exp(dt * a)[:, None, None] + (dt[:, None] * x)[..., None] * b
        y = (state * c).sum(dim=-1)
        return state, y if d is None else y + d[:, None] * x

    def gated(y: Any, z: Any) -> Any:
        return y if z is None else y * functional.silu(z.float())

    def scan(out: Any, states: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, z: Any, starts: Any) -> None:
        bounds = starts.tolist()
        for row, (first, last) in enumerate(itertools.pairwise(bounds)):
            state = states[row].float()
            for t in range(first, last):
                state, y = step(state, x[t].float(), dt[t].float(), a.float(), b[t], c[t], d)
                out[t] = gated(y, None if z is None else z[t])
            states[row] = state

    kernel(
        "mamba_chunk_scan_fwd_cpu(Tensor(a!) out, Tensor(b!) states, Tensor x, Tensor dt, Tensor a, Tensor b, "
        "Tensor c, Tensor? d, Tensor? z, Tensor starts) -> ()",
        scan,
    )

    def update(
        pool: Any,
        x: Any,
        dt: Any,
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
        accepted: Any,
        starts: Any,
    ) -> None:
        """The next tokens of each request. What does not vary along a head comes expanded over it."""

        def by_head(given: Any) -> Any:
            return None if given is None else given.float().flatten(1)[:, 0]

        bounds = range(len(x) + 1) if starts is None else starts.tolist()
        for request, (first, last) in enumerate(itertools.pairwise(bounds)):
            reads = [request] if read is None else read[request].flatten().tolist()
            writes = reads if write is None else write[request].flatten().tolist()
            source = reads[0 if accepted is None else int(accepted[request]) - 1]
            if source == null:
                continue
            state = pool[source].float()
            for row, target in zip(range(first, last), writes, strict=False):  # without drafts, fewer
                pace = by_head(dt[row]) + (0.0 if bias is None else by_head(bias))
                pace = functional.softplus(pace) if softplus else pace
                state, y = step(state, x[row].float(), pace, by_head(a), b[row], c[row], by_head(d))
                pool[target] = state
                out[row] = gated(y, None if z is None else z[row])

    kernel(
        "selective_state_update_cpu(Tensor(a!) pool, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, "
        "Tensor? z, Tensor? bias, bool softplus, Tensor? read, Tensor? write, SymInt null, Tensor(b!) out, "
        "Tensor? accepted, Tensor? starts) -> ()",
        update,
    )

    def convolve(x: Any, pool: Any, weight: Any, bias: Any, activation: Any, slot: Any, starts: Any, null: int) -> Any:
        """One token of each request, ``[requests, channels]``; the pool has the inputs before it."""
        made, width = torch.empty_like(x), weight.shape[1]
        for row in range(len(x)):
            at = row if slot is None else int(slot.flatten()[row])
            if at == null:
                continue
            inputs = torch.cat((pool[at].float(), x[row].float().reshape(x.shape[1], -1)), dim=-1)
            y = (inputs[:, -width:] * weight.float()).sum(dim=-1) + (0.0 if bias is None else bias.float())
            made[row] = (functional.silu(y) if activation in ("silu", "swish") else y).reshape(made[row].shape)
            pool[at] = inputs[:, -pool.shape[-1] :]
        return made

    kernel(
        "causal_conv1d_update_cpu_vec(Tensor x, Tensor(a!) pool, Tensor weight, Tensor? bias, str? activation, "
        "Tensor? slot, Tensor? starts, SymInt null) -> Tensor",
        convolve,
    )
    _follow_the_kernel()
    return library


def _follow_the_kernel() -> None:
    """Let vLLM 0.32 run its first model runner on a CPU.

    Its plain slot mapping has one more parameter, ``block_size``, than the kernel in whose place it is called.
    """
    from importlib.metadata import version

    if not version("vllm").startswith("0.32."):
        return
    from vllm.utils import cpu_triton_utils

    own = vars(cpu_triton_utils)["_compute_slot_mapping_kernel_impl"]

    def slots(
        tokens: int, most: int, starts: Any, positions: Any, table: Any, stride: int, out: Any, page: int, *more: Any
    ) -> None:
        import torch

        torch.ops._C.compute_slot_mapping_kernel_impl(starts, positions, table, out, page)  # noqa: SLF001

    # vLLM holds the function already, so it is changed and not replaced.
    own.__code__, own.__defaults__ = slots.__code__, None


if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
    sys.meta_path.append(KernelFinder())
