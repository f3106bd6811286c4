"""Generates scenes: one maker for each type of state, and one for each way of dealing positions out over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import strategies as st

from .pools import Half, Lay, Part, Pool, Scene

__all__ = ["DEALT", "TYPES", "dealt_scenes", "scenes"]

Draw = st.DrawFn
Made = tuple[Pool, Lay, Lay]
Layers = tuple[int, ...]
Maker = Callable[[Draw, str, Layers], Made]
PAGES = (1, 2, 3, 4, 6, 8)
WIDTHS = ((1, 1), (1, 2), (2, 1), (4, 2), (2, 4), (1, 4))
HEADS = (1, 2, 4, 8)


def _parts(draw: Draw, layers: Layers, labels: tuple[str, ...], *, unit: int = 1) -> tuple[Part, ...]:
    widths = {label: (draw(st.integers(1, 4)),) for label in labels}
    return tuple(Part(f"layers.{n}.{label}", n, widths[label], unit) for n in layers for label in labels)


def _pages(draw: Draw, choices: tuple[int, ...] = PAGES, order: bool = False) -> tuple[Lay, Lay]:
    orders = st.sampled_from(("nhd", "hnd") if order else ("nhd",))
    source, target = (Lay(draw(st.sampled_from(choices)), order=draw(orders)) for _ in range(2))
    return source, target


def _heads(draw: Draw, layers: Layers) -> tuple[Part, ...]:
    heads = draw(st.sampled_from(HEADS))
    dims = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    return tuple(
        Part(f"layers.{n}.{label}", n, (heads, dim), sharded=True)
        for n in layers
        for label, dim in zip("kv", dims, strict=True)
    )


def _kv(type_: str, coverage: str, build: str) -> Maker:
    def make(draw: Draw, name: str, layers: Layers) -> Made:
        window = draw(st.integers(1, 24)) if build == "window" else 0
        parts = _heads(draw, layers)
        return Pool(name, type_, coverage, build, parts, window=window), *_pages(draw, order=True)

    return make


def _rows(type_: str, coverage: str, build: str, label: str) -> Maker:
    def make(draw: Draw, name: str, layers: Layers) -> Made:
        return Pool(name, type_, coverage, build, _parts(draw, layers, (label,))), *_pages(draw)

    return make


def _rings(draw: Draw, least: int) -> tuple[Lay, Lay]:
    source, target = (Lay(1, ring=least + draw(st.integers(0, 9))) for _ in range(2))
    return source, target


def _swa_ring(draw: Draw, name: str, layers: Layers) -> Made:
    window = draw(st.integers(1, 16))
    pool = Pool(name, "swa_ring", "recent", "rings", _parts(draw, layers, ("kv",)), window=window)
    return pool, *_rings(draw, window)


def _swa_ring_of_heads(draw: Draw, name: str, layers: Layers) -> Made:
    window = draw(st.integers(1, 16))
    return Pool(name, "swa_ring", "recent", "rings", _heads(draw, layers), window=window), *_rings(draw, window)


def _dsa_tail(draw: Draw, name: str, layers: Layers) -> Made:
    group = draw(st.integers(2, 6))
    parts = _parts(draw, layers, ("key", "score"))
    if len(layers) > 1:
        shared = layers[0]
        empty = draw(st.sampled_from([(False, False), (True, False), (False, True), (True, True)]))
        parts = tuple(
            Part(part.label, part.layer, part.shape, empty=empty if part.layer == shared else (False, False))
            for part in parts
        )
    return Pool(name, "dsa_tail", "tail", "rings", parts, group=group), *_rings(draw, group)


def _c4_state(draw: Draw, name: str, layers: Layers) -> Made:
    group = draw(st.sampled_from([2, 4]))
    parts = _parts(draw, layers, ("attention", "indexer"))
    return Pool(name, "dsv4_c4_state", "tail", "rings", parts, group=group, keep=group), *_rings(draw, 2 * group)


def _c128_state(draw: Draw, name: str, layers: Layers) -> Made:
    group = draw(st.integers(2, 8))
    pool = Pool(name, "c128_state", "tail", "items", _parts(draw, layers, ("rest",), unit=group), group=group)
    source, target = (Lay(group, ring=group * draw(st.integers(1, 3))) for _ in range(2))
    return pool, source, target


def _dsv4(draw: Draw, name: str, layers: Layers) -> Made:
    big = draw(st.sampled_from([8, 16]))
    parts: list[Part] = []
    for layer in layers:
        four = draw(st.booleans())
        parts += _parts(draw, (layer,), ("kv", "index") if four else ("kv",), unit=4 if four else big)
    return Pool(name, "dsv4", "suffix", "compressed", tuple(parts)), *_pages(draw, (big, 2 * big, 3 * big))


def _dsv4_c128(draw: Draw, name: str, layers: Layers) -> Made:
    group = draw(st.integers(2, 4))
    pool = Pool(name, "dsv4_c128", "complete", "compressed", _parts(draw, layers, ("kv",), unit=group), group=group)
    return pool, *_pages(draw, (group, 2 * group, 3 * group))


def _qsa_compressed(draw: Draw, name: str, layers: Layers) -> Made:
    ratio = draw(st.sampled_from([2, 3]))
    pool = Pool(name, "qsa_compressed", "whole", "compressed", _parts(draw, layers, ("index_k",), unit=ratio))
    return pool, *_pages(draw, (ratio, 2 * ratio, 4 * ratio))


def _request(type_: str, labels: tuple[str, ...], *, layered: bool = False) -> Maker:
    def make(draw: Draw, name: str, layers: Layers) -> Made:
        parts = tuple(Part(label, None, (draw(st.integers(1, 5)), 2)) for label in labels)
        if layered:
            parts = (*_parts(draw, layers, ("pending",)), *parts)
        return Pool(name, type_, "request", "items", parts), Lay(0), Lay(0)

    return make


def _scales(type_: str, coverage: str) -> Maker:
    def make(draw: Draw, name: str, layers: Layers) -> Made:
        page = draw(st.sampled_from(PAGES))
        window = draw(st.integers(1, 24)) if coverage == "window" else 0
        parts = _parts(draw, layers, ("k_scale", "v_scale"), unit=page)
        return Pool(name, type_, coverage, "items", parts, window=window), Lay(page), Lay(page)

    return make


def _draft(draw: Draw, name: str, layers: Layers) -> Made:
    """Only decode has it: keys and values, or a ring, of a draft model."""
    made = draw(st.sampled_from([_kv("kv", "suffix", "kv"), _swa_ring]))(draw, name, layers)
    parts = tuple(Part(part.label, part.layer, part.shape, sharded=part.sharded) for part in made[0].parts)
    pool = made[0]
    return (
        Pool(name, pool.type, pool.coverage, pool.build, parts, window=pool.window, decode_only=True),
        made[1],
        made[2],
    )


def _planar(draw: Draw, name: str, layers: Layers) -> Made:
    return Pool(name, "kv", "suffix", "planar", _parts(draw, layers, ("key", "scale", "rope"))), *_pages(draw)


TYPES: dict[str, Maker] = {
    "kv": _kv("kv", "suffix", "kv"),
    "kv of latents": _rows("kv", "suffix", "mla", "latent"),
    "kv in planar pages": _planar,
    "swa": _kv("swa", "window", "window"),
    "dsa": _rows("dsa", "suffix", "index", "index_k"),
    "swa_ring": _swa_ring,
    "swa_ring with heads": _swa_ring_of_heads,
    "dsa_tail": _dsa_tail,
    "dsv4": _dsv4,
    "dsv4_c128": _dsv4_c128,
    "dsv4_c4_state": _c4_state,
    "c128_state": _c128_state,
    "request_row": _request("request_row", ("valid_from",)),
    "hidden": _request("hidden", ("hidden",)),
    "encoder": _request("encoder", ("output", "mask")),
    "qsa_pending": _request("qsa_pending", ("rope",), layered=True),
    "qsa_compressed": _qsa_compressed,
    "block_scale": _scales("block_scale", "whole"),
    "block_scale with heads": _kv("block_scale", "whole", "kv"),
    "block_scale_swa": _scales("block_scale_swa", "window"),
    "minimax_index_k": _rows("minimax_index_k", "suffix", "index", "index_k"),
    "minimax_dense_kv": _kv("minimax_dense_kv", "whole", "kv"),
    "aux": _request("aux", ("tokens", "logprobs")),
    "draft on decode only": _draft,
}
"""Every type of state, by what is generated of it."""

DEALT = (
    "context-parallel prefill",
    "fewer pages than ranks",
    "decode context parallelism",
    "decode context parallelism with a draft",
    "context parallelism on both sides",
    "prefill deals pages",
    "both deal pages",
    "both deal in different ways",
    "decode holds ranges",
    "both hold ranges",
)
"""Ways in which ranks share the positions of a request."""


@st.composite
def scenes(draw: Draw, kind: str) -> Scene:
    """A scene with one type of state, and one or two others beside it."""
    names = {kind: TYPES[kind]}
    for other in draw(st.lists(st.sampled_from(sorted(TYPES)), max_size=2)):
        names[other] = TYPES[other]
    made = [make for make in names.items() if make[0] != "draft on decode only" or kind == "draft on decode only"]
    if kind == "draft on decode only":
        made.append(("its target", TYPES["kv"]))
    depth = draw(st.integers(1, 6))
    some = st.sets(st.integers(0, depth - 1), min_size=1, max_size=3).map(lambda each: tuple(sorted(each)))
    pools = [make(draw, name, draw(some)) for name, make in made]
    widths = draw(st.sampled_from(WIDTHS))
    shards = draw(st.sampled_from([1, 1, 1, 2])), 1
    return _scene(
        draw, pools, depth, widths, shards, st.one_of(st.integers(1, 60), st.integers(20, 60)), draw(st.booleans())
    )


@st.composite
def dealt_scenes(draw: Draw, topology: str) -> Scene:
    """A scene whose positions are dealt out over ranks, with state beside it that is not."""
    depth = draw(st.integers(1, 3))
    layers = tuple(range(depth))
    few = topology == "fewer pages than ranks"
    shards = _SHARDS[topology](draw)
    builds = ["kv", "kv of latents", "dsa", "minimax_index_k", "minimax_dense_kv"]
    build = draw(st.sampled_from([*builds, "block_scale"] if topology in _BY_PAGES else builds))
    pool, source, target = TYPES[build](draw, "dealt", layers)
    pages = draw(st.sampled_from(PAGES)), draw(st.sampled_from(PAGES))
    if build == "block_scale":
        pages = source.page, source.page
    if topology == "both deal pages":
        pages = pages[0], pages[0]
    deals: tuple[tuple[str, int], tuple[str, int]] = {
        "context-parallel prefill": (("contiguous", 1), ("all", 1)),
        "fewer pages than ranks": (("contiguous", 1), ("all", 1)),
        "decode context parallelism": (("all", 1), ("cyclic", 1)),
        "decode context parallelism with a draft": (("all", 1), ("cyclic", 1)),
        "context parallelism on both sides": (("contiguous", 1), ("cyclic", 1)),
        "prefill deals pages": (("cyclic", pages[0]), ("all", 1)),
        "both deal pages": (("cyclic", pages[0]), ("cyclic", pages[1])),
        "both deal in different ways": (("cyclic", pages[0]), ("cyclic", 1)),
        "decode holds ranges": (("all", 1), ("contiguous", 1)),
        "both hold ranges": (("contiguous", 1), ("contiguous", 1)),
    }[topology]
    source, target = (
        Lay(page, order=lay.order, deal=deal, block=block)
        for page, lay, (deal, block) in zip(pages, (source, target), deals, strict=True)
    )
    pools: list[Made] = [(pool, source, target)]
    if topology.endswith("draft"):
        draft = TYPES["kv of latents"](draw, "draft", layers)[0]
        pools.append((draft, Lay(pages[0]), Lay(pages[1] * shards[1])))
    pools.append(
        TYPES[draw(st.sampled_from(["aux", "hidden", "swa_ring", "swa_ring with heads", "dsa_tail"]))](
            draw, "beside", layers
        )
    )
    widths = draw(st.sampled_from(WIDTHS[:5]))
    tokens = st.integers(1, pages[0] * (shards[0] - 1)) if few else st.integers(1, 60)
    return _scene(draw, pools, depth, widths, shards, tokens, False)


_BY_PAGES = (
    "context-parallel prefill",
    "fewer pages than ranks",
    "prefill deals pages",
    "both deal pages",
    "decode holds ranges",
    "both hold ranges",
)
"""Where no page is cut, so that items without rows can be dealt out too."""
_TWO = st.integers(2, 4)
_SHARDS: dict[str, Callable[[Draw], tuple[int, int]]] = {
    "context-parallel prefill": lambda draw: (draw(_TWO), 1),
    "fewer pages than ranks": lambda draw: (draw(st.integers(2, 5)), 1),
    "decode context parallelism": lambda draw: (1, draw(_TWO)),
    "decode context parallelism with a draft": lambda draw: (1, draw(_TWO)),
    "context parallelism on both sides": lambda draw: (draw(_TWO), draw(_TWO)),
    "prefill deals pages": lambda draw: (draw(_TWO), 1),
    "both deal pages": lambda draw: (draw(_TWO),) * 2,
    "both deal in different ways": lambda draw: (draw(_TWO), draw(_TWO)),
    "decode holds ranges": lambda draw: (1, draw(_TWO)),
    "both hold ranges": lambda draw: (draw(_TWO), draw(_TWO)),
}


def _scene(
    draw: Draw,
    pools: list[Made],
    depth: int,
    widths: tuple[int, int],
    shards: tuple[int, int],
    lengths: st.SearchStrategy[int],
    staged: bool,
) -> Scene:
    tokens = max(1, draw(lengths))
    halves = []
    for number, (width, count) in enumerate(zip(widths, shards, strict=True)):
        stages = draw(st.integers(1, min(depth, 3))) if staged and width <= 2 else 1
        inner = draw(st.sets(st.integers(1, depth - 1), min_size=stages - 1, max_size=stages - 1)) if stages > 1 else ()
        halves.append(
            Half(
                tp=width,
                shards=count,
                cuts=(*sorted(inner), depth),
                lays={pool.name: lays[number] for pool, *lays in pools},
                style=draw(st.sampled_from(["separate", "stacked", "envelope"])),
                padded=draw(st.booleans()),
                one_region=draw(st.booleans()),
                slot=draw(st.integers(0, 5)),
            )
        )
    steps = [
        lay.page * (shards[1] if lay.deal == "cyclic" and lay.block % lay.page else 1)
        for pool, _, lay in pools
        if pool.coverage == "suffix"
    ]
    step = math.lcm(*steps)
    most = math.ceil(tokens / step)
    prefix = min(draw(st.sampled_from([0, 0, 0, 1, most // 2, most - 1, most])) * step, tokens)
    return Scene(
        pools=tuple(made[0] for made in pools),
        source=halves[0],
        target=halves[1],
        tokens=tokens,
        prefix=prefix,
        prefix_known=draw(st.booleans()),
        chunks=tuple(draw(st.lists(st.sampled_from([0.1, 0.25, 0.5, 0.8, 1.0]), max_size=3))),
        max_blocks=draw(st.sampled_from([1 << 18, 64, 7, 1])),
        seed=draw(st.integers(0, 1 << 32)),
    )
