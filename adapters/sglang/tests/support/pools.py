"""SGLang's real pools on the CPU, without a model, and the lists that its queues make of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Container

PAGE = 16
WINDOW = 32
HEADS = 4


class Made(NamedTuple):
    """One rank's pools, as the adapter gets them, and SGLang's `KVArgs`."""

    pools: Any
    kv_args: Any


def make(kind: str, tp: tuple[int, int] = (0, 1), page: int = PAGE, dtype: str = "float32", **changes: Any) -> Made:
    """Pools of one kind: ``mha``, ``mxfp8`` (with scales), ``mla``, ``mla_fp4``, ``swa``, ``swa_mxfp8``, ``hybrid``
    (Mamba 2), ``gdn`` (gated delta net), ``qsa``, ``dsa``, ``pooled`` (index keys of several tokens) or ``minimax``
    (sparse layers, and dense ones).

    Args:
        kind: The kind.
        tp: The rank and the width. Each of the ranks holds its share of four heads.
        page: Tokens of a page, except for ``dsa``.
        dtype: Of ``mha``.
        changes: What is otherwise than usual: arguments of the kind's maker, and ``window``.
    """
    if kind == "hybrid":
        return make_mamba2(granite(**changes), tp, page)
    window = changes.pop("window", WINDOW if kind in ("swa", "swa_mxfp8") else 0)
    pool, requests, layers = _MAKERS[kind](HEADS // tp[1], page, tp, dtype, **changes)
    return listed(pool, requests, layers, heads=HEADS, window=window, tp=tp)


def listed(
    pool: Any,
    requests: Any,
    layers: int,
    *,
    heads: int,
    window: int = 0,
    tp: tuple[int, int] = (0, 1),
    rows: int = 8,
    draft: Any = None,
    text: Any = None,
) -> Made:
    """Pools with as many metadata rows, and what SGLang's queues list of both.

    Args:
        pool: The pool of pages.
        requests: The pool of request slots, or ``None``.
        layers: Layers of the model.
        heads: KV heads of the whole model.
        window: Positions that sliding-window layers look back; 0 if there are none.
        tp: The rank and the width.
        rows: Metadata rows.
        draft: The pool of a draft model's pages.
        text: The model's own configuration, if its numbers matter.
    """
    import torch
    from sglang.srt.disaggregation import utils
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.utils import (
        MetadataBuffers,
        build_kv_layer_ids,
        get_kv_transfer_buf_infos,
        setup_state_kv_args,
    )

    from statelink_sglang.backend import Pools

    metadata = MetadataBuffers(rows, 64, torch.float32, 16)
    args = KVArgs()
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = get_kv_transfer_buf_infos(pool)
    args.num_draft_entries = 0
    if draft is not None:
        of_draft = get_kv_transfer_buf_infos(draft)
        args.num_draft_entries = len(of_draft[0])
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = (
            [*ours, *theirs]
            for ours, theirs in zip((args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens), of_draft, strict=True)
        )
    args.kv_layer_ids = build_kv_layer_ids(
        token_to_kv_pool=pool,
        draft_token_to_kv_pool=draft,
        num_draft_entries=args.num_draft_entries,
        num_hidden_layers=layers,
    )
    if hasattr(utils, "get_pd_kv_layout"):  # since SGLang 0.5.23
        args.kv_layout = utils.get_pd_kv_layout(pool)
    args.page_size = pool.page_size
    args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = metadata.get_buf_infos()
    setup_state_kv_args(args, pool, draft, layers, req_to_token_pool=requests)
    config = SimpleNamespace(
        num_hidden_layers=layers,
        get_total_num_kv_heads=lambda: heads,
        get_swa_num_kv_heads=lambda width: heads // width,
        hf_text_config=text or SimpleNamespace(model_type="llama", num_hidden_layers=layers),
    )
    return Made(Pools(pool, draft, requests, metadata, config, window, tp), args)


def make_mha(name: str, heads: int, page: int, dtype: str, *, head: int = 8, layers: int = 2) -> Any:
    """A pool of SGLang's class ``name``, which is made as `MHATokenToKVPool` is. A head has ``head`` elements."""
    import torch
    from sglang.srt.mem_cache import memory_pool

    return getattr(memory_pool, name)(
        size=1024,
        page_size=page,
        dtype=getattr(torch, dtype),
        head_num=heads,
        head_dim=head,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )


