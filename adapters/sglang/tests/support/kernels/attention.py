"""Attention: SGLang's plain backend with latents and windows, its backend for newer CPUs, DeepSeek's sparse layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["FP8", "IndexKeys", "after_imports", "attend"]


def after_imports() -> None:
    """Put the kernels where SGLang looks for them."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    # The plain backend can compute latents. SGLang has only not said so.
    handlers.AttentionBackendRegistry.register("torch_native", handlers._dispatch_mla_subtype)  # noqa: SLF001
    native: Any = TorchNativeAttnBackend
    native.get_cpu_graph_seq_len_fill_value = lambda self: 1
    native.forward_extend = _of_chosen_tokens(_of_windows(native.forward_extend))
    native.forward_decode = _of_chosen_tokens(_of_windows(native.forward_decode))
    operators: Any = torch.ops.sgl_kernel
    operators.extend_attention_cpu = extend_attention
    operators.decode_attention_cpu = decode_attention
    _install_indexer()


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, cap: float
) -> torch.Tensor:
    """q is (T, heads, D), k is (S, KV heads, D), v is (S, KV heads, DV), mask is (T, S): which keys a query sees."""
    repeats = q.shape[1] // k.shape[1]
    keys, values = (each.float().repeat_interleave(repeats, 1) for each in (k, v))
    scores = torch.einsum("thd,shd->hts", q.float(), keys) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    return torch.einsum("hts,shd->thd", scores.masked_fill(~mask[None], float("-inf")).softmax(-1), values)


def extend_attention(
    q: torch.Tensor,
    k: Any,
    v: Any,
    o: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: Any,
    v_scale: Any,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_len: int,
    scale: float,
    cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Any,
    sinks: Any,
    tree_mask: torch.Tensor | None,
    causal: bool,
) -> None:
    """``extend_attention_cpu``: new tokens of each sequence, after those in the pool. Fills ``o``.

    The keys of the new tokens are in ``k`` and ``v``, and may not be in the pool yet.
    """
    assert not is_cross, "no model of the tests has this"
    assert sinks is None, "no model of the tests has these"
    masked = 0
    for number in range(len(seq_lens)):
        new, all_, at = (int(each[number]) for each in (extend_seq_lens, seq_lens, extend_start_loc))
        places = req_to_token[int(req_pool_indices[number]), :all_].long()
        keys, values = k_buffer[places], v_buffer[places]
        if k is not None and v is not None:
            own = k[at : at + new].view(new, -1, q.shape[2]), v[at : at + new].view(new, -1, o.shape[2])
            before = all_ - new
            # Without tokens before, the pool may hold latents, and the new tokens have whole keys and values.
            keys = torch.cat([keys[:before], own[0].to(keys.dtype)]) if before else own[0]
            values = torch.cat([values[:before], own[1].to(values.dtype)]) if before else own[1]
        mask = torch.ones(new, all_, dtype=torch.bool)
        if tree_mask is not None:
            mask[:, all_ - new :] = tree_mask[masked : masked + new * new].view(new, new).bool()
            masked += new * new
        elif causal:
            mask = mask.tril(all_ - new)
        if window > 0:
            mask &= torch.arange(all_)[None] > torch.arange(all_ - new, all_)[:, None] - window
        o[at : at + new] = attend(q[at : at + new], keys, values, mask, scale, cap).to(o.dtype)


def decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: Any,
    v_scale: Any,
    o: torch.Tensor,
    k: Any,
    v: Any,
    loc: torch.Tensor,
    logits: Any,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Any,
    sinks: Any,
) -> None:
    """``decode_attention_cpu``: one new token of each sequence, whose key it also writes to the pool. Fills ``o``.

    With latents, the values are a part of the keys, so writing the keys writes both.
    """
    assert not is_cross, "no model of the tests has this"
    assert sinks is None, "no model of the tests has these"
    if k is not None:
        k_buffer[loc] = k.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        if v_buffer.data_ptr() != k_buffer.data_ptr():
            v_buffer[loc] = v.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for number in range(len(seq_lens)):
        length = int(seq_lens[number])
        places = req_to_token[int(req_pool_indices[number]), :length].long()
        mask = torch.ones(1, length, dtype=torch.bool)
        if window > 0:
            mask &= torch.arange(length)[None] > length - 1 - window
        part = slice(number, number + 1)
        o[part] = attend(q[part], k_buffer[places], v_buffer[places], mask, scale, cap).to(o.dtype)


def _of_windows(original: Any) -> Any:
    """A forward of the plain backend that reads windows where they are: in a smaller pool, at slots of their own.

    SGLang's reads them at the slots of full attention. Those are others as soon as memory is used again, and beyond the
    smaller pool's end the scheduler ends with an ``IndexError``. SGLang's backends for cards translate them.
    """

    def forward(self: Any, q: torch.Tensor, k: Any, v: Any, layer: Any, *more: Any, **named: Any) -> Any:
        pool, requests = self.token_to_kv_pool, self.req_to_token_pool
        if not self.use_sliding_window_kv_pool or not pool.layers_mapping[layer.layer_id][1]:
            return original(self, q, k, v, layer, *more, **named)
        slots = pool.translate_loc_from_full_to_swa(requests.req_to_token)
        self.req_to_token_pool = SimpleNamespace(req_to_token=slots)
        try:
            return original(self, q, k, v, layer, *more, **named)
        finally:
            self.req_to_token_pool = requests

    return forward


