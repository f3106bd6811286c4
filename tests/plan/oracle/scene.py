"""What one generated case is: a model's state, two instances that lay it out, one request, and how it is pushed.

The formulas here are those of the engines, in plain Python and numpy: nothing of the planner is used.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .space import Array

__all__ = ["Keeping", "Lay", "Part", "Pool", "Scene", "Side", "ceil_to", "floor_to", "moved", "need", "share_of"]

BEYOND = 128
"""Positions behind the last token that have true bytes, too: a page that the request does not fill still has some."""


@dataclass(frozen=True)
class Part:
    """One buffer of the whole model."""

    label: str
    layer: int | None
    shape: tuple[int, ...]
    """Of one row, before anyone shards it."""
    unit: int = 1
    """Positions that one row stands for; the whole item's where it has no rows."""
    heads: tuple[tuple[int, int], ...] = ()
    """Blocks of the first axis of a row that TP ranks share, each a width and the heads that it is dealt out in."""
    swaps: bool = False
    """Whether a side may have the first two axes of an item exchanged."""
    draft: bool = False
    """Whether only decode has it."""
    empty: tuple[bool, bool] = (False, False)
    """Whether prefill and decode list it without items."""
    spare: tuple[int, int] = (0, 0)
    """Further rows at the end of prefill's and of decode's items, which the other side may lack."""


@dataclass(frozen=True)
class Pool:
    """One component of the whole model."""

    name: str
    type: str
    coverage: str
    build: str
    """Which constructor describes it."""
    parts: tuple[Part, ...]
    window: int = 0
    group: int = 1
    keep: int = 0
    dtype: str = "uint8"

    @property
    def draft(self) -> bool:
        return all(part.draft for part in self.parts)

    @property
    def rows(self) -> bool:
        """Whether an item has an axis of positions."""
        return self.build not in ("items", "rings", "aux", "mamba", "packed", "opaque")


@dataclass(frozen=True)
class Lay:
    """How one side keeps one pool."""

    page: int
    """Positions of an item; 0 where there is one item a request."""
    ring: int = 0
    swapped: bool = False
    beside: str = ""
    """How keys and values are in one page: in ``pairs`` for each token, or in ``halves`` of a head's page; or not."""
    deal: str = "all"
    block: int = 1
    whole: int | None = None
    """The rank that holds all positions, beside those that share them."""


@dataclass(frozen=True)
class Side:
    """How one instance lays everything out: stages, times ranks that share positions, times tensor-parallel ranks."""

    tp: int
    shards: int
    cuts: tuple[int, ...]
    """Where its pipeline stages end; the last one is the depth of the model."""
    lays: dict[str, Lay]
    style: str
    padded: bool
    one_region: bool
    axes: bool
    """Whether the ranks name their parallel axes."""
    slot: int

    @property
    def stages(self) -> list[range]:
        return [range(a, b) for a, b in itertools.pairwise((0, *self.cuts))]


@dataclass(frozen=True)
class Scene:
    """Everything but the bytes, which follow from the seed."""

    pools: tuple[Pool, ...]
    source: Side
    target: Side
    tokens: int
    prefix: int
    prefix_known: bool
    chunks: tuple[int, ...] = ()
    """Where pushes end, in twentieths of the prompt."""
    layer_cuts: tuple[int, ...] = ()
    """Where pushes by layers end; empty for pushes of everything."""
    max_blocks: int = 1 << 18
    parcel: int = 0
    """Most bytes of a parcel, if it is moved by parcels."""
    seed: int = 0

    @cached_property
    def truth(self) -> dict[tuple[str, str], Array]:
        """The global tensors: rows first; a request's one item is row 0."""
        rng = np.random.default_rng(self.seed)
        made = {}
        for pool in self.pools:
            itemsize = np.dtype(pool.dtype).itemsize
            for part in pool.parts:
                rows = 1 if pool.coverage == "request" else math.ceil((self.tokens + BEYOND) / part.unit)
                shape = (part.shape[0] + max(part.spare), *part.shape[1:])
                noise = rng.integers(0, 256, (rows, *shape[:-1], shape[-1] * itemsize), np.uint8)
                made[pool.name, part.label] = noise.view(pool.dtype)
        return made

    @property
    def depth(self) -> int:
        """Layers, those of drafts included."""
        return 1 + max((part.layer or 0 for pool in self.pools for part in pool.parts), default=0)


