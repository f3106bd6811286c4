"""DeepSeek V4: latents of single tokens in a window, and of groups of 4 or 128 tokens, which compressors make; experts.

vLLM has classes for a CPU (``vllm/models/deepseek_v4/cpu``), and these stand in for its compiled kernels. The formulas
are those of ``csrc/cpu/sgl-kernels`` of vLLM, and of ``vllm/models/deepseek_v4/common/ops``, which say them in Triton.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from .dsa import keep_index, quantise

__all__ = ["define", "rounded"]

NOPE, TOKEN, SCALES = 448, 576, 8
"""Of a row: numbers in FP8, bytes with the 64 rotary ones in bf16 behind them, and bytes of scales."""


def rounded(rows: Any) -> Any:
    """What a cache keeps of rows of 512 numbers."""
    data, exponent = quantise(rows[..., :NOPE], 64)
    nope = data.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 64)) * torch.exp2(exponent)[..., None]
    return torch.cat((nope.flatten(-2), rows[..., NOPE:].bfloat16().float()), dim=-1)


def turn(x: Any, table: Any, positions: Any, *, back: bool = False) -> Any:
    """Rotary positions on the last 64 numbers, in pairs. x is ``[tokens, heads, size]``."""
    cos, sin = (each[:, None] for each in table[positions].float().chunk(2, dim=-1))
    sin = -sin if back else sin
    rest, turned = x[..., :-64], x[..., -64:]
    even, odd = turned[..., ::2], turned[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((rest, turned), dim=-1)


def normed(x: Any, eps: float) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def put(cache: Any, page: int, slots: Any, rows: Any) -> None:
    """Rows into pages ``[pages, bytes]``: 576 bytes of each row, and then eight of scales of each."""
    wanted = slots >= 0
    at, rows = slots[wanted].long()[:, None], rows[: len(wanted)][wanted]
    data, exponent = quantise(rows[:, :NOPE], 64)
    scales = functional.pad((exponent + 127).clamp(0, 254).to(torch.uint8), (0, 1))
    turned = rows[:, NOPE:].to(torch.bfloat16).contiguous().view(torch.uint8)
    cache[at // page, at % page * TOKEN + torch.arange(TOKEN)] = torch.cat((data, turned), dim=-1)
    cache[at // page, page * TOKEN + at % page * SCALES + torch.arange(SCALES)] = scales


def get(cache: Any, page: int, slots: Any) -> Any:
    at, row = slots[..., None] // page, slots[..., None] % page
    data = cache[at, row * TOKEN + torch.arange(TOKEN)]
    scales = torch.exp2(cache[at, page * TOKEN + row * SCALES + torch.arange(7)].float() - 127)
    nope = data[..., :NOPE].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (7, 64))
    turned = data[..., NOPE:].contiguous().view(torch.bfloat16).float()
    return torch.cat(((nope * scales[..., None]).flatten(-2), turned), dim=-1)


def insert(
    q: Any, kv: Any, positions: Any, cache: Any, slots: Any, table: Any, padded: int, eps: float, page: int
) -> Any:
    """Queries ``[tokens, heads, 512]``, normed and turned. The latents ``[tokens, 512]`` go into the window's pages."""
    put(cache, page, slots, turn(kv.float()[:, None], table, positions)[:, 0])
    turned = turn(normed(q.float(), eps), table, positions)
    return functional.pad(turned, (0, 0, 0, padded - q.shape[1])).to(q.dtype)


def attend(
    out: Any,
    q: Any,
    window: Any,
    window_slots: Any,
    window_page: int,
    rest: Any,
    rest_slots: Any,
    rest_page: int,
    sink: Any,
    scale: float,
) -> None:
    """Attention to latents of the window and to chosen compressed ones; a slot below 0 is none."""
    found = []
    for cache, slots, page in ((window, window_slots, window_page), (rest, rest_slots, rest_page)):
        none = slots < 0
        found.append((get(cache, page, slots.clamp(min=0).long()).masked_fill(none[..., None], 0.0), none))
    held, none = (torch.cat(each, dim=1) for each in zip(*found, strict=True))
    scores = torch.einsum("thd,tkd->thk", q.float(), held) * scale
    more = sink[: q.shape[1]].float()[None, :, None].expand(len(q), -1, 1)
    weights = torch.cat((scores.masked_fill(none[:, None], float("-inf")), more), dim=-1).softmax(-1)
    out.copy_(torch.einsum("thk,tkd->thd", weights[..., :-1], held))


