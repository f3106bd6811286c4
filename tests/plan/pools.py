"""State of any type, as an engine keeps it: which positions must arrive, where a rank keeps each, and the true bytes.

The formulas here are those of the engines, written down once more in plain numpy: nothing of the planner is used.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from .case import ceil_to, floor_to

if TYPE_CHECKING:
    from .space import Array

__all__ = ["Half", "Keeping", "Lay", "Part", "Pool", "Scene", "held", "moved", "need"]


@dataclass(frozen=True)
class Part:
    """One buffer of the whole model."""

    label: str
    layer: int | None
    shape: tuple[int, ...]
    """Of one row, before anyone shards it."""
    unit: int = 1
    """Positions that one row stands for; the whole item's where it has no rows."""
    sharded: bool = False
    """Whether the first axis of a row is heads, dealt out over tensor-parallel ranks."""
    empty: tuple[bool, bool] = (False, False)
    """Whether prefill and decode list it without items."""


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
    decode_only: bool = False
    dtype: str = "uint8"


@dataclass(frozen=True)
class Lay:
    """How one side keeps one pool."""

    page: int
    """Positions of an item; 0 where there is one item a request."""
    ring: int = 0
    order: str = "nhd"
    deal: str = "all"
    block: int = 1


@dataclass(frozen=True)
class Half:
    """How one instance lays everything out: stages, times ranks that share positions, times tensor-parallel ranks."""

    tp: int
    shards: int
    cuts: tuple[int, ...]
    lays: dict[str, Lay]
    style: str
    padded: bool
    one_region: bool
    slot: int

    @property
    def stages(self) -> list[range]:
        return [range(a, b) for a, b in itertools.pairwise((0, *self.cuts))]


@dataclass(frozen=True)
class Scene:
    """Everything but the bytes, which follow from the seed."""

    pools: tuple[Pool, ...]
    source: Half
    target: Half
    tokens: int
    prefix: int
    prefix_known: bool
    chunks: tuple[float, ...]
    """Where pushes end, as parts of the whole."""
    max_blocks: int
    seed: int

    @cached_property
    def truth(self) -> dict[tuple[str, str], Array]:
        """The global tensors: rows first; a request's one item is row 0."""
        rng = np.random.default_rng(self.seed)
        made = {}
        for pool in self.pools:
            item = np.dtype(pool.dtype).itemsize
            for part in pool.parts:
                rows = 1 if pool.coverage == "request" else math.ceil((self.tokens + 128) / part.unit)
                noise = rng.integers(0, 256, (rows, *part.shape[:-1], part.shape[-1] * item), np.uint8)
                made[pool.name, part.label] = noise.view(pool.dtype)
        return made


class Keeping:
    """Where one rank keeps the positions of a request: item and row of each, -1 where it does not keep it."""

    def __init__(self, scene: Scene, half: Half, pool: Pool, shard: int, rng: np.random.Generator) -> None:
        lay = half.lays[pool.name]
        t = np.arange(scene.tokens + 128)
        self.lay, self.size = lay, half.shards if lay.deal != "all" else 1
        self.pages: Array = np.empty(0, np.int64)
        if pool.coverage == "request":
            self.items = half.slot + 2
            self.item, self.row = np.full(1, half.slot), np.zeros(1, np.int64)
            return
        self.row = np.zeros_like(t)
        if lay.ring:
            per_slot = lay.ring // lay.page
            self.items = (half.slot + 2) * per_slot
            self.item = half.slot * per_slot + t % lay.ring // lay.page
            end = ceil_to(scene.tokens, lay.page)
            mine = (t >= end - lay.ring) & (t < end)
        else:
            mine, local = held(lay, t, scene.tokens, self.size, shard)
            self.items = int(local.max()) // lay.page + 3
            self.pages = rng.permutation(self.items)
            self.item, self.row = self.pages[local // lay.page], local % lay.page
        self.item = np.where(mine, self.item, -1)

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


def held(lay: Lay, t: Array, tokens: int, size: int, index: int) -> tuple[Array, Array]:
    """Which positions are in this rank's pages, and where they stand in its own numbering."""
    if lay.deal == "cyclic":
        local = t // (lay.block * size) * lay.block + t % lay.block
        mine = t // lay.block % size == index
        full = {int(n) for n in local[mine & (t < tokens)] // lay.page}
        return mine & np.isin(local // lay.page, list(full)), local
    pages = np.arange(math.ceil(tokens / lay.page))
    if lay.deal == "contiguous":
        pages = np.array_split(pages, size)[index]
    return np.isin(t // lay.page, pages), t


def need(pool: Pool, tokens: int, prefix: int) -> tuple[int, int]:
    """Positions that must arrive."""
    n, p, w, q, k = tokens, prefix, pool.window, pool.group, pool.keep
    spans = {
        "suffix": (p, n),
        "whole": (0, n),
        "window": (max(p, n - w), n),
        "recent": (max(0, n - w), n),
        "tail": (max(0, n - n % q - k), n),
        "complete": (p, n - n % q),
        "request": (0, 1),
    }
    a, b = spans[pool.coverage]
    return min(a, b), b


def moved(scene: Scene, pool: Pool) -> tuple[int, int]:
    """What must arrive, and the rest of its edge items where both sides keep it."""
    a, b = need(pool, scene.tokens, scene.prefix)
    lays = [half.lays[pool.name] for half in (scene.source, scene.target)]
    if a >= b or pool.coverage == "request":
        return a, b
    if "cyclic" in (lays[0].deal, lays[1].deal):
        together = math.gcd(*(lay.page for lay in lays), *(lay.block for lay in lays if lay.deal == "cyclic"))
        return floor_to(a, together), ceil_to(b, together)
    return max(floor_to(a, lay.page) for lay in lays), min(ceil_to(b, lay.page) for lay in lays)