def _mha(heads: int, page: int, tp: tuple[int, int], dtype: str, layers: int = 2) -> tuple[Any, Any, int]:
    return make_mha("MHATokenToKVPool", heads, page, dtype, layers=layers), None, layers


def _mxfp8(heads: int, page: int, tp: tuple[int, int], dtype: str) -> tuple[Any, Any, int]:
    return make_mha("MHATokenToKVPoolMXFP8", heads, page, "bfloat16", head=32), None, 2


def _mla(
    heads: int, page: int, tp: tuple[int, int], dtype: str, name: str = "MLATokenToKVPool", layers: int = 2
) -> tuple[Any, Any, int]:
    import torch
    from sglang.srt.mem_cache import memory_pool

    pool = getattr(memory_pool, name)(
        size=1024,
        page_size=page,
        dtype=torch.bfloat16,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    return pool, None, layers


def _mla_fp4(heads: int, page: int, tp: tuple[int, int], dtype: str) -> tuple[Any, Any, int]:
    return _mla(heads, page, tp, dtype, "MLATokenToKVPoolFP4")


def _swa(
    heads: int, page: int, tp: tuple[int, int], dtype: str, values: int | None = None, head: int = 8, **more: Any
) -> tuple[Any, Any, int]:
    """``values`` is the size of a head's values in layers with a window, if it is another than that of its keys."""
    import torch
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    pool = SWAKVPool(
        size=1024,
        size_swa=512,
        page_size=page,
        dtype=torch.float32,
        head_num=heads,
        head_dim=head,
        swa_attention_layer_ids=[0, 1, 3],
        full_attention_layer_ids=[2],
        device="cpu",
        **({} if values is None else {"swa_v_head_dim": values}),
        **more,
    )
    return pool, None, 4


def _swa_mxfp8(heads: int, page: int, tp: tuple[int, int], dtype: str) -> tuple[Any, Any, int]:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPoolMXFP8

    return _swa(heads, page, tp, dtype, head=32, token_to_kv_pool_class=MHATokenToKVPoolMXFP8)


def _dsa(heads: int, page: int, tp: tuple[int, int], dtype: str, layers: int = 2) -> tuple[Any, Any, int]:
    import torch
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    pool = DSATokenToKVPool(
        size=1024,
        page_size=64,  # its kernels know no other
        dtype=torch.bfloat16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
        kv_cache_dim=576,
        index_head_dim=128,
    )
    return pool, None, layers


SPARSE_LAYERS, DENSE_LAYERS = [1, 2, 4, 5], [0, 3]


def _minimax(
    heads: int,
    page: int,
    tp: tuple[int, int],
    dtype: str,
    dense: list[int] = DENSE_LAYERS,
    sparse: list[int] = SPARSE_LAYERS,
    values: Container[int] = (),
) -> tuple[Any, Any, int]:
    """``values`` are the sparse layers whose index has values, too."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool

    layers = len(dense) + len(sparse)
    pool = MiniMaxSparseKVPool(
        size=1024,
        page_size=page,
        dtype=torch.float32,
        head_num=heads,
        head_dim=8,
        idx_head_dim=16,
        dense_layer_ids=dense,
        sparse_layer_ids=sparse,
        disable_value_sparse_layer_ids=[layer for layer in sparse if layer not in values],
        device="cpu",
        start_layer=0,
        end_layer=layers,
    )
    return pool, None, layers


def make_mamba2(text: Any, tp: tuple[int, int] = (0, 1), page: int = PAGE) -> Made:
    """Pools of a model with Mamba 2, whose states have the shapes that SGLang's class of its configuration gives."""
    with ranks(*tp):
        params = text.mamba2_cache_params
    attention = [*text.full_attention_layer_ids]
    pool, requests = _recurrent(params, attention, HEADS // tp[1], page)
    return listed(pool, requests, text.num_hidden_layers, heads=HEADS, tp=tp, text=text)


def granite(state: int = 8, groups: int = 2) -> Any:
    """The configuration of a Granite 4 with three layers of Mamba 2 and one of attention."""
    from sglang.srt.configs import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        hidden_size=32,
        num_hidden_layers=4,
        layer_types=["mamba", "mamba", "mamba", "attention"],
        mamba_expand=2,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_n_groups=groups,
        mamba_d_state=state,
    )


def ranks(rank: int, width: int) -> Any:
    """SGLang's context of a rank of so many."""
    from sglang.srt.runtime_context import get_parallel

    places = {f"{what}_rank": rank for what in ("tp", "attn_tp", "moe_tp")}
    return get_parallel().override(**places, **{f"{what}_size": width for what in ("tp", "attn_tp", "moe_tp")})


def _recurrent(params: Any, attention: list[int], heads: int, page: int) -> tuple[Any, Any]:
    """A pool of pages for layers of attention, and a pool of requests with states for the others."""
    import torch
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool

    requests = HybridReqToTokenPool(
        size=8,
        mamba_size=8,
        mamba_spec_state_size=8,
        max_context_len=256,
        device="cpu",
        enable_memory_saver=False,
        cache_params=params,
        mamba_layer_ids=[*params.layers],
        enable_mamba_extra_buffer=False,
        speculative_num_draft_tokens=None,
        enable_overlap_schedule=False,
    )
    pool = HybridLinearKVPool(
        size=1024,
        page_size=page,
        dtype=torch.float32,
        head_num=heads,
        head_dim=8,
        full_attention_layer_ids=attention,
        device="cpu",
        mamba_pool=requests.mamba_pool,
        enable_memory_saver=False,
    )
    return pool, requests


GDN_BLOCKS = [16, 16, 64]
"""Channels of queries, keys and values."""


def _gdn(heads: int, page: int, tp: tuple[int, int], dtype: str) -> tuple[Any, Any, int]:
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape

    shape = Mamba2StateShape.create(
        tp_world_size=tp[1],
        intermediate_size=64,
        n_groups=2,
        num_heads=4,
        head_dim=16,
        state_size=8,
        conv_kernel=4,
        conv_shard_groups=GDN_BLOCKS,
    )
    return *_recurrent(Mamba2CacheParams(shape=shape, layers=[0, 1, 2]), [3], heads, page), 4


def _qsa(heads: int, page: int, tp: tuple[int, int], dtype: str) -> tuple[Any, Any, int]:
    import torch
    from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool

    _, requests, layers = _gdn(heads, page, tp, dtype)
    pool = QSATokenToKVPool(
        size=1024,
        page_size=page,
        dtype=torch.float32,
        head_num=heads,
        head_dim=8,
        full_attention_layer_ids=[3],
        device="cpu",
        mamba_pool=requests.mamba_pool,
        qsa_index_kv_heads=1,
        qsa_index_head_dim=32,
        qsa_compress_ratio=4,
        qsa_token_topk=16,
        num_request_slots=9,
    )
    return pool, requests, layers


GROUP = 4
"""Tokens for which an index key stands, where one stands for several."""


def _pooled(heads: int, page: int, tp: tuple[int, int], dtype: str, spare: int = 0) -> tuple[Any, Any, int]:
    """Beside recurrent layers, latents with an index of which a key stands for several tokens, as for GLM-5-Next.

    ``spare`` is how many rows a request's ring has beyond a group.
    """
    import torch
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    from statelink_sglang.backend import SEAM

    _, requests, layers = _gdn(heads, page, tp, dtype)
    pool = HybridLinearKVPool(
        size=1024,
        page_size=64 if SEAM.release() == "0.5.21" else 64 * GROUP,  # with 64 keys in a page
        dtype=torch.bfloat16,
        head_num=1,
        head_dim=576,
        full_attention_layer_ids=[3],
        device="cpu",
        mamba_pool=requests.mamba_pool,
        use_mla=True,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        use_dsa=True,
        index_head_dim=128,
        kv_cache_dim=576,
        index_kpool=GROUP,
        index_kpool_compress=True,
        tail_extra_slots=spare,
        max_running_requests=8,
    )
    return pool, requests, layers


_MAKERS = {
    "mha": _mha,
    "mxfp8": _mxfp8,
    "mla": _mla,
    "mla_fp4": _mla_fp4,
    "swa": _swa,
    "swa_mxfp8": _swa_mxfp8,
    "gdn": _gdn,
    "qsa": _qsa,
    "dsa": _dsa,
    "pooled": _pooled,
    "minimax": _minimax,
}
KINDS = ("hybrid", *_MAKERS)


def make_with_draft(kind: str) -> Made:
    """Pools of a kind, and those of a draft model of one layer."""
    pool, requests, layers = _MAKERS[kind](HEADS, PAGE, (0, 1), "float32")
    maker: Any = _MAKERS[kind]
    draft, _, _ = maker(HEADS, PAGE, (0, 1), "float32", layers=1)
    made = listed(pool, requests, layers, heads=HEADS, draft=draft)
    made.kv_args.page_size_of_pool = pool.page_size
    return made
