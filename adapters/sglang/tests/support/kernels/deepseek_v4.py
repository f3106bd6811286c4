"""DeepSeek V4: windows, compressors, the indexer, hyper-connections, and what chooses experts.

Formulas are those of transformers' ``models/deepseek_v4``, which are the paper's. Rows lie in SGLang's own pools as its
kernels have them: those of keys as `dequantize_k_cache_paged_dsv4` reads them, index keys as
`fp8_paged_mqa_logits_torch` does, and the raw rows of compressors in rings of the request or of its window's pages.
`test_kernels.py` compares with SGLang's own plain functions, where it has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .attention import FP8, IndexKeys

__all__ = ["Rows", "after_imports", "clear_unaccepted", "combine", "index_scores", "split_sinkhorn"]

NOPE, ROPE, TILE = 448, 64, 64
"""Elements of a key in FP8, those in bfloat16, which are turned, and those of a scale."""


def after_imports() -> None:
    """Put the kernels where SGLang looks for them. Releases before 0.5.23 have other names, and no servers with it."""
    import sglang.srt.layers.moe.topk as topk
    import sglang.srt.mem_cache.kv_cache_configurator as pools
    from sglang.kernels.ops.layernorm import mhc
    from sglang.srt.layers.attention import deepseek_v4_trtllm_backend
    from sglang.srt.mem_cache import deepseek_v4_memory_pool
    from sglang.srt.model_executor import model_runner
    from sglang.srt.models import deepseek_v4

    model: Any = deepseek_v4
    model.fused_rope_inplace = turn_in_place
    model.fused_q_norm_rope = norm_and_turn_queries
    model.get_rope_wrapper = lambda *given, **named: None  # only NPUs use what it makes
    model.DeepseekV4Model.hc_head = head
    layers: Any = mhc
    layers.hc_split_sinkhorn, layers.mhc_combine = split_sinkhorn, combine
    whole: Any = deepseek_v4_memory_pool
    whole.clear_unaccepted_c128_draft_states = clear_unaccepted
    pool: Any = deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool
    pool.set_swa_key_buffer_radix_fused_norm_rope = store_window
    experts: Any = topk
    experts.biased_topk_jit_kernel_impl = topk.biased_topk_impl  # SGLang's own, in torch
    backends: Any = deepseek_v4_trtllm_backend
    backends.create_deepseek_v4_attn_backend = lambda runner, **more: _backend()(runner)
    backends.create_deepseek_v4_multistep_backend = Steps
    # SGLang allows keys in FP8 on a CPU with its backend for newer CPUs alone. This model's pool has no others.
    configured: Any = pools
    original, has_amx = pools.attention_backends, pools.cpu_has_amx_support
    configured.attention_backends = lambda: ("intel_amx",) if "dsv4" in original() else original()
    configured.cpu_has_amx_support = lambda: "dsv4" in original() or has_amx()
    # On a CPU, SGLang pads heads until each rank has some, also the one that all ranks of this model have.
    runners: Any = model_runner
    pads = runners.adjust_config_with_unaligned_cpu_tp
    runners.adjust_config_with_unaligned_cpu_tp = lambda config, *given: (
        config if config.hf_config.model_type == "deepseek_v4" else pads(config, *given)
    )


# Rotary positions, and norms.


def _turn(x: torch.Tensor, freqs: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """x is (T, ..., 64) in pairs, and freqs is (T, 32), complex."""
    turns = (freqs.conj() if inverse else freqs).view(len(x), *[1] * (x.dim() - 2), ROPE // 2)
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], ROPE // 2, 2).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2)


def _turn_last(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[..., :-ROPE], _turn(x[..., -ROPE:], freqs)], -1)


def _norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)


def turn_in_place(q: Any, k: Any, freqs: torch.Tensor, positions: torch.Tensor, inverse: bool = False) -> None:
    """``fused_rope_inplace``: the parts of queries and keys that are turned."""
    for each in (q, k):
        if each is not None:
            each.copy_(_turn(each, freqs[positions.long()], inverse))


def norm_and_turn_queries(
    q: torch.Tensor, out: torch.Tensor, eps: float | None, freqs: torch.Tensor, positions: torch.Tensor
) -> None:
    """``fused_q_norm_rope``. Fills ``out``."""
    out.copy_(_turn_last(q.float() if eps is None else _norm(q, eps), freqs[positions.long()]))


# Hyper-connections.


def split_sinkhorn(
    mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, mult: int, iterations: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``hc_split_sinkhorn``: the weights of the streams before, after and beside a layer."""
    sizes = [mult, mult, mult * mult]
    before, after, beside = torch.split(mixes.float(), sizes, -1)
    bases = torch.split(base, sizes)
    comb = (beside * scale[2] + bases[2]).view(*mixes.shape[:-1], mult, mult).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return torch.sigmoid(before * scale[0] + bases[0]) + eps, 2 * torch.sigmoid(after * scale[1] + bases[1]), comb


