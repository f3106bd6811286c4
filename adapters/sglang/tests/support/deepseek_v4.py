"""SGLang's real pools of DeepSeek V4 on the CPU, in each variant, and the indices that SGLang names for a request.

A pool needs no kernel. What cannot be smaller than in the model are the sizes of a row and of a page.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from .pools import Made, listed

__all__ = ["PAGE", "VARIANTS", "Table", "Variant", "decode_lists", "make_v4", "prefill_lists", "switched"]

PAGE, PAGES, SLOTS, WINDOW = 256, 8, 4, 128
RATIOS = [0, 0, 4, 128, 4, 128]
"""By layer: two of windows alone, and two of each compression."""


class Variant(NamedTuple):
    """A way to start a server with the model.

    Attributes:
        ratios: Of each layer.
        server: SGLang's options.
        draft: Whether there is a draft's pool.
        pool: Arguments of the pool.
        switches: Attributes of the pool's module that decide its layout.
    """

    ratios: Sequence[int] = RATIOS
    server: dict[str, Any] = {}  # noqa: RUF012
    draft: bool = False
    pool: dict[str, Any] = {}  # noqa: RUF012
    switches: dict[str, Any] = {}  # noqa: RUF012


MTP = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 4}
VARIANTS = {
    "plain": Variant(),
    "mtp": Variant(server=MTP, draft=True, pool={"online_mtp_max_draft_tokens": 4}),
    "dspark": Variant(
        server={**MTP, "speculative_algorithm": "DSPARK"}, draft=True, pool={"online_mtp_max_draft_tokens": 4}
    ),
    "online": Variant(switches={"ONLINE_C128": True}),
    "v41-layout": Variant(pool={"kv_layout": "v41"}),
    "fp4-indexer": Variant(server={"enable_deepseek_v4_fp4_indexer": True}),
    "direct-windows": Variant(switches={"get_platform": lambda: SimpleNamespace(is_sm120=True)}),
    "v41-model": Variant(ratios=[0, 4, 1, 1, 2, 2], pool={"kv_source_layers": [2, 4], "kv_layout": "v41"}),
}


@contextlib.contextmanager
def switched(name: str) -> Iterator[Variant]:
    """SGLang's configuration for a variant. Pools are made within, and their lists are read within."""
    import sglang.srt.mem_cache.deepseek_v4_memory_pool as module
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_context

    variant = VARIANTS[name]
    with contextlib.ExitStack() as stack:
        stack.enter_context(get_context().override_server_args(**variant.server))
        for attribute, value in variant.switches.items():
            stack.enter_context(mock.patch.object(module, attribute, value))
        if name == "direct-windows":
            stack.enter_context(envs.SGLANG_OPT_SM120_DIRECT_SWA_KV.override(True))
        yield variant


def make_v4(variant: Variant, tp: tuple[int, int] = (0, 1)) -> Made:
    """A rank's pools. Call it within `switched`. Every rank of attention TP holds all of the state."""
    import torch

    layers = len(variant.ratios)
    pool = _pool([*variant.ratios, 0], layers, **variant.pool)
    draft = None
    if variant.draft:
        draft = _pool([0], 1, is_draft_worker=True, **variant.pool)
        mapping = torch.zeros((PAGES + 2) * PAGE, dtype=torch.int64)
        for each in (pool, draft):
            each.register_mapping(mapping)
    made = listed(pool, None, layers, heads=1, window=WINDOW, tp=tp, draft=draft)
    made.kv_args.page_size_of_pool = PAGE
    return made


def _pool(ratios: Sequence[int], layers: int, **more: Any) -> Any:
    import torch
    from sglang.srt.mem_cache import deepseek_v4_memory_pool as module

    size = PAGES * PAGE
    return module.DeepSeekV4TokenToKVPool(
        max_num_reqs=SLOTS - 1,
        num_req_slots=SLOTS,
        swa_size=size,
        c4_size=size // 4,
        c128_size=size // 128,
        c4_state_pool_size=PAGES * module.resolve_compress_state_ring_size(4),
        c128_state_pool_size=0,
        page_size=PAGE,
        swa_page_size=PAGE,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=list(ratios),
        sliding_window=WINDOW,
        start_layer=0,
        end_layer=layers,
        full_size=size,
        **more,
    )