def save(kv: Any, score: Any, ape: Any, positions: Any, cache: Any, slots: Any) -> None:
    """What a compressor will need of each token: its latent, and its weight with the bias of its place in the group."""
    wanted = slots >= 0
    at, size, page, count = slots[wanted].long(), kv.shape[1], cache.shape[1], len(slots)
    cache[at // page, at % page, :size] = kv[:count][wanted].float()
    made = score[:count].float() + ape[positions[:count] % ape.shape[0]]
    cache[at // page, at % page, size:] = made[wanted]


def compress(
    states: Any, gather: Any, positions: Any, slots: Any, weight: Any, eps: float, table: Any, ratio: int
) -> tuple[Any, Any]:
    """The latents of groups that end here, and their slots. With a ratio of 4, the group before has a part in each."""
    positions = positions[: len(slots)]
    done = ((positions + 1) % ratio == 0) & (slots >= 0)
    gather, positions, page = gather[: len(slots)][done], positions[done], states.shape[1]
    size, whole = weight.shape[0], states.shape[2] // 2
    at = gather.clamp(min=0).long()
    rows = states[at // page, at % page]
    first = (torch.arange(gather.shape[1]) >= ratio).long() * size
    take = (first[:, None] + torch.arange(size)).expand(len(rows), -1, -1)
    kv, score = rows[..., :whole].gather(2, take), rows[..., whole:].gather(2, take)
    hidden = (gather < 0)[..., None]
    weights = score.masked_fill(hidden, float("-inf")).softmax(1)
    x = normed((weights * kv.masked_fill(hidden, 0.0)).sum(1), eps) * weight
    return turn(x[:, None], table, positions // ratio * ratio)[:, 0], slots[done]


def store(
    states: Any,
    gather: Any,
    positions: Any,
    slots: Any,
    weight: Any,
    eps: float,
    table: Any,
    cache: Any,
    page: int,
    ratio: int,
) -> None:
    rows, slots = compress(states, gather, positions, slots, weight, eps, table, ratio)
    put(cache, page, slots, rows)


def store_index(
    states: Any,
    gather: Any,
    positions: Any,
    slots: Any,
    weight: Any,
    eps: float,
    table: Any,
    cache: Any,
    page: int,
    ratio: int,
) -> None:
    rows, slots = compress(states, gather, positions, slots, weight, eps, table, ratio)
    keep_index(cache, page, slots, rows)


def index_query(
    positions: Any, q: Any, table: Any, out: Any, weights: Any, scale: float, head_scale: float, weights_out: Any
) -> None:
    data, exponent = quantise(turn(q.float(), table, positions), 128)
    out.view(torch.uint8).copy_(data)
    weights_out.copy_(weights * torch.exp2(exponent[..., 0]) * scale * head_scale)


def choose(hidden: Any, logits: Any, bias: Any, topk: int, normal: bool, kind: str, fused: int, *scaling: Any) -> Any:
    weights = functional.softplus(logits.float()).sqrt()
    return _share(weights, (weights + bias).topk(topk, dim=-1).indices, scaling[0])


def choose_by_token(
    logits: Any, experts: Any, topk: int, kind: str, fused: int, count: int, scaling: float
) -> tuple[Any, Any]:
    return _share(functional.softplus(logits.float()).sqrt(), experts.long(), scaling)


def _share(weights: Any, chosen: Any, scaling: Any) -> tuple[Any, Any]:
    taken = weights.gather(1, chosen)
    return taken / taken.sum(-1, keepdim=True) * (scaling or 1.0), chosen.to(torch.int32)


def bmm(out: Any, one: Any, other: Any, packed: bool, scale: Any) -> None:
    out.copy_(one.float() @ other.float().transpose(1, 2))


def head(x: Any, fn: Any, scale: Any, base: Any, eps: float, hc_eps: float) -> Any:
    """The streams of hidden states ``[tokens, streams, hidden]``, put together for the last time."""
    mixes = normed(x.flatten(-2).float(), eps) @ fn.T
    return ((torch.sigmoid(mixes * scale + base) + hc_eps)[..., None] * x.float()).sum(-2).to(x.dtype)


def see(
    out: Any,
    lengths: Any,
    window: int,
    width: int,
    left: Any,
    right: Any,
    starts: Any,
    ends: Any,
    requests: Any,
    valid: Any,
    table: Any,
    page: int,
    replay: Any,
    *,
    num_tokens: int,
    token_offset: int,
    has_image: bool = False,
) -> None:
    """The slots of what each token sees in its window, and how many they are."""
    assert not has_image
    tokens = torch.arange(token_offset, token_offset + num_tokens)
    of = requests[tokens].long()
    last = ends[of] - starts[of + 1] + tokens
    first = torch.maximum((last - window + 1).clamp(min=0), replay[of])
    count = torch.where(valid[tokens], last - first + 1, 0)
    at = first[:, None] + torch.arange(width)
    slots = table[of[:, None], (at // page).clamp(max=table.shape[1] - 1)] * page + at % page
    lengths[:num_tokens] = count
    out.flatten(1)[:num_tokens, :width] = torch.where(torch.arange(width) < count[:, None], slots, -1)


def _see_fast() -> None:
    """Triton's interpreter runs vLLM's own kernel of it, too, with the same result, and takes nine tenths of a step."""
    from vllm.v1.attention.backends.mla import sparse_swa

    name = "_COMPUTE_SWA_INDICES_AND_LENS_KERNEL"
    if hasattr(sparse_swa, name):  # other releases call it in another way
        setattr(sparse_swa, name, see)


def _mix_in_float32() -> None:
    """vLLM has the mixing of streams in torch, which takes bf16 alone."""
    import vllm.model_executor.kernels.mhc as mhc

    plain = importlib.import_module("vllm.model_executor.kernels.mhc.torch")
    source = inspect.getsource(plain.mhc_pre_torch)
    for was, wanted in (
        ("    assert residual.dtype == torch.bfloat16\n", ""),
        (").to(torch.bfloat16)", ").to(residual.dtype)"),
    ):
        assert was in source, was
        source = source.replace(was, wanted)
    found: dict[str, Any] = {}
    exec(source, vars(plain), found)
    module: Any = mhc
    module.mhc_pre_cpu = lambda *given: found["mhc_pre_torch"](*given[:9])
    module.mhc_post_cpu, module.hc_head_fused_cpu = plain.mhc_post_torch, head


def _draft() -> None:
    """Draft with vLLM's class for Intel's GPUs, of layers for a CPU. Its class for a CPU only raises an error."""
    import vllm.models.deepseek_v4 as entry
    from vllm.models.deepseek_v4.cpu import model

    plain: Any = model.DeepseekV4DecoderLayer

    class Layer(plain):  # type: ignore[misc]
        def __init__(self, config: Any, prefix: str, topk_indices_buffer: Any, aux_stream_list: Any) -> None:
            super().__init__(config, prefix, topk_indices_buffer=topk_indices_buffer)
            self.ffn.use_mega_moe, self.ffn.finalize_mega_moe_weights = False, lambda: None

        def hc_post(self, x: Any, residual: Any, post: Any, comb: Any) -> Any:
            return x if residual is None else super().hc_post(x, residual, post, comb)  # a CPU's layer has done it

    source = Path(entry.__path__[0], "xpu", "mtp.py").read_text(encoding="utf-8")
    was = "from .model import (\n    DeepseekV4DecoderLayer,\n    make_deepseek_v4_expert_params_mapping,\n)\n"
    assert was in source
    found: dict[str, Any] = {"__name__": __name__, "DeepseekV4DecoderLayer": Layer}
    exec(source.replace(was, ""), found)
    module: Any = entry
    module.DeepSeekV4MTP = found["DeepSeekV4MTP"]


def define(kernel: Any) -> None:
    """Register them."""
    kernel(
        "fused_qnorm_rope_kv_insert_cpu(Tensor q, Tensor kv, Tensor positions, Tensor(a!) cache, Tensor slots, "
        "Tensor table, int padded, float eps, int page) -> Tensor",
        insert,
    )
    kernel(
        "flash_mla_with_kvcache_cpu(Tensor(a!) out, Tensor q, Tensor window, Tensor window_slots, int window_page, "
        "Tensor rest, Tensor rest_slots, int rest_page, Tensor sink, float scale) -> ()",
        attend,
    )
    kernel(
        "inverse_gptj_rope_o_proj_cpu(Tensor o, Tensor positions, Tensor table, int dim) -> Tensor",
        lambda o, positions, table, dim: turn(o.float(), table, positions, back=True),
    )
    kernel(
        "save_partial_states_cpu(Tensor kv, Tensor score, Tensor ape, Tensor positions, Tensor(a!) cache, Tensor slots)"
        " -> ()",
        save,
    )
    for name, plain in (("", store), ("indexer_", store_index)):
        kernel(
            f"compress_norm_rope_store_{name}cpu(Tensor states, Tensor gather, Tensor positions, Tensor slots, "
            "Tensor weight, float eps, Tensor table, Tensor(a!) cache, int page, int ratio) -> ()",
            plain,
        )
    kernel(
        "fused_indexer_q_rope_quant_cpu(Tensor positions, Tensor q, Tensor table, Tensor(a!) out, Tensor weights, "
        "float scale, float head_scale, Tensor(b!) weights_out) -> ()",
        index_query,
    )
    kernel(
        "biased_topk_cpu(Tensor hidden, Tensor logits, Tensor bias, int topk, bool normal, str kind, int fused, "
        "float? scaling, bool on_out) -> (Tensor, Tensor)",
        choose,
    )
    kernel(
        "hash_topk_cpu(Tensor logits, Tensor experts, int topk, str kind, int fused, int count, float scaling) -> "
        "(Tensor, Tensor)",
        choose_by_token,
    )
    kernel("bmm_cpu(Tensor(a!) out, Tensor one, Tensor other, bool packed, Tensor? scale) -> ()", bmm)
    kernel("convert_weight_packed(Tensor weight) -> Tensor", lambda weight: weight.clone())
    _mix_in_float32()
    _see_fast()
    _draft()

    from vllm.models.deepseek_v4.cpu import cpu_mla

    # vLLM 0.33's own class for a CPU lacks the two kinds of layers that DeepSeek V4.1 brought.
    kinds = "swaonly", "c4a", "c128a", "c1a", "c2a"
    builder: Any = cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder
    builder.build_tile_scheduler = lambda self, count: dict.fromkeys(kinds)
