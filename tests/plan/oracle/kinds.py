"""Every kind of state that engines have, by a maker that draws one component of a model and how both sides keep it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .scene import Lay, Part, Pool

if TYPE_CHECKING:
    from random import Random

__all__ = ["KINDS", "PAGES", "Frame", "Made"]

PAGES = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Frame:
    """What all pools of a scene have in common, and the draws of their makers."""

    rng: Random
    topology: str
    depth: int
    widths: tuple[int, int]
    page: tuple[int, int]
    dtype: str

    def layers(self) -> list[int]:
        return sorted(self.rng.sample(range(self.depth), self.rng.randint(1, min(3, self.depth))))

    def heads(self) -> int:
        """A number that every rank has a share of, or shares with its neighbours."""
        shared = [n for n in range(1, 13) if all(n % width == 0 or width % n == 0 for width in self.widths)]
        few = [n for n in shared if n < max(self.widths)]
        return self.rng.choice(few if self.topology == "replicated heads" else shared)

    def lays(self, choices: tuple[int, ...] = PAGES, *, swaps: bool = False) -> tuple[Lay, Lay]:
        """Pages of both sides: often the engine's own, as its other pools have them."""
        own = choices is not PAGES or self.rng.random() < 0.3
        target = self.rng.choice(choices) if own else self.page[1]
        source = self.rng.choice(choices) if own else self.page[0]
        if self.topology == "page sizes" and source == target:
            source = self.rng.choice([page for page in choices if page != target])
        swapped = [swaps and self.rng.random() < 0.5 for _ in range(2)]
        if self.topology == "page orders" and swaps:
            swapped[0] = not swapped[1]
        return Lay(source, swapped=swapped[0]), Lay(target, swapped=swapped[1])

    def parts(self, layers: list[int], *labels: str, unit: int = 1) -> tuple[Part, ...]:
        """Rows without heads, of one width for each label."""
        widths = {label: (self.rng.randint(1, 4),) for label in labels}
        return tuple(Part(f"layers.{n}.{label}", n, widths[label], unit) for n in layers for label in labels)

    def heads_parts(self, layers: list[int]) -> tuple[Part, ...]:
        """Keys and values by head; those of a draft lie behind the model's layers."""
        heads = self.heads()
        dims = self.rng.randint(1, 3), self.rng.randint(1, 3)
        return tuple(
            Part(f"layers.{n}.{label}", n, (heads, dim), heads=((heads, heads),), swaps=True, draft=n >= self.depth)
            for n in layers
            for label, dim in zip("kv", dims, strict=True)
        )

    def empty(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Layers that share the index of another on a side are listed there without items; never all of them."""
        layers = sorted({part.layer or 0 for part in parts})
        shared = [self.rng.sample(layers, self.rng.randint(0, len(layers) - 1)) for _ in range(2)]
        return tuple(replace(part, empty=(part.layer in shared[0], part.layer in shared[1])) for part in parts)


Made = tuple[Pool, Lay, Lay]
Maker = Callable[[Frame, str], Made]


def _keys(type_: str, coverage: str, build: str) -> Maker:
    def make(frame: Frame, name: str) -> Made:
        layers = frame.layers()
        if name == "kv" and (frame.topology == "draft layers on decode" or frame.rng.random() < 0.15):
            layers += range(frame.depth, frame.depth + frame.rng.randint(1, 2))
        window = frame.rng.randint(1, 24) if build == "window" else 0
        group = frame.rng.randint(2, 24) if build == "chunked" else 1
        parts = frame.heads_parts(layers)
        pool = Pool(name, type_, coverage, build, parts, window=window, group=group, dtype=frame.dtype)
        return pool, *frame.lays(swaps=True)

    return make


def _rows(type_: str, coverage: str, build: str, label: str, *, shared: bool = False) -> Maker:
    def make(frame: Frame, name: str) -> Made:
        parts = frame.parts(frame.layers(), label)
        parts = frame.empty(parts) if shared else parts
        return Pool(name, type_, coverage, build, parts, dtype=frame.dtype), *frame.lays()

    return make


def _planar(frame: Frame, name: str) -> Made:
    parts = frame.parts(frame.layers(), "key", "scale", "rope")
    return Pool(name, "kv", "suffix", "planar", parts), *frame.lays()


def _rings(frame: Frame, least: int) -> tuple[Lay, Lay]:
    source, target = (Lay(1, ring=least + frame.rng.randint(0, 9)) for _ in range(2))
    return source, target


def _swa_ring(frame: Frame, name: str) -> Made:
    window = frame.rng.randint(1, 16)
    parts = frame.parts(frame.layers(), "kv")
    pool = Pool(name, "swa_ring", "recent", "rings", parts, window=window, dtype=frame.dtype)
    return pool, *_rings(frame, window)


def _swa_ring_of_heads(frame: Frame, name: str) -> Made:
    window = frame.rng.randint(1, 16)
    parts = tuple(replace(part, swaps=False) for part in frame.heads_parts(frame.layers()))
    pool = Pool(name, "swa_ring", "recent", "rings", parts, window=window, dtype=frame.dtype)
    return pool, *_rings(frame, window)


def _dsa_tail(frame: Frame, name: str) -> Made:
    group = frame.rng.randint(2, 6)
    parts = frame.empty(frame.parts(frame.layers(), "key", "score"))
    pool = Pool(name, "dsa_tail", "tail", "rings", parts, group=group, dtype=frame.dtype)
    return pool, *_rings(frame, group)


def _c4_state(frame: Frame, name: str) -> Made:
    group = frame.rng.choice([2, 4])
    parts = frame.parts(frame.layers(), "attention", "indexer")
    pool = Pool(name, "dsv4_c4_state", "tail", "rings", parts, group=group, keep=group)
    return pool, *_rings(frame, 2 * group)


def _c128_state(frame: Frame, name: str) -> Made:
    group = frame.rng.randint(2, 8)
    parts = frame.parts(frame.layers(), "rest", unit=group)
    source, target = (Lay(group, ring=group * frame.rng.randint(1, 3)) for _ in range(2))
    return Pool(name, "c128_state", "tail", "items", parts, group=group), source, target


def _dsv4(frame: Frame, name: str) -> Made:
    big = frame.rng.choice([8, 16])
    parts: list[Part] = []
    for layer in frame.layers():
        few = frame.rng.random() < 0.5
        parts += frame.parts([layer], *(("kv", "index") if few else ("kv",)), unit=4 if few else big)
    return Pool(name, "dsv4", "suffix", "compressed", tuple(parts)), *frame.lays((big, 2 * big, 3 * big))


def _dsv4_c128(frame: Frame, name: str) -> Made:
    group = frame.rng.randint(2, 4)
    parts = frame.parts(frame.layers(), "kv", unit=group)
    pool = Pool(name, "dsv4_c128", "complete", "compressed", parts, group=group)
    return pool, *frame.lays((group, 2 * group, 3 * group))


def _qsa_compressed(frame: Frame, name: str) -> Made:
    ratio = frame.rng.choice([2, 3])
    parts = frame.parts(frame.layers(), "index_k", unit=ratio)
    pool = Pool(name, "qsa_compressed", "whole", "compressed", parts, dtype=frame.dtype)
    return pool, *frame.lays((ratio, 2 * ratio, 4 * ratio))


def _request(type_: str, *labels: str, layered: bool = False, build: str = "items") -> Maker:
    def make(frame: Frame, name: str) -> Made:
        parts = tuple(Part(label, None, (frame.rng.randint(1, 5), 2)) for label in labels)
        if layered:
            parts = (*frame.parts(frame.layers(), "pending"), *parts)
        return Pool(name, type_, "request", build, parts, dtype=frame.dtype), Lay(0), Lay(0)

    return make


def _scales(type_: str, coverage: str) -> Maker:
    def make(frame: Frame, name: str) -> Made:
        page = frame.rng.choice(PAGES)
        window = frame.rng.randint(1, 24) if coverage == "window" else 0
        parts = frame.parts(frame.layers(), "k_scale", "v_scale", unit=page)
        return Pool(name, type_, coverage, "items", parts, window=window), Lay(page), Lay(page)

    return make


def _spare(type_: str, coverage: str) -> Maker:
    """Items with more rows on one side, as where only decode speculates."""

    def make(frame: Frame, name: str) -> Made:
        page = frame.rng.choice(PAGES) if coverage == "window" else 0
        window = frame.rng.randint(1, 24) if coverage == "window" else 0
        spare = frame.rng.choice([0, 0, 1, 2, 5]), frame.rng.choice([0, 0, 1, 2, 5])
        shape = frame.rng.randint(1, 5), frame.rng.randint(1, 4)
        parts = tuple(Part(f"layers.{n}.state", n, shape, max(page, 1), spare=spare) for n in frame.layers())
        return Pool(name, type_, coverage, "items", parts, window=window, dtype=frame.dtype), Lay(page), Lay(page)

    return make


def _mamba(frame: Frame, name: str) -> Made:
    """Convolutions in blocks that are each divided on their own, and recurrent states by head."""
    rng, both = frame.rng, math.lcm(*frame.widths)
    key, few = both * rng.randint(1, 2), frame.heads()
    # Key heads that several ranks share, beside value channels that are divided.
    replicated = ((2 * few, few), (2 * few, few), (2 * both, both))
    divided = rng.choice([(key, key, 2 * key), (key, key, key), (key, 3 * both), (both,)])
    shared = frame.topology == "replicated heads" or rng.random() < 0.35
    groups = replicated if shared else tuple((n, n) for n in divided)
    kernel, heads = rng.randint(1, 3), frame.heads()
    width = sum(width for width, _ in groups)
    parts = []
    for n in frame.layers():
        parts.append(Part(f"layers.{n}.conv", n, (width, kernel), heads=groups, swaps=True))
        parts.append(Part(f"layers.{n}.ssm", n, (heads, 2, 3), heads=((heads, heads),)))
    pool = Pool(name, "mamba", "request", "mamba", tuple(parts), dtype=frame.dtype)
    return pool, Lay(0, swapped=rng.random() < 0.5), Lay(0, swapped=rng.random() < 0.5)


def _packed(frame: Frame, name: str) -> Made:
    """The same in raw pages: one state after the other, and then padding."""
    pool, source, target = _mamba(frame, name)
    return replace(pool, build="packed"), source, target


def _fused(frame: Frame, name: str) -> Made:
    """Key and value of a token and head side by side, of full attention or of windows."""
    heads, width = frame.heads(), frame.rng.randint(2, 6)
    window = frame.rng.choice([0, frame.rng.randint(1, 24)])
    parts = tuple(
        Part(f"layers.{n}.kv", n, (heads, width), heads=((heads, heads),), swaps=True) for n in frame.layers()
    )
    covered = ("swa", "window") if window else ("kv", "suffix")
    return Pool(name, *covered, "fused", parts, window=window, dtype=frame.dtype), *frame.lays(swaps=True)


def _in_chunks(make: Maker) -> Maker:
    """Pages of another maker, where tokens attend to those of their own chunk."""

    def made(frame: Frame, name: str) -> Made:
        pool, source, target = make(frame, name)
        group = frame.rng.randint(2, 24)
        return replace(pool, type="chunked_local", coverage="open", window=0, group=group), source, target

    return made


def _in_turns(frame: Frame, name: str) -> Made:
    """Keys and values that one side at least has in one page, and the other perhaps in arrays of their own."""
    window = frame.rng.choice([0, frame.rng.randint(1, 24)])
    covered = ("swa", "window") if window else ("kv", "suffix")
    pool = Pool(name, *covered, "beside", frame.heads_parts(frame.layers()), window=window, dtype=frame.dtype)
    ways = frame.rng.choice(
        [("pairs", ""), ("", "pairs"), ("halves", ""), ("", "halves"), ("pairs", "halves"), ("pairs",) * 2]
    )
    source, target = (
        replace(lay, beside=way, swapped=lay.swapped or way == "halves")
        for lay, way in zip(frame.lays(swaps=True), ways, strict=True)
    )
    return pool, source, target


def _opaque(frame: Frame, name: str) -> Made:
    """The same where only the page of a head is known: it is one item on both sides."""
    heads, page = frame.heads(), frame.rng.choice(PAGES)
    shape = heads, page * frame.rng.randint(2, 6)
    window = frame.rng.choice([0, frame.rng.randint(1, 24)])
    parts = tuple(Part(f"layers.{n}.kv", n, shape, page, heads=((heads, heads),)) for n in frame.layers())
    covered = ("swa", "window") if window else ("kv", "suffix")
    return Pool(name, *covered, "opaque", parts, window=window, dtype=frame.dtype), Lay(page), Lay(page)


def _draft(frame: Frame, name: str) -> Made:
    """Only decode has it: keys and values, or a ring, of a draft model."""
    pool, source, target = frame.rng.choice([_keys("kv", "suffix", "kv"), _swa_ring])(frame, name)
    return replace(pool, parts=tuple(replace(part, draft=True) for part in pool.parts)), source, target


KINDS: dict[str, Maker] = {
    "kv": _keys("kv", "suffix", "kv"),
    "kv of latents": _rows("kv", "suffix", "mla", "latent"),
    "kv in planar pages": _planar,
    "swa": _keys("swa", "window", "window"),
    "swa with spare rows": _spare("swa", "window"),
    "chunked_local": _keys("chunked_local", "open", "chunked"),
    "chunked_local side by side": _in_chunks(_fused),
    "chunked_local side by side, opaque": _in_chunks(_opaque),
    "chunked_local in turns": _in_chunks(_in_turns),
    "dsa": _rows("dsa", "suffix", "index", "index_k", shared=True),
    "mamba": _mamba,
    "mamba in raw pages": _packed,
    "kv side by side": _fused,
    "kv side by side, opaque": _opaque,
    "kv in turns": _in_turns,
    "swa_ring": _swa_ring,
    "swa_ring with heads": _swa_ring_of_heads,
    "dsa_tail": _dsa_tail,
    "dsv4": _dsv4,
    "dsv4_c128": _dsv4_c128,
    "dsv4_c4_state": _c4_state,
    "c128_state": _c128_state,
    "request_row": _request("request_row", "valid_from"),
    "hidden": _request("hidden", "hidden"),
    "encoder": _request("encoder", "output", "mask"),
    "qsa_pending": _request("qsa_pending", "rope", layered=True),
    "qsa_pending with spare rows": _spare("qsa_pending", "request"),
    "qsa_compressed": _qsa_compressed,
    "block_scale": _scales("block_scale", "whole"),
    "block_scale with heads": _keys("block_scale", "whole", "kv"),
    "block_scale_swa": _scales("block_scale_swa", "window"),
    "minimax_index_k": _rows("minimax_index_k", "suffix", "index", "index_k"),
    "minimax_dense_kv": _keys("minimax_dense_kv", "whole", "kv"),
    "aux": _request("aux", "tokens", "logprobs", build="aux"),
    "draft on decode only": _draft,
}
"""Every kind of state, by what is generated of it."""
