"""A rank as an engine would have it: pools cut from the global tensors with plain slicing, pages scattered."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np

from statelink import state
from statelink.plan import Pages

from .case import Case, Model, Side, heads_of
from .space import Array, Bytes, Placed, Space, Wanted

__all__ = ["Piece", "Rank", "instance", "over_the_wire"]

T = TypeVar("T")


def over_the_wire(value: T) -> T:
    """What the other process gets of it."""
    decoded: T = msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))
    return decoded


@dataclass(frozen=True)
class Piece:
    """One buffer of one rank: where it lies, and what its items must be equal to."""

    component: str
    name: str
    placed: Placed
    local: Array
    """This rank's share of the global tensor: positions first, or one item."""
    swap: tuple[int, int] | None
    """Axes of the pool to exchange so that it reads like ``local``."""


@dataclass
class Rank:
    """One rank: its memory, its inventory, and which items the request has there."""

    case: Case
    side: Side
    space: Space
    inventory: state.Inventory
    seen: state.Inventory
    """The inventory as another process gets it."""
    pieces: list[Piece]
    ids: dict[str, Array] = field(default_factory=dict)

    def page(self, component: str) -> int:
        return self.side.window_page if component == "swa" else self.side.page

    def first_page(self, component: str) -> int:
        """Number of the first page that ``ids`` has: sources keep everything, or their whole window."""
        if self.side is self.case.source:
            window = self.case.tokens - self.case.model.window
            return max(window, 0) // self.page(component) if component == "swa" else 0
        a = self.case.first(component)
        page = self.page(component)
        return a // page if a < self.case.tokens else math.ceil(self.case.tokens / page)

    def view(self, piece: Piece, data: Bytes | None = None) -> Array:
        """The pool, with its axes in the order of the global tensor."""
        pool = self.space.view(piece.placed, data)
        return pool if piece.swap is None else pool.swapaxes(*piece.swap)

    def write(self, piece: Piece, a: int, b: int, data: Bytes, mask: Bytes | None = None) -> None:
        """Put positions ``[a, b)`` of the truth where this rank keeps them; all bits into ``mask``."""
        pool = self.view(piece, data)
        ids = self.ids[piece.component]
        if piece.component in ("mamba", "aux"):
            where: Any = int(ids[0])
            what = piece.local
        else:
            positions = np.arange(a, b)
            page = self.page(piece.component)
            where = ids[positions // page - self.first_page(piece.component)], positions % page
            what = piece.local[a:b]
        pool[where] = what
        if mask is not None:
            ones = np.frombuffer(b"\xff" * what.dtype.itemsize, what.dtype)[0]
            self.view(piece, mask)[where] = ones

    def given(self, component: str, span: tuple[int, int], rng: np.random.Generator) -> Any:
        """The indices of a push, bare or with their position, as an engine would name them."""
        if component in ("mamba", "aux"):
            return self.ids[component]
        page = self.page(component)
        first, last = span[0] // page, math.ceil(span[1] / page)
        known = self.first_page(component)
        if component == "swa":
            first = max(first, known)
        last = max(first, last)
        ids = self.ids[component][first - known : last - known]
        if rng.integers(2):
            return Pages(ids, first * page) if len(ids) else []
        return ids.tolist()


def instance(case: Case, side: Side, name: str, rng: np.random.Generator) -> list[Rank]:
    """All ranks of one side, their memory filled with noise."""
    ranks = []
    stages = side.stages
    for stage, layers in enumerate(stages):
        for tp in range(side.tp):
            last = stage == len(stages) - 1
            mine = {*layers, *(case.model.draft if last and side is case.target else ())}
            number = stage * side.tp + tp
            ranks.append(_rank(case, side, name, mine, last, tp, (number, len(stages) * side.tp), rng))
    return ranks


def _rank(
    case: Case,
    side: Side,
    name: str,
    layers: set[int],
    last: bool,
    tp: int,
    number: tuple[int, int],
    rng: np.random.Generator,
) -> Rank:
    space = Space(rng, one_region=side.one_region)
    shards = _shards(case, side, layers, last, tp)
    placed: dict[str, list[Placed]] = {}
    items: dict[str, int] = {}
    for component, buffers in shards.items():
        paged = component not in ("mamba", "aux")
        page = side.window_page if component == "swa" else side.page
        count = items[component] = math.ceil(case.tokens / page) + 3 if paged else 4
        wanted = []
        for label, local, swap in buffers:
            inner = (page, *local.shape[1:]) if paged else local.shape
            if swap is not None:
                order = list(range(len(inner)))
                i, j = swap[0] - 1, swap[1] - 1
                order[i], order[j] = order[j], order[i]
                inner = tuple(inner[axis] for axis in order)
            held = 0 if component == "dsa" and int(label.split(".")[1]) in side.shared else count
            wanted.append(Wanted(held, inner, local.dtype.name))
        placed[component] = space.place(wanted, side.style, padded=side.padded)
    space.seal()
    pieces = [
        Piece(component, label, where, local, swap)
        for component, buffers in shards.items()
        for (label, local, swap), where in zip(buffers, placed[component], strict=True)
    ]
    described = [_describe(case, side, space, component, tp, pieces) for component in shards]
    inventory = state.describe(name, described, rank=number[0], ranks=number[1], axes={"tp": (tp, side.tp)}, model="m")
    rank = Rank(case, side, space, inventory, over_the_wire(inventory), pieces)
    for component in shards:
        needed = 1
        if component not in ("mamba", "aux"):
            needed = math.ceil(case.tokens / rank.page(component)) - rank.first_page(component)
        rank.ids[component] = rng.permutation(items[component])[:needed]
    if side is case.source:
        for piece in pieces:
            if piece.placed.shape[0]:
                page = rank.page(piece.component)
                end = math.ceil(case.tokens / page) * page
                rank.write(piece, rank.first_page(piece.component) * page, end, space.data)
    return rank


Shard = tuple[str, Array, "tuple[int, int] | None"]


def _shards(case: Case, side: Side, layers: set[int], last: bool, tp: int) -> dict[str, list[Shard]]:
    """Cut this rank's share out of every global tensor, the way engines do."""
    model, truth = case.model, case.truth
    found: dict[str, list[Shard]] = {}
    swap = (1, 2) if side.order == "hnd" else None
    for (component, label), full in truth.tensors.items():
        layer = int(label.split(".")[1]) if label.startswith("layers.") else None
        if layer is None:
            if not last:
                continue
            shard: Shard = label, full, None
        elif layer not in layers:
            continue
        elif component in ("kv", "swa"):
            total = model.heads if component == "kv" else model.window_heads
            shard = label, full[:, heads_of(total, tp, side.tp)], swap
        elif label.endswith("conv"):
            widths, before, blocks = model.groups, 0, []
            for width, units in widths:
                share, each = heads_of(units, tp, side.tp), width // units
                blocks.append(full[before + share.start * each : before + share.stop * each])
                before += width
            shard = label, np.concatenate(blocks), (1, 2) if side.transposed else None
        elif label.endswith("ssm"):
            shard = label, full[heads_of(model.state_heads, tp, side.tp)], None
        else:
            shard = label, full, None  # latents and index keys are whole on every rank
        found.setdefault(component, []).append(shard)
    return found


def _describe(case: Case, side: Side, space: Space, component: str, tp: int, pieces: list[Piece]) -> state.Described:
    """Tell Statelink about it, in the words of its constructors."""
    model = case.model
    arrays = {piece.name: space.memory(piece.placed) for piece in pieces if piece.component == component}
    layers = sorted({int(label.split(".")[1]) for label in arrays if label.startswith("layers.")})
    rank = (tp, side.tp)
    if component in ("kv", "swa"):
        pairs = {layer: (arrays[f"layers.{layer}.k"], arrays[f"layers.{layer}.v"]) for layer in layers}
        if component == "swa":
            return state.window_pages(pairs, heads=model.window_heads, window=model.window, tp=rank, order=side.order)
        made = state.kv_pages(pairs, heads=model.heads, tp=rank, order=side.order)
        buffers = tuple(
            msgspec.structs.replace(buffer, optional=buffer.layer in model.draft) for buffer in made.component.buffers
        )
        return made._replace(component=msgspec.structs.replace(made.component, buffers=buffers))
    if component == "mla":
        return state.mla_pages({layer: arrays[f"layers.{layer}.latent"] for layer in layers}, name="mla")
    if component == "dsa":
        return state.index_pages({layer: arrays[f"layers.{layer}.index_k"] for layer in layers})
    if component == "mamba":
        return state.mamba_slots(
            conv={layer: arrays[f"layers.{layer}.conv"] for layer in layers},
            ssm={layer: arrays[f"layers.{layer}.ssm"] for layer in layers},
            conv_groups=_conv_groups(model),
            heads=model.state_heads,
            tp=rank,
            transposed=side.transposed,
        )
    return state.aux_rows(arrays, replicated=True)


def _conv_groups(model: Model) -> list[int | tuple[int, int]] | None:
    """As engines say it: a bare width where any channel may go to any rank, and nothing for one such block."""
    groups: list[int | tuple[int, int]] = [each if each[0] != each[1] else each[0] for each in model.groups]
    return None if len(groups) == 1 and isinstance(groups[0], int) else groups