class Keeping:
    """Where one rank keeps the positions of a request: item and row of each, -1 where it does not keep it."""

    def __init__(self, scene: Scene, side: Side, pool: Pool, shard: int, rng: np.random.Generator) -> None:
        self.lay = lay = side.lays[pool.name]
        others = side.shards - (lay.whole is not None)
        self.deal = "all" if shard == lay.whole else lay.deal
        self.size = others if self.deal != "all" else 1
        self.index = (shard - (lay.whole is not None and lay.whole < shard)) if self.deal != "all" else 0
        t = np.arange(scene.tokens + BEYOND)
        self.pages: Array = np.empty(0, np.int64)
        if pool.coverage == "request":
            self.items = side.slot + 2
            self.item, self.row = np.full(1, side.slot), np.zeros(1, np.int64)
            return
        self.row = np.zeros_like(t)
        if lay.ring:
            per_slot = lay.ring // lay.page
            self.items = (side.slot + 2) * per_slot
            self.item = side.slot * per_slot + t % lay.ring // lay.page
            end = ceil_to(scene.tokens, lay.page)
            mine = (t >= end - lay.ring) & (t < end)
        else:
            mine, local = self._held(t, scene.tokens)
            self.items = int(local.max()) // lay.page + 3
            self.pages = rng.permutation(self.items)
            self.item, self.row = self.pages[local // lay.page], local % lay.page
        self.item = np.where(mine, self.item, -1)

    def _held(self, t: Array, tokens: int) -> tuple[Array, Array]:
        """Which positions are in this rank's pages, and where they stand in its own numbering."""
        page, block = self.lay.page, self.lay.block
        if self.deal == "cyclic":
            local = t // (block * self.size) * block + t % block
            mine = t // block % self.size == self.index
            used = np.unique(local[mine & (t < tokens)] // page)
            return mine & np.isin(local // page, used), local
        pages = np.arange(math.ceil(tokens / page))
        if self.deal == "contiguous":
            pages = np.array_split(pages, self.size)[self.index]
        return np.isin(t // page, pages), t

    def ids(self, a: int, b: int) -> list[int]:
        """The items that keep positions ``[a, b)``, in order."""
        found = self.item[a:b]
        return list(dict.fromkeys(found[found >= 0].tolist()))

    def start(self, item: int) -> int:
        """The first position of an item."""
        return int(np.flatnonzero(self.item == item)[0])

    @property
    def table(self) -> Array:
        """Token slots of the rank's own positions, as engines keep them."""
        page = self.lay.page
        made: Array = (self.pages[:, None] * page + np.arange(page)).ravel()
        return made


def share_of(part: Part, rank: int, width: int) -> Array:
    """Which elements of the first axis of a row a TP rank holds.

    Each block's heads are divided among the ranks; where there are more ranks than heads, neighbours share one.
    """
    if not part.heads:
        return np.arange(part.shape[0])
    found, before = [], 0
    for elements, heads in part.heads:
        if width <= heads:
            assert heads % width == 0
            first, last = rank * (heads // width), (rank + 1) * (heads // width)
        else:
            assert width % heads == 0
            first = rank // (width // heads)
            last = first + 1
        each = elements // heads
        found.append(np.arange(before + first * each, before + last * each))
        before += elements
    return np.concatenate(found)


def need(pool: Pool, tokens: int, prefix: int) -> tuple[int, int]:
    """Positions that must arrive."""
    n, p, w, q, k = tokens, prefix, pool.window, pool.group, pool.keep
    # A token of chunked local attention sees those before it that have its chunk; decode computes the one at n.
    beginning = next(t for t in range(n + 1) if t // q == n // q)
    spans = {
        "suffix": (p, n),
        "whole": (0, n),
        "window": (max(p, n - w), n),
        "recent": (max(0, n - w), n),
        "tail": (max(0, n - n % q - k), n),
        "open": (max(p, beginning), n),
        "complete": (p, n - n % q),
        "request": (0, 1),
    }
    a, b = spans[pool.coverage]
    return min(a, b), b


def moved(scene: Scene, pool: Pool, kept: Keeping) -> tuple[int, int]:
    """What must arrive at a decode rank, and the rest of its edge items where both sides keep it."""
    a, b = need(pool, scene.tokens, scene.prefix)
    lays = scene.source.lays[pool.name], kept.lay
    if a >= b or pool.coverage == "request":
        return a, b
    # Where a rank of prefill holds all positions, it writes all of them.
    deals = "all" if lays[0].whole is not None else lays[0].deal, kept.deal
    if "cyclic" in deals:
        blocks = (lay.block for lay, deal in zip(lays, deals, strict=True) if deal == "cyclic")
        together = math.gcd(*(lay.page for lay in lays), *blocks)
        return floor_to(a, together), ceil_to(b, together)
    return max(floor_to(a, lay.page) for lay in lays), min(ceil_to(b, lay.page) for lay in lays)


def floor_to(value: int, unit: int) -> int:
    return value // unit * unit


def ceil_to(value: int, unit: int) -> int:
    return math.ceil(value / unit) * unit
