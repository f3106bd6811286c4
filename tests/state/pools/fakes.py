"""Pools as engines have them, on numpy memory: what they offer is all that is known of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Triples = tuple[list[int], list[int], list[int]]

_drawn = 0


def noise(*shape: int, dtype: str = "int16") -> Array:
    """Random contents, of an array of its own."""
    global _drawn
    _drawn += 1
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.random.default_rng(_drawn).integers(0, 256, size, np.uint8).view(dtype).reshape(shape)


def triples(arrays: Sequence[Array]) -> Triples:
    """Address, length and item size of each; the first axis runs over items."""
    return (
        [int(each.__array_interface__["data"][0]) for each in arrays],
        [each.nbytes for each in arrays],
        [each.nbytes // len(each) if len(each) else 0 for each in arrays],
    )


def lists(*names: str) -> Callable[[Any], Triples]:
    """A pool's method that lists the arrays that some of its attributes hold."""
    return lambda self: triples([array for name in names for array in getattr(self, name)])


def lists_of(name: str) -> Callable[[Any], Triples]:
    """A pool's method that lists what another pool lists, if there is that one."""
    return lambda self: getattr(self, name).get_contiguous_buf_infos() if getattr(self, name) else ([], [], [])


def envelopes(size: str) -> Callable[[Any], Triples]:
    """A pool's method that lists its raw allocation as items of as many bytes as an attribute says."""
    return lambda self: (*triples([self.raw])[:2], [getattr(self, size)])


def says(name: str) -> Callable[[Any], Any]:
    """A pool's method that returns one of its attributes."""
    return lambda self: getattr(self, name) or []


def same_slots(pool: object, slots: Array) -> Array:
    """A pool's method that translates token slots of the full pool to those of the sliding one."""
    return slots


class KeysPool:
    """Keys and values: ``[pages, tokens, heads, dim]`` a layer."""

    def __init__(self, k: list[Array], v: list[Array], start: int = 0, layout: str | None = None) -> None:
        self.k, self.v = k, v
        self.page_size = k[0].shape[2 if layout == "hnd" else 1]
        self.head_num = k[0].shape[1 if layout == "hnd" else 2]
        self.layer_num = len(k)
        self.start_layer, self.end_layer = start, start + len(k)
        self.kv_cache_layout = layout
        self.scales: list[Array] = []

    get_contiguous_buf_infos = lists("k", "v")
    get_kv_scale_buf_infos = lists("scales")


def without_scales(pool: KeysPool) -> Any:
    """The same pool without a list of scales: pools have one only if their keys are quantised by block."""
    return SimpleNamespace(**vars(pool), get_contiguous_buf_infos=pool.get_contiguous_buf_infos)


class LatentPool:
    """Latents: ``[pages, tokens, width]`` a layer."""

    def __init__(self, latents: list[Array], start: int = 0) -> None:
        self.latents = latents
        self.page_size = latents[0].shape[1]
        self.layer_num = len(latents)
        self.start_layer, self.end_layer = start, start + len(latents)

    get_contiguous_buf_infos = lists("latents")


class IndexedPool(LatentPool):
    """Latents and sparse-attention index keys, and perhaps a compressor's open pools: ``[requests, slots, width]``."""

    def __init__(
        self, latents: list[Array], index: list[Array], *, start: int = 0, pool: int = 1, tails: Sequence[Array] = ()
    ) -> None:
        super().__init__(latents, start)
        self.index = index
        self.kpool_use_compress = pool > 1
        self.index_kpool = pool
        self.tail_extra_slots = 1
        self.tails = tails

    get_state_buf_infos = lists("index")
    get_compress_tail_buf_infos = lists("tails")


class SlidingPool:
    """A full and a sliding pool, each with its own pages. It asks them for scales whether they have any or not."""

    def __init__(self, full: Any, sliding: Any, window: int) -> None:
        self.full_kv_pool, self.swa_kv_pool = full, sliding
        self.page_size = full.page_size
        self.sliding_window = window

    translate_loc_from_full_to_swa = same_slots
    get_contiguous_buf_infos = lists_of("full_kv_pool")
    get_state_buf_infos = lists_of("swa_kv_pool")

    def get_kv_scale_buf_infos(self) -> Triples:
        return self.full_kv_pool.get_kv_scale_buf_infos()  # type: ignore[no-any-return]

    def get_swa_kv_scale_buf_infos(self) -> Triples:
        return self.swa_kv_pool.get_kv_scale_buf_infos()  # type: ignore[no-any-return]


@dataclass
class States:
    """The lists of recurrent state, which hybrid pools and request pools share."""

    tensors: list[Array]
    dims: list[int]
    outers: list[int] | None = None
    groups: list[Any] | None = None
    ids: list[int] | None = None

    get_state_buf_infos = lists("tensors")
    get_state_dim_per_tensor = says("dims")
    get_state_slice_outer_counts = says("outers")
    get_state_conv_shard_groups = says("groups")