def combine(flat: torch.Tensor, weights: torch.Tensor, mult: int, dtype: torch.dtype) -> torch.Tensor:
    """``mhc_combine``: one stream of several. flat is (T, mult · hidden), and weights are (T, mult)."""
    streams = flat.float().view(len(flat), mult, flat.shape[1] // mult)
    return (streams * weights[..., None]).sum(-2).to(dtype)


def head(self: Any, x: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """``DeepseekV4Model.hc_head``, as SGLang itself has it in torch."""
    from sglang.srt.models.deepseek_v4 import hc_head_torch

    found: torch.Tensor = hc_head_torch(x, fn, scale, base, norm_eps=self.norm_eps, hc_eps=self.hc_eps)
    return found


# Rows of the pools.


class Rows:
    """Keys of one layer, in the pool's own memory.

    A page has its keys first, each with 448 elements in FP8 and 64 in bfloat16, and then 8 bytes for each: exponents of
    its seven scales.
    """

    def __init__(self, buffer: torch.Tensor, page: int) -> None:
        width, scales = NOPE + 2 * ROPE, NOPE // TILE + 1
        raw = buffer.view(torch.uint8)
        self._rows = raw[:, : page * width].view(len(raw), page, width)
        self._scales = raw[:, page * width : page * (width + scales)].view(len(raw), page, scales)
        self._page = page

    def write(self, slots: torch.Tensor, keys: torch.Tensor) -> None:
        at = slots.long() // self._page, slots.long() % self._page
        tiles = keys[:, :NOPE].float().reshape(-1, NOPE // TILE, TILE)
        exponents = torch.ceil(torch.log2(tiles.abs().amax(-1).clamp_min(1e-6) / 448.0))
        rounded = (tiles / torch.exp2(exponents)[..., None]).to(FP8).view(torch.uint8).flatten(1)
        turned = keys[:, NOPE:].to(torch.bfloat16).contiguous().view(torch.uint8)
        self._rows[at] = torch.cat([rounded, turned], 1)
        self._scales[at] = F.pad((exponents + 127).to(torch.uint8), (0, 1))

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        at = slots.long() // self._page, slots.long() % self._page
        rows, scales = self._rows[at], torch.exp2(self._scales[at][:, :-1].float() - 127)
        tiles = rows[:, :NOPE].contiguous().view(FP8).float().view(-1, NOPE // TILE, TILE) * scales[..., None]
        return torch.cat([tiles.flatten(1), rows[:, NOPE:].contiguous().view(torch.bfloat16).float()], 1)


def store_window(
    self: Any,
    layer_id: int,
    swa_loc: torch.Tensor,
    kv: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
    freqs_cis: torch.Tensor,
    positions: torch.Tensor,
    **more: Any,
) -> None:
    """``DeepSeekV4TokenToKVPool.set_swa_key_buffer_radix_fused_norm_rope``."""
    keys = _turn_last(_norm(kv, eps) * kv_weight.float(), freqs_cis[positions.long()])
    Rows(self.get_swa_raw_buffer(layer_id), self.swa_page_size).write(swa_loc, keys)


def clear_unaccepted(
    state: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    *,
    ring_size: int,
    num_draft_tokens: int,
) -> None:
    """``clear_unaccepted_c128_draft_states``: the raw rows of drafted tokens that the model did not say."""
    half = state.shape[-1] // 2
    for row, length, accepted in zip(
        *(each.tolist() for each in (req_pool_indices, seq_lens, accept_lens)), strict=True
    ):
        slots = row * ring_size + torch.arange(length + accepted, length + num_draft_tokens) % ring_size
        state[slots, :half] = 0.0
        state[slots, half:] = float("-inf")


def index_scores(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """How much each query wants each group: queries are (T, heads, D), weights are (T, heads), keys are (groups, D)."""
    return (torch.relu(torch.einsum("thd,gd->thg", queries.float(), keys)) * weights[..., None]).sum(1)


class Part(NamedTuple):
    """One request of a batch: its row, the positions that are computed, and where they begin in the batch."""

    row: int
    first: int
    last: int
    at: int

    @property
    def span(self) -> slice:
        return slice(self.at, self.at + self.last - self.first)


def _parts(batch: Any) -> Iterator[Part]:
    """The requests of a batch, in whose order its positions are."""
    if batch.forward_mode.is_idle():
        return
    rows, at = batch.req_pool_indices.tolist(), 0
    if batch.forward_mode.is_target_verify():
        counts = [batch.spec_info.draft_token_num] * len(rows)
    elif batch.forward_mode.is_extend(include_draft_extend_v2=True):
        counts = batch.extend_seq_lens.tolist()
    else:
        counts = [1] * len(rows)
    for row, count in zip(rows, counts, strict=False):
        first = int(batch.positions[at])
        yield Part(row, first, first + count, at)
        at += count


class Steps:
    """What drafts one token after another: a backend for each step but the last, whose token needs no more."""

    def __init__(self, runner: Any, topk: int, steps: int) -> None:
        assert topk == 1, "the tests draft chains"
        self.attn_backends = [_backend()(runner) for _ in range(steps - 1)]

    def init_forward_metadata(self, batch: Any) -> None:
        """As the backends'."""


def _backend() -> Any:
    """The class of the attention backend ``dsv4``. It is made when SGLang's base class can be imported."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    class Plain(AttentionBackend):  # type: ignore[misc]
        """All of the backend, in plain torch, over SGLang's pools."""

        needs_cpu_seq_lens = True

        def __init__(self, runner: Any) -> None:
            super().__init__()
            self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
            self.window = self.token_to_kv_pool.sliding_window
            self.chosen: dict[int, list[torch.Tensor]] = {}

        def init_forward_metadata(self, batch: Any) -> None:
            """All of it is worked out when a layer asks: a draft's steps change the batch."""

        def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
            """The same."""

        def get_cpu_graph_seq_len_fill_value(self) -> int:
            return 1

        def late_layer_num_tokens(self, batch: Any) -> None:
            return None

        # Where the positions of a request are.

        def _full(self, row: int, positions: torch.Tensor) -> torch.Tensor:
            slots: torch.Tensor = self.req_to_token_pool.req_to_token[row, positions].long()
            return slots

        def _sliding(self, row: int, positions: torch.Tensor) -> torch.Tensor:
            slots: torch.Tensor = self.token_to_kv_pool.translate_loc_from_full_to_swa(self._full(row, positions))
            return slots.long()

        def get_swa_out_cache_loc(self, batch: Any) -> Any:
            return self.token_to_kv_pool.translate_loc_from_full_to_swa(batch.out_cache_loc)

        def _ring(self, pool: Any, row: int, positions: torch.Tensor) -> torch.Tensor:
            ring: int = pool.ring_size
            if pool.request_scoped:
                return row * ring + positions % ring
            slots = self._sliding(row, positions)
            first: torch.Tensor = slots // pool.swa_page_size * ring
            return first + slots % ring

        # Compressors.

        def forward_core_compressor(self, x: torch.Tensor, forward_batch: Any, layer_id: int, compressor: Any) -> None:
            self._compress(x, forward_batch, layer_id, compressor)

        def _compress(self, x: torch.Tensor, batch: Any, layer_id: int, c: Any) -> None:
            """Write what closes a group, and then the raw rows of the new tokens into their ring."""
            state, ring = c.get_state_pool(self), c.get_state_pool(self).kv_score_buffer.kv_score
            rows = F.linear(x.float(), c.wkv_gate.weight.float()).to(ring.dtype)
            for part in _parts(batch):
                own, first = rows[part.span], part.first
                start = max(0, first // c.ratio * c.ratio - (c.ratio if c.overlap else 0))
                before = ring[self._ring(state, part.row, torch.arange(start, first))]
                ends = [each for each in range(first, part.last) if each % c.ratio == c.ratio - 1]
                if ends:
                    self._write_groups(layer_id, c, part.row, torch.cat([before, own]).float(), start, ends)
                places = self._ring(state, part.row, torch.arange(first, part.last)).tolist()
                last = {place: number for number, place in enumerate(places)}  # the last row of a place stays
                ring[torch.tensor([*last])] = own[torch.tensor([*last.values()])]

        def _write_groups(
            self, layer_id: int, c: Any, row: int, raw: torch.Tensor, start: int, ends: list[int]
        ) -> None:
            """Each group is the mean of its rows, by the softmax of their scores. With an overlap, a row has two
            halves: the first one counts in the group after its own."""
            keys, scores = raw.chunk(2, -1)
            width, bias = c.head_dim, c.ape.float().view(-1, c.head_dim)
            groups = []
            for end in ends:
                own = slice(end - start - c.ratio + 1, end - start + 1)
                k, s = keys[own, -width:], scores[own, -width:] + bias[-c.ratio :]
                if c.overlap and end >= 2 * c.ratio - 1:
                    earlier = slice(own.start - c.ratio, own.start)
                    k = torch.cat([keys[earlier, :width], k])
                    s = torch.cat([scores[earlier, :width] + bias[: c.ratio], s])
                groups.append((s.softmax(0) * k).sum(0))
            places = torch.tensor(ends)
            normed = _norm(torch.stack(groups), c.norm.variance_epsilon) * c.norm.weight.float()
            turned = _turn_last(normed, c.freqs_cis[places - c.ratio + 1])
            pool = self.token_to_kv_pool
            if c.is_in_indexer:
                target: Any = IndexKeys(
                    pool.get_index_k_with_scale_buffer(layer_id), pool.get_index_k_page_size(4), width
                )
            else:
                target = Rows(pool.get_extra_key_buffer(layer_id), pool.get_extra_key_page_size(layer_id))
            target.write(self._full(row, places) // c.ratio, turned)

        # The indexer, and attention.

        def forward_c4_indexer(
            self, x: torch.Tensor, q_lora: torch.Tensor, forward_batch: Any, c4_indexer: Any, **more: Any
        ) -> None:
            """Keep which groups each query has chosen, for the layer's attention."""
            c, pool = c4_indexer, self.token_to_kv_pool
            if not more.get("skip_compressor"):
                self._compress(x, forward_batch, c.layer_id, c.compressor)
            positions = forward_batch.positions[: len(q_lora)].long()
            queries = _turn_last(c.wq_b(q_lora)[0].view(-1, c.n_heads, c.head_dim).float(), c.freqs_cis[positions])
            weights = c.weights_proj(x)[0].float() * c.weight_scale
            stored = IndexKeys(
                pool.get_index_k_with_scale_buffer(c.layer_id), pool.get_index_k_page_size(4), c.head_dim
            )
            self.chosen[c.layer_id] = []
            for part in _parts(forward_batch):
                groups = part.last // 4
                mask = torch.zeros(part.last - part.first, groups, dtype=torch.bool)
                keys = stored.read(self._full(part.row, torch.arange(groups) * 4 + 3) // 4)
                scores = index_scores(queries[part.span], weights[part.span], keys)
                for number in range(len(mask)):
                    seen = (part.first + number + 1) // 4
                    mask[number, scores[number, :seen].topk(min(seen, c.index_topk)).indices] = True
                self.chosen[c.layer_id].append(mask)

        def store_cache(self, layer_id: int, swa_k: torch.Tensor, forward_batch: Any) -> None:
            pool = self.token_to_kv_pool
            window = Rows(pool.get_swa_raw_buffer(layer_id), pool.swa_page_size)
            window.write(self.get_swa_out_cache_loc(forward_batch), swa_k)

        def forward(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            layer: Any,
            forward_batch: Any,
            compress_ratio: int = 0,
            attn_sink: Any = None,
            save_kv_cache: bool = True,
            **more: Any,
        ) -> torch.Tensor:
            """Attention over the window, over the layer's groups, and over one sink for each head."""
            pool, layer_id = self.token_to_kv_pool, layer.layer_id
            if save_kv_cache:
                self.store_cache(layer_id, k, forward_batch)
            out = torch.zeros_like(q)
            window = Rows(pool.get_swa_raw_buffer(layer_id), pool.swa_page_size)
            for number, part in enumerate(_parts(forward_batch)):
                places = torch.arange(max(0, part.first - self.window + 1), part.last)
                keys = window.read(self._sliding(part.row, places))
                at = torch.arange(part.first, part.last)[:, None]
                mask = (places <= at) & (places > at - self.window)
                if compress_ratio:
                    groups = torch.arange(part.last // compress_ratio)
                    stored = Rows(pool.get_extra_key_buffer(layer_id), pool.get_extra_key_page_size(layer_id))
                    slots = self._full(part.row, (groups + 1) * compress_ratio - 1) // compress_ratio
                    closed = (groups + 1) * compress_ratio <= at + 1
                    seen = self.chosen[layer_id][number] if compress_ratio == 4 else closed
                    keys, mask = torch.cat([keys, stored.read(slots)]), torch.cat([mask, seen], 1)
                scores = torch.einsum("thd,sd->hts", q[part.span].float(), keys) * layer.scaling
                sinks = attn_sink.float()[: q.shape[1], None, None].expand(-1, len(at), 1)
                weights = torch.cat([scores.masked_fill(~mask, float("-inf")), sinks], -1).softmax(-1)[..., :-1]
                out[part.span] = torch.einsum("hts,sd->thd", weights, keys).to(out.dtype)
            return out

    return Plain
