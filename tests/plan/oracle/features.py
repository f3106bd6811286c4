"""What generated cases must not merely happen to have: each of these occurs in a stated number of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .draw import DEALINGS
from .kinds import KINDS
from .scene import Lay, Pool, Scene, need

__all__ = ["DEALT_FEATURES", "FEATURES", "Feature", "features_of"]

Fits = Callable[[Scene, Pool, Lay, Lay], bool]


class Feature(NamedTuple):
    """Something that a scene can have about one of its pools."""

    kinds: tuple[str, ...]
    """Kinds of state, or ways of dealing, of which each must have it."""
    least: int
    """In how many scenes of each of them."""
    fits: Fits


RECURRENT = ("mamba", "mamba in raw pages")
RINGS = ("swa_ring", "swa_ring with heads", "dsa_tail", "dsv4_c4_state", "c128_state")
SUFFIX = ("kv", "kv of latents", "kv in planar pages", "dsa", "dsv4", "minimax_index_k")
FUSED = ("kv side by side", "kv side by side, opaque")
TURNS = ("kv in turns",)
CHUNKED = ("chunked_local", "chunked_local side by side", "chunked_local in turns")
HEADS = ("kv", "swa", "chunked_local", "minimax_dense_kv", "block_scale with heads", *FUSED, *TURNS)


def _wraps(scene: Scene, pool: Pool, lay: Lay) -> bool:
    a, b = need(pool, scene.tokens, scene.prefix)
    return a < b and a % lay.ring > (b - 1) % lay.ring


def _opens(scene: Scene, pool: Pool) -> int:
    """Where the attention chunk of decode's first position begins."""
    return scene.tokens // pool.group * pool.group


def _ratios(pool: Pool) -> int:
    return len({part.unit for part in pool.parts})


def _few_heads(scene: Scene, pool: Pool) -> bool:
    """Convolution heads that several ranks of one side hold."""
    return any(heads < max(scene.source.tp, scene.target.tp) for _, heads in pool.parts[0].heads)


def _grouped(pool: Pool) -> bool:
    return len(pool.parts[0].heads) > 2