class RequestPool(States):
    """Request slots with recurrent state of their own."""


class HybridPool(States):
    """Full-attention layers around a pool of recurrent state."""

    def __init__(self, full: Any, kv_ids: list[int], states: States) -> None:
        super().__init__(**vars(states))
        self.full_kv_pool, self.mamba_pool = full, states
        self.page_size = full.page_size
        self.kv_ids = kv_ids

    get_contiguous_buf_infos = lists_of("full_kv_pool")
    get_kv_layer_ids = says("kv_ids")
    get_state_layer_ids = says("ids")


class QueryPool(HybridPool):
    """A hybrid pool with pending and compressed index keys."""

    pending: list[Array]
    pending_ids: list[int]
    compressed: list[Array]
    compressed_ids: list[int]

    get_qsa_pending_state_buf_infos = lists("pending")
    get_qsa_pending_state_layer_ids = says("pending_ids")
    get_qsa_compressed_state_buf_infos = lists("compressed")
    get_qsa_compressed_state_layer_ids = says("compressed_ids")


class SparsePool:
    """MiniMax: sparse layers with index keys, dense layers beside them."""

    def __init__(self, sparse: KeysPool, dense: KeysPool | None, index: list[Array]) -> None:
        self.sparse, self.dense, self.index = sparse, dense, index
        self.index_k_pool = object()
        self.index_kv_pool: object | None = None
        self.page_size = sparse.page_size
        self.head_num = sparse.head_num

    get_contiguous_buf_infos = get_sparse_kv_buf_infos = lists_of("sparse")
    get_dense_kv_state_buf_infos = lists_of("dense")
    get_index_k_state_buf_infos = lists("index")


class CompressedPool:
    """DeepSeek-V4: lists by buffer type, each over the layers of one compression ratio."""

    unified_swa_ring_size = 0
    full_kv_pool = object()
    swa_kv_pool: object | None = None
    full_to_swa_index_mapping: object | None = None
    kv: Sequence[Array] = ()
    swa: Sequence[Array] = ()
    ring: Sequence[Array] = ()
    request: Sequence[Array] = ()
    c128: Sequence[Array] = ()
    c4: Sequence[Array] = ()
    valid_from: Sequence[Array] = ()

    def __init__(self, ratios: list[int], start: int, end: int, page: int, window: int) -> None:
        self.compression_ratios = ratios
        self.start_layer, self.end_layer = start, end
        self.page_size = page
        self.sliding_window = window
        self.layer_num = end - start

    translate_loc_from_full_to_swa = same_slots
    get_contiguous_buf_infos = lists("kv")
    get_state_buf_infos = lists("swa")
    get_unified_swa_ring_buf_infos = lists("ring")
    get_request_state_buf_infos = lists("request")
    get_c128_kv_buf_infos = lists("c128")
    get_c4_state_buf_infos = lists("c4")
    get_swa_valid_from_buf_infos = lists("valid_from")


class UnifiedHybridPool(HybridPool):
    """One raw allocation, whose items are envelopes of all layers: pages of keys and values, or slots of state."""

    def __init__(self, full: Any, raw: Array, page_bytes: int, slot_bytes: int) -> None:
        super().__init__(full, [], States([], []))
        self.raw, self.page_bytes, self.slot_bytes = raw, page_bytes, slot_bytes

    get_contiguous_buf_infos = envelopes("page_bytes")
    get_state_buf_infos = envelopes("slot_bytes")


def keys_pool(layers: int, heads: int = 2, layout: str | None = None) -> KeysPool:
    k, v = ([noise(3, 4, heads, 2) for _ in range(layers)] for _ in range(2))
    return KeysPool(k, v, layout=layout)


def latents_pool(layers: int) -> LatentPool:
    return LatentPool([noise(3, 4, 2) for _ in range(layers)])


def some_states(layers: list[int], **more: Any) -> States:
    tensors = [noise(2, 8, 3) for _ in layers] + [noise(2, 2, 4, dtype="float32") for _ in layers]
    return States(tensors, **{"dims": [8] * len(layers) + [2] * len(layers), "ids": layers * 2, **more})


def listing(ptrs: list[int], lens: list[int], items: list[int]) -> Any:
    return SimpleNamespace(page_size=4, get_contiguous_buf_infos=lambda: (ptrs, lens, items))


def compressed_pool(ratios: list[int]) -> CompressedPool:
    pool = CompressedPool(ratios, 0, len(ratios), 256, 128)
    pool.swa = [noise(2, 4) for _ in ratios]
    return pool