# DeepSeek's sparse attention: an indexer chooses tokens, and attention is over those.


def _of_chosen_tokens(original: Any) -> Any:
    """A forward of the plain backend that also takes the tokens that the indexer has chosen for each query."""

    def forward(
        self: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        topk_indices: Any = None,
        **more: Any,
    ) -> Any:
        if topk_indices is None:
            return original(self, q, k, v, layer, forward_batch, save_kv_cache)
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        latents = self.token_to_kv_pool.get_key_buffer(layer.layer_id).view(-1, layer.qk_head_dim)
        out = torch.zeros(len(queries), layer.tp_q_head_num, layer.v_head_dim, dtype=q.dtype)
        for number, chosen in enumerate(topk_indices):
            keys = latents[chosen[chosen >= 0].long()].float()
            if len(keys):
                weights = torch.softmax(queries[number].float() @ keys.T * layer.scaling, -1)
                out[number] = (weights @ keys[:, : layer.v_head_dim]).to(out.dtype)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    return forward


FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0


def _install_indexer() -> None:
    import sglang.srt.layers.attention.dsa.dsa_indexer as module

    anything: Any = module
    anything.rotate_activation = lambda x: x  # it turns queries and keys alike, so no product of them changes
    anything.Indexer.forward_native = _choose_tokens


def _choose_tokens(
    self: Any,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    layer_id: int,
    return_indices: bool = True,
    *more: Any,
    **named: Any,
) -> torch.Tensor | None:
    """``Indexer.forward``: writes the tokens' index keys to the pool, and returns the best tokens for each query.

    Keys are in FP8 with one scale for each token, in pages: first the keys of a page's tokens, then their scales.

    Returns:
        Slots of the pool, (queries, top k), with -1 behind the last.
    """
    import sglang.srt.layers.attention.dsa.dsa_indexer as module
    from sglang.srt.model_executor.forward_context import get_attn_backend

    pool, width, rope = module.get_token_to_kv_pool(), self.head_dim, self.rope_head_dim
    queries = self.wq_b(q_lora)[0].view(len(x), -1, width).clone()
    key, weights = self._fused_k_weights(x) if self.use_dsa_indexer_fusion else (self.wk(x)[0], None)
    key = self.k_norm(key).clone()
    turned, turned_key = self.rotary_emb(positions, queries[..., :rope].clone(), key[:, None, :rope].clone())
    queries[..., :rope] = turned.reshape(queries[..., :rope].shape)
    key[:, :rope] = turned_key.reshape(key[:, :rope].shape)
    tokens = getattr(pool, "index_page_size", pool.page_size)  # SGLang 0.5.21 has no pages of another size for them
    pages = IndexKeys(pool.get_index_k_with_scale_buffer(layer_id=layer_id), tokens, width)
    pages.write(forward_batch.out_cache_loc, key)
    if not return_indices:
        return None
    if weights is None:
        weights = torch.nn.functional.linear(x.float(), self.weights_proj.weight.float())
    weights = weights.float() * self.n_heads**-0.5 * self.softmax_scale
    backend = get_attn_backend()
    table = getattr(backend, "req_to_token_pool", backend).req_to_token
    new = [1] * forward_batch.batch_size
    if forward_batch.forward_mode.is_extend() and forward_batch.extend_seq_lens is not None:
        new = forward_batch.extend_seq_lens.tolist()
    out = torch.full((len(queries), self.index_topk), -1, dtype=torch.int32)
    at = 0
    for number, count in enumerate(new):
        length = int(forward_batch.seq_lens[number])
        slots = table[int(forward_batch.req_pool_indices[number]), :length].long()
        keys = pages.read(slots)
        for seen in range(length - count + 1, length + 1):
            scores = (torch.relu(queries[at].float() @ keys[:seen].T) * weights[at][:, None]).sum(0)
            best = scores.topk(min(self.index_topk, seen)).indices
            out[at, : len(best)] = slots[best].to(torch.int32)
            at += 1
    return out


class IndexKeys:
    """The index keys of one layer, in the pool's own memory."""

    def __init__(self, buffer: torch.Tensor, page: int, width: int) -> None:
        bytes_ = buffer.view(torch.uint8).view(len(buffer), -1)
        self._keys = bytes_[:, : page * width].view(len(buffer), page, width)
        self._scales = bytes_[:, page * width : page * width + 4 * page].view(len(buffer), page, 4)
        self._page = page

    def write(self, slots: torch.Tensor, keys: torch.Tensor) -> None:
        places = slots.long()
        scales = keys.float().abs().amax(-1, keepdim=True).clamp_min(1e-4) / LARGEST_FP8
        self._keys[places // self._page, places % self._page] = (keys.float() / scales).to(FP8).view(torch.uint8)
        self._scales[places // self._page, places % self._page] = scales.contiguous().view(torch.uint8)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        at = slots // self._page, slots % self._page
        return self._keys[at].view(FP8).float() * self._scales[at].contiguous().view(torch.float32)
