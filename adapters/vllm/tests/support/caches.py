"""Caches as vLLM makes them, with its own views of one allocation, and without an engine."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from late_device import BACKEND, to_device
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

import statelink
from statelink import Link, Receiving, state
from statelink_vllm.connector import Group, Leftovers, Model, describe_cache

BLOCKS = 24
rooms = itertools.count(1)


class Cache(NamedTuple):
    """One rank's cache: vLLM's configuration and its tensors by name of the layer."""

    config: KVCacheConfig
    tensors: dict[str, torch.Tensor]


def attention(heads: int, block: int = 16, window: int | None = None, chunk: int | None = None, **more: Any) -> Any:
    """The specification of layers with keys and values of 8 float32 numbers each."""
    given = {"block_size": block, "num_kv_heads": heads, "head_size": 8, "dtype": torch.float32, **more}
    if chunk is not None:
        return ChunkedLocalAttentionSpec(attention_chunk_size=chunk, **given)
    return FullAttentionSpec(**given) if window is None else SlidingWindowSpec(sliding_window=window, **given)


def latent(block: int = 16) -> Any:
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=24, dtype=torch.float32)


def recurrent(kind: str, *shapes: tuple[int, ...], page: int | None = None, block: int = 16, **more: Any) -> Any:
    """The specification of recurrent layers, with states of float32."""
    return MambaSpec(
        block_size=block,
        shapes=shapes,
        dtypes=(torch.float32,) * len(shapes),
        mamba_type=MambaAttentionBackendEnum[kind],
        page_size_padded=page,
        **more,
    )


def make_cache(groups: Sequence[tuple[Any, Sequence[int]]], layout: str = "LBHNC", kernel: int | None = None) -> Cache:
    """Make the cache of groups of layers, each a specification and the numbers of its layers. Groups are overlaid."""
    order = KVCacheLayout[layout]
    size = max(spec.page_size_bytes * BLOCKS * len(layers) for spec, layers in groups)
    raw = to_device(torch.randint(-128, 128, (size,), dtype=torch.int8))
    described, placed, tensors = [], [], {}
    for spec, layers in groups:
        names = [f"model.layers.{number}.attn" for number in layers]
        page = spec.page_size_bytes
        strides = (page * BLOCKS, page) if layout.startswith("L") else (page, page * len(layers))
        if layout == "BHLNC":  # the layers take turns behind each head
            strides = (page // spec.num_heads, strides[1])
        place = KVCacheTensor(size, names, *strides)
        views = create_kv_cache_views(raw, spec, BLOCKS, order, place, kernel)
        tensors.update(dict(zip(names, views, strict=True)))
        described.append(KVCacheGroupSpec(names, spec))
        placed.append(place)
    return Cache(KVCacheConfig(BLOCKS, placed, described, kv_cache_layout=layout), tensors)


def model_of(
    tp: tuple[int, int] = (0, 1),
    heads: int = 4,
    *,
    groups: int | None = None,
    channels_first: bool = False,
    backend: str = "FLASH_ATTN",
    pages: Mapping[str, str] | None = None,
) -> Model:
    return Model(
        tp, heads, groups, channels_first, lambda name: backend, lambda name: int(name.split(".")[2]), pages or {}
    )


class Rank:
    """A rank that has opened its link. Its stage is its place in a pipeline and the pipeline's length."""

    def __init__(self, role: str, cache: Cache, model: Model, stage: tuple[int, int] = (0, 1), **options: Any) -> None:
        self.cache, self.tp = cache, model.tp
        components, self.groups = describe_cache(cache.config, cache.tensors, model)
        self.leftovers = Leftovers(cache.config, cache.tensors, self.groups)
        (rank, width), (place, stages) = model.tp, stage
        inventory = state.describe(
            role,
            components,
            rank=place * width + rank,
            ranks=stages * width,
            axes={"tp": model.tp, "pp": stage},
        )
        self.link: Link = statelink.open({"role": role, "backend": BACKEND, **options}, inventory)

    def tensors(self, group: int) -> dict[int, torch.Tensor]:
        """The tensors of a group by number of the layer."""
        names = self.cache.config.kv_cache_groups[group].layer_names
        return {int(name.split(".")[2]): self.cache.tensors[name] for name in names}


@contextlib.contextmanager
def sides(prefill: Sequence[tuple[Any, ...]], decode: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
    """The ranks of both sides, each by what `Rank` takes besides the role. Decode's know each other."""
    with contextlib.ExitStack() as opened:
        ranks = []
        for role, side in (("prefill", prefill), ("decode", decode)):
            made = [Rank(role, *each) for each in side]
            for rank in made:
                opened.callback(rank.link.close)
            ranks.append(made)
        for rank in ranks[1]:
            rank.link.siblings([each.link.address for each in ranks[1] if each is not rank])
        yield ranks


def hand(
    prefill: Sequence[Rank],
    decode: Sequence[Rank],
    tokens: int,
    prefix: int,
    source: Sequence[Sequence[int]],
    target: Sequence[Sequence[int]],
) -> list[Receiving]:
    """Move a request between blocks that both sides' tables name, group by group. Returns decode's rooms."""
    room = next(rooms)
    sending = []
    for rank in prefill:
        sending.append(rank.link.send(room, tokens))
        sending[-1].push(_items(rank.groups, source, tokens, 0))
    peer = [rank.link.address for rank in prefill]
    receiving = []
    for rank in decode:
        items = _items(rank.groups, target, tokens, prefix)
        ready = rank.leftovers.zero(items)
        receiving.append(rank.link.receive(room, peer, tokens, items, prefix=prefix, ready=ready))
    for each in (*receiving, *sending):
        each.wait(60, quiesced=True)
        each.check()
    return receiving


def _items(groups: Sequence[Group], tables: Sequence[Sequence[int]], tokens: int, prefix: int) -> Mapping[str, Any]:
    return {each.component.name: each.indices(tables[each.table], tokens, prefix) for each in groups}
