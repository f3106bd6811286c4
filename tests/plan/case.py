"""What one generated case is: a model, two instances of it, one request, and how it is pushed."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .space import Array

__all__ = ["Case", "Model", "Side", "Truth", "ceil_to", "floor_to", "heads_of"]

KINDS = ("kv", "mla", "swa", "dsa", "mamba", "aux")


@dataclass(frozen=True)
class Model:
    """The whole model's state, before anyone shards it; layers per component."""

    kv: tuple[int, ...]
    mla: tuple[int, ...]
    swa: tuple[int, ...]
    dsa: tuple[int, ...]
    mamba: tuple[int, ...]
    aux: bool
    depth: int
    heads: int
    window_heads: int
    window: int
    dims: tuple[int, int]
    groups: tuple[tuple[int, int], ...]
    """Blocks of convolution channels: width, and the heads it is dealt out in (as many as channels: any of them)."""
    kernel: int
    state_heads: int
    dtype: str
    draft: tuple[int, ...] = ()
    """Layers of ``kv`` beyond the model's depth that only decode has."""


@dataclass(frozen=True)
class Side:
    """How one instance lays the model out."""

    tp: int
    cuts: tuple[int, ...]
    """Where its pipeline stages end; the last one is the depth of the model."""
    page: int
    window_page: int
    order: str
    style: str
    padded: bool
    one_region: bool
    transposed: bool
    shared: tuple[int, ...]
    """Layers of ``dsa`` that this side lists without items."""

    @property
    def stages(self) -> list[range]:
        return [range(a, b) for a, b in itertools.pairwise((0, *self.cuts))]


@dataclass(frozen=True)
class Case:
    """Everything but the bytes, which follow from the seed."""

    model: Model
    source: Side
    target: Side
    tokens: int
    prefix: int
    prefix_known: bool
    chunks: tuple[int, ...]
    """Where pushes end, as multiples of what both of prefill's pages divide; the last one reaches the end."""
    layer_cuts: tuple[int, ...]
    """Where pushes by layers end; empty for pushes of everything."""
    max_blocks: int
    seed: int

    @property
    def kinds(self) -> list[str]:
        """The state types in it, with latents and heads told apart."""
        return [kind for kind in KINDS if getattr(self.model, kind)]

    def first(self, component: str) -> int:
        """First position that must arrive."""
        window = self.tokens - self.model.window if component == "swa" else 0
        return min(max(self.prefix, window), self.tokens)

    def span(self, component: str) -> tuple[int, int]:
        """Positions that move: what must arrive, and the rest of its edge pages where both sides hold it."""
        a, b = self.first(component), self.tokens
        if a >= b:
            return b, b
        pages = [side.window_page if component == "swa" else side.page for side in (self.source, self.target)]
        return max(floor_to(a, page) for page in pages), min(ceil_to(b, page) for page in pages)

    @cached_property
    def truth(self) -> Truth:
        return Truth(self)


class Truth:
    """The global tensors, by component and buffer: positions first, or one item."""

    def __init__(self, case: Case) -> None:
        model = case.model
        rng = np.random.default_rng(case.seed)
        item = np.dtype(model.dtype).itemsize
        # A page that the request does not fill still has bytes behind the last token.
        positions = case.tokens + 64

        def noise(*shape: int) -> Array:
            return rng.integers(0, 256, (*shape[:-1], shape[-1] * item), np.uint8).view(model.dtype)

        self.tensors: dict[tuple[str, str], Array] = {}
        for layer in (*model.kv, *model.draft):
            for part, dim in zip("kv", model.dims, strict=True):
                self.tensors["kv", f"layers.{layer}.{part}"] = noise(positions, model.heads, dim)
        for layer in model.swa:
            for part, dim in zip("kv", model.dims, strict=True):
                self.tensors["swa", f"layers.{layer}.{part}"] = noise(positions, model.window_heads, dim)
        for layer in model.mla:
            self.tensors["mla", f"layers.{layer}.latent"] = noise(positions, 5)
        for layer in model.dsa:
            self.tensors["dsa", f"layers.{layer}.index_k"] = noise(positions, 3)
        for layer in model.mamba:
            self.tensors["mamba", f"layers.{layer}.conv"] = noise(sum(width for width, _ in model.groups), model.kernel)
            self.tensors["mamba", f"layers.{layer}.ssm"] = noise(model.state_heads, 2, 3)
        if model.aux:
            self.tensors["aux", "tokens"] = noise(7)
            self.tensors["aux", "hidden"] = noise(2, 5)

    def __getitem__(self, key: tuple[str, str]) -> Array:
        return self.tensors[key]


def heads_of(total: int, rank: int, width: int) -> slice:
    """The heads that an engine keeps on a rank; where there are more ranks than heads, neighbours share one."""
    if width <= total:
        assert total % width == 0
        return slice(rank * (total // width), (rank + 1) * (total // width))
    assert width % total == 0
    one = rank // (width // total)
    return slice(one, one + 1)


def floor_to(value: int, unit: int) -> int:
    return value // unit * unit


def ceil_to(value: int, unit: int) -> int:
    return math.ceil(value / unit) * unit