class Table:
    """Where one server has a request: a slot, and pages of the full and of the sliding pool, in random order."""

    def __init__(self, made: Made, seed: int) -> None:
        import torch

        draw = np.random.default_rng(seed)
        self.pool = made.pools.pages
        full, sliding = (1 + draw.permutation(PAGES) for _ in "ab")
        self.mapping = torch.zeros((PAGES + 2) * PAGE, dtype=torch.int64)
        for one, other in zip(full, sliding, strict=True):
            self.mapping[one * PAGE : (one + 1) * PAGE] = torch.arange(other * PAGE, (other + 1) * PAGE)
        self.slot = int(draw.integers(1, SLOTS))
        self.tokens = torch.zeros(SLOTS, PAGES * PAGE, dtype=torch.int64)
        self.tokens[self.slot] = torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in full])
        for each in (self.pool, made.pools.draft):
            if each is not None:
                each.register_mapping(self.mapping)

    @property
    def allocator(self) -> Any:
        return SimpleNamespace(
            page_size=PAGE,
            get_kvcache=lambda: self.pool,
            translate_swa_indices_for_transfer=lambda indices: self.mapping[indices],
            translate_kv_indices_for_transfer=lambda indices: indices,
        )


def prefill_lists(
    table: Table, types: Sequence[Any], tokens: int, prefix: int, ends: Sequence[int]
) -> tuple[list[tuple[Any, int]], list[Any]]:
    """What SGLang's prefill hands to a sender: the pages and tokens of each chunk, and the lists of the state types."""
    from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin

    sent: list[tuple[Any, Any, int]] = []
    sender = SimpleNamespace(
        get_max_transfer_tokens=lambda: None,
        should_send_kv_chunk=lambda count, last: count > 0 or last,
        send=lambda pages, states, num_kv_tokens: sent.append((np.asarray(pages), states, num_kv_tokens)),
    )
    request = SimpleNamespace(
        rid="a request",
        start_send_idx=prefix,
        origin_input_ids=[0] * tokens,
        extend_end=tokens,
        extend_range=SimpleNamespace(end=tokens),  # in SGLang 0.5.21
        disagg_decode_prefix_len=prefix,
        kv=SimpleNamespace(req_pool_idx=table.slot),
        disagg_kv_sender=sender,
    )
    manager = SimpleNamespace(kv_args=SimpleNamespace(state_types=types))
    scheduler: Any = SimpleNamespace(
        token_to_kv_pool_allocator=table.allocator,
        enable_staging=False,
        disagg_metadata_buffers=SimpleNamespace(set_buf=lambda request: None),
        sliding_window_size=WINDOW,
        req_to_token_pool=SimpleNamespace(req_to_token=table.tokens),
        disagg_prefill_pending_chunk_rids=set(),
        disagg_prefill_bootstrap_queue=SimpleNamespace(kv_manager=manager),
    )
    send: Any = SchedulerDisaggregationPrefillMixin._send_kv_chunk  # noqa: SLF001
    for end in ends:
        send(scheduler, request, last_chunk=False, end_idx=end)
    send(scheduler, request, last_chunk=True)
    return [(pages, count) for pages, _, count in sent], sent[-1][1]


LISTS_OF_DECODE = {
    "SWA": "_swa_payload",
    "DSV4_REQUEST_STATE": "_request_state_payload",
    "REQUEST_ROW": "_request_row_payload",
}
"""SGLang's function for the list of each state type."""


def decode_lists(table: Table, types: Sequence[Any], tokens: int, prefix: int) -> tuple[Any, list[Any]]:
    """What SGLang's decode hands to a receiver: the pages, and the lists of the state types."""
    from sglang.srt.disaggregation.decode import kv_to_page_indices

    queue = SimpleNamespace(
        scheduler=SimpleNamespace(sliding_window_size=WINDOW),
        req_to_token_pool=SimpleNamespace(req_to_token=table.tokens),
        token_to_kv_pool_allocator=table.allocator,
        token_to_kv_pool=table.pool,
    )
    request = SimpleNamespace(req=SimpleNamespace(kv=SimpleNamespace(req_pool_idx=table.slot)))
    lists = _lists_of_decode()(queue, request, prefix, tokens, PAGE)
    if any(each.name == "DSV4_REQUEST_STATE" for each in types):
        table.pool.clear_request_scoped_state(table.slot)  # SGLang does so before it names the state
    pages = kv_to_page_indices(table.tokens[table.slot, prefix:tokens], PAGE)
    return np.asarray(pages), [lists[LISTS_OF_DECODE[each.name]]() for each in types]


@functools.cache
def _lists_of_decode() -> Any:
    """SGLang has these functions within a long one. They are cut out of its source, and run as they are."""
    import sglang.srt.disaggregation.decode as module

    wanted = [
        textwrap.indent(ast.unparse(node), "    ")
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.FunctionDef) and node.name in LISTS_OF_DECODE.values()
    ]
    assert len(wanted) == len(LISTS_OF_DECODE), "SGLang names the state of DeepSeek V4 in another way"
    returned = "    return {name: each for name, each in locals().items() if name.startswith('_')}"
    head = "def build(self, decode_req, total_prefix_len, seq_len, page_size):"
    names = dict(vars(module))
    exec("\n".join([head, *wanted, returned]), names)
    return names["build"]