FEATURES: dict[str, Feature] = {
    "rings of different length": Feature(RINGS, 8, lambda scene, pool, s, t: s.ring != t.ring),
    "a ring that wraps on one side only": Feature(
        RINGS[:4], 3, lambda scene, pool, s, t: _wraps(scene, pool, s) != _wraps(scene, pool, t)
    ),
    "nothing pending": Feature(("dsa_tail", "c128_state"), 4, lambda scene, pool, s, t: scene.tokens % pool.group == 0),
    "page sizes and a window": Feature(
        ("swa",), 8, lambda scene, pool, s, t: s.page != t.page and pool.window < scene.tokens
    ),
    "page sizes and a prefix": Feature(
        SUFFIX, 3, lambda scene, pool, s, t: s.page != t.page and 0 < scene.prefix < scene.tokens
    ),
    "page sizes and a prefix, whole": Feature(
        ("minimax_dense_kv", "qsa_compressed"), 4, lambda scene, pool, s, t: s.page != t.page and scene.prefix > 0
    ),
    "page sizes and chunks": Feature(SUFFIX, 3, lambda scene, pool, s, t: s.page != t.page and len(scene.chunks) > 1),
    "a prefix of which prefill's page holds a part": Feature(
        SUFFIX, 2, lambda scene, pool, s, t: scene.prefix % s.page > 0 and scene.prefix < scene.tokens
    ),
    "a prefix that leaves no page": Feature(SUFFIX, 2, lambda scene, pool, s, t: scene.prefix == scene.tokens),
    "a prefix inside the window": Feature(
        ("swa", "block_scale_swa"),
        4,
        lambda scene, pool, s, t: 0 < scene.tokens - pool.window < scene.prefix < scene.tokens,
    ),
    "an attention chunk that begins inside a page": Feature(
        CHUNKED, 8, lambda scene, pool, s, t: _opens(scene, pool) % t.page > 0 and scene.tokens % pool.group > 0
    ),
    "page sizes and an attention chunk": Feature(
        CHUNKED, 8, lambda scene, pool, s, t: s.page != t.page and 0 < _opens(scene, pool) < scene.tokens
    ),
    "a prefix inside the attention chunk": Feature(
        CHUNKED, 4, lambda scene, pool, s, t: _opens(scene, pool) < scene.prefix < scene.tokens
    ),
    "an attention chunk that ends with the prompt": Feature(
        CHUNKED, 2, lambda scene, pool, s, t: _opens(scene, pool) == scene.tokens
    ),
    "attention chunks and pushes": Feature(CHUNKED, 4, lambda scene, pool, s, t: len(scene.chunks) > 1),
    "a prefix inside a page of complete groups": Feature(
        ("dsv4_c128",), 8, lambda scene, pool, s, t: scene.prefix % t.page > 0 and scene.prefix < scene.tokens
    ),
    "several compression ratios": Feature(("dsv4",), 8, lambda scene, pool, s, t: _ratios(pool) > 1),
    "several compression ratios over stages": Feature(
        ("dsv4",), 4, lambda scene, pool, s, t: _ratios(pool) > 1 and len(scene.source.cuts) > 1
    ),
    "stages cut differently on both sides": Feature(
        tuple(KINDS),
        1,
        lambda scene, pool, s, t: (
            scene.source.cuts != scene.target.cuts and min(len(scene.source.cuts), len(scene.target.cuts)) > 1
        ),
    ),
    "fewer heads than ranks on both sides": Feature(
        HEADS, 2, lambda scene, pool, s, t: pool.parts[0].shape[0] < min(scene.source.tp, scene.target.tp)
    ),
    "fewer heads than ranks, widths differ": Feature(
        HEADS,
        2,
        lambda scene, pool, s, t: (
            scene.source.tp != scene.target.tp and pool.parts[0].shape[0] < max(scene.source.tp, scene.target.tp)
        ),
    ),
    "states replicated by context parallelism": Feature(
        ("aux", "hidden", "swa_ring", "dsa", "mamba"), 2, lambda scene, pool, s, t: scene.source.shards > 1
    ),
    "a layer that shares its index on one side": Feature(
        ("dsa", "dsa_tail"), 4, lambda scene, pool, s, t: any(part.empty[0] != part.empty[1] for part in pool.parts)
    ),
    "latents beside linear attention": Feature(
        ("kv of latents",), 2, lambda scene, pool, s, t: any(each.type == "mamba" for each in scene.pools)
    ),
    "latents without it, widths differ": Feature(
        ("kv of latents",),
        8,
        lambda scene, pool, s, t: (
            scene.source.tp != scene.target.tp and not any(each.type == "mamba" for each in scene.pools)
        ),
    ),
    "grouped convolutions, narrower": Feature(
        RECURRENT, 6, lambda scene, pool, s, t: _grouped(pool) and scene.source.tp > scene.target.tp
    ),
    "grouped convolutions, wider": Feature(
        RECURRENT, 6, lambda scene, pool, s, t: _grouped(pool) and scene.source.tp < scene.target.tp
    ),
    "convolution heads replicated, narrower": Feature(
        RECURRENT, 2, lambda scene, pool, s, t: _few_heads(scene, pool) and scene.source.tp > scene.target.tp
    ),
    "convolution heads replicated, wider": Feature(
        RECURRENT, 2, lambda scene, pool, s, t: _few_heads(scene, pool) and scene.source.tp < scene.target.tp
    ),
    "transposed on one side": Feature(RECURRENT, 6, lambda scene, pool, s, t: s.swapped != t.swapped),
    "transposed on both sides": Feature(RECURRENT, 6, lambda scene, pool, s, t: s.swapped and t.swapped),
    "more rows on one side": Feature(
        ("swa with spare rows", "qsa_pending with spare rows"),
        8,
        lambda scene, pool, s, t: pool.parts[0].spare[0] != pool.parts[0].spare[1],
    ),
    "a window of pages side by side": Feature(
        FUSED, 8, lambda scene, pool, s, t: 0 < pool.window < scene.tokens and max(s.page, t.page) > 1
    ),
    "page orders, side by side": Feature(FUSED[:1], 6, lambda scene, pool, s, t: s.swapped != t.swapped),
    "a window of pages in turns": Feature(
        TURNS, 8, lambda scene, pool, s, t: 0 < pool.window < scene.tokens and max(s.page, t.page) > 1
    ),
    "in turns on one side": Feature(TURNS, 12, lambda scene, pool, s, t: not s.beside or not t.beside),
    "in turns on both sides": Feature(TURNS, 8, lambda scene, pool, s, t: bool(s.beside and t.beside)),
    "in turns in two ways": Feature(TURNS, 4, lambda scene, pool, s, t: {s.beside, t.beside} == {"pairs", "halves"}),
    "in turns, by layers": Feature(TURNS, 4, lambda scene, pool, s, t: bool(scene.layer_cuts)),
    "draft layers": Feature(("kv",), 3, lambda scene, pool, s, t: any(part.draft for part in pool.parts)),
    "by parcels": Feature(tuple(KINDS), 4, lambda scene, pool, s, t: scene.parcel > 0),
}

DEALT_FEATURES: dict[str, Feature] = {
    "a rank without pages": Feature(
        ("fewer pages than ranks",),
        8,
        lambda scene, pool, s, t: math.ceil(scene.tokens / s.page) < scene.source.shards,
    ),
    "a partial last page": Feature(tuple(DEALINGS), 3, lambda scene, pool, s, t: scene.tokens % t.page > 0),
    "page sizes": Feature(
        tuple(name for name, way in DEALINGS.items() if not way.alike), 3, lambda scene, pool, s, t: s.page != t.page
    ),
    "a prefix": Feature(tuple(DEALINGS), 2, lambda scene, pool, s, t: 0 < scene.prefix < scene.tokens),
    "chunks": Feature(tuple(DEALINGS), 2, lambda scene, pool, s, t: len(scene.chunks) > 1),
    "by parcels": Feature(tuple(DEALINGS), 2, lambda scene, pool, s, t: scene.parcel > 0),
}


def features_of(features: dict[str, Feature], name: str, scene: Scene) -> Iterator[str]:
    """Which features a scene has that was drawn for this kind of state or way of dealing."""
    pool = scene.pools[0]
    lays = scene.source.lays[pool.name], scene.target.lays[pool.name]
    return (feature for feature, each in features.items() if name in each.kinds and each.fits(scene, pool, *lays))
