"""A rank as an engine would have it: pools cut from the global tensors with plain slicing, pages scattered."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from statelink import plan, state

from .scene import Keeping, Lay, Part, Pool, Scene, Side, ceil_to, floor_to, need, share_of
from .space import Placed, Space, Wanted

if TYPE_CHECKING:
    from .space import Array, Bytes

__all__ = ["Rank", "instance", "over_the_wire"]

T = TypeVar("T")


def over_the_wire(value: T) -> T:
    """What the other process gets of it."""
    decoded: T = msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))
    return decoded


@dataclass
class Rank:
    """One rank: its memory, its inventory, and where it keeps the request."""

    scene: Scene
    side: Side
    space: Space
    tp: int
    inventory: state.Inventory
    seen: state.Inventory
    """The inventory as another process gets it."""
    keeping: dict[str, Keeping]
    placed: dict[tuple[str, str], Placed]

    def write(self, pool: Pool, part: Part, t: Array, data: Bytes, mask: Bytes | None = None) -> None:
        """Put these positions of the truth where this rank keeps them; all bits into ``mask``."""
        kept = self.keeping[pool.name]
        truth = self.scene.truth[pool.name, part.label]
        spare = part.spare[0] if self.side is self.scene.source else min(part.spare)
        rows = share_of(part, self.tp, self.side.tp) if part.heads else np.arange(part.shape[0] + spare)
        t = t[kept.item[t] >= 0]
        within = (kept.row[t] // part.unit,) if pool.rows else ()
        where = (kept.item[t], *within, slice(len(rows)))
        self._pool(pool, part, data)[where] = truth[t // part.unit][:, rows]
        if mask is not None:
            ones = np.frombuffer(b"\xff" * truth.itemsize, truth.dtype)[0]
            self._pool(pool, part, mask)[where] = ones

    def _pool(self, pool: Pool, part: Part, data: Bytes) -> Array:
        """The pool in some bytes, with its axes in the order of the global tensor."""
        view = self.space.view(self.placed[pool.name, part.label], data)
        return view.swapaxes(1, 2) if part.swaps and self.keeping[pool.name].lay.swapped else view

    def indices(self, pool: Pool, prefix: int) -> list[int]:
        """What the payload helper says, checked against the engine's own tables."""
        kept, component = self.keeping[pool.name], self.inventory.component(pool.name)
        tokens = self.scene.tokens
        if kept.lay.ring:
            given = plan.indices_of(component, tokens, prefix, slot=self.side.slot, ring=kept.lay.ring)
        elif pool.coverage == "request":
            given = plan.indices_of(component, tokens, prefix, slot=self.side.slot)
        else:
            given = plan.indices_of(component, tokens, prefix, pages=kept.pages)
            again = plan.indices_of(component, tokens, prefix, table=kept.table)
            assert np.array_equal(given, again), "a token table and page ids say different things"
        assert given.tolist() == kept.ids(*need(pool, tokens, prefix)), f"indices of {pool.name}"
        ids: list[int] = given.tolist()
        return ids


def instance(scene: Scene, side: Side, name: str, rng: np.random.Generator) -> list[Rank]:
    """All ranks of one side, their memory filled with noise, and with the truth at the source."""
    grid = list(itertools.product(range(len(side.stages)), range(side.shards), range(side.tp)))
    return [_rank(scene, side, name, place, (number, len(grid)), rng) for number, place in enumerate(grid)]


def _rank(
    scene: Scene,
    side: Side,
    name: str,
    place: tuple[int, int, int],
    number: tuple[int, int],
    rng: np.random.Generator,
) -> Rank:
    stage, shard, tp = place
    space = Space(rng, one_region=side.one_region)
    parts = {pool.name: _parts_of(scene, side, pool, stage) for pool in scene.pools}
    keeping: dict[str, Keeping] = {}
    placed: dict[tuple[str, str], Placed] = {}
    for pool in scene.pools:
        mine = parts[pool.name]
        if mine:
            kept = keeping[pool.name] = Keeping(scene, side, pool, shard, rng)
            place_of = {"planar": _planar, "packed": _packed, "beside": _beside}.get(pool.build, _placed)
            found = place_of(space, scene, side, pool, mine, kept, tp)
            placed.update({(pool.name, part.label): where for part, where in zip(mine, found, strict=True)})
    space.seal()
    described = [
        _describe(side, pool, parts[pool.name], keeping[pool.name], space, placed, tp)
        for pool in scene.pools
        if parts[pool.name]
    ]
    axes = {"pp": (stage, len(side.stages)), "cp": (shard, side.shards), "tp": (tp, side.tp)} if side.axes else None
    inventory = state.describe(name, described, rank=number[0], ranks=number[1], axes=axes, model="m")
    rank = Rank(scene, side, space, tp, inventory, over_the_wire(inventory), keeping, placed)
    if side is scene.source:
        for pool in scene.pools:
            for part in parts[pool.name]:
                if placed[pool.name, part.label].shape[0]:
                    a, b = need(pool, scene.tokens, 0)
                    page = max(side.lays[pool.name].page, 1)
                    rank.write(pool, part, np.arange(floor_to(a, page), ceil_to(b, page)), space.data)
    return rank


def _parts_of(scene: Scene, side: Side, pool: Pool, stage: int) -> tuple[Part, ...]:
    """What a stage has of a pool: its layers; what belongs to no layer, or lies behind all, is on the last stage."""
    layers, last = side.stages[stage], stage == len(side.stages) - 1
    return tuple(
        part
        for part in pool.parts
        if not (part.draft and side is scene.source)
        and (last if part.layer is None or part.layer >= side.cuts[-1] else part.layer in layers)
    )


def _placed(
    space: Space, scene: Scene, side: Side, pool: Pool, parts: tuple[Part, ...], kept: Keeping, tp: int
) -> list[Placed]:
    number = int(side is scene.target)
    wanted = [
        Wanted(0 if part.empty[number] else kept.items, _shape(side, pool, part, kept, tp, number), pool.dtype)
        for part in parts
    ]
    return space.place(wanted, side.style, padded=side.padded)


def _shape(side: Side, pool: Pool, part: Part, kept: Keeping, tp: int, number: int) -> tuple[int, ...]:
    """The axes of one item of a rank's own array."""
    shape = (len(share_of(part, tp, side.tp)) + part.spare[number], *part.shape[1:])
    if pool.rows:
        shape = (kept.lay.page // part.unit, *shape)
    if part.swaps and kept.lay.swapped:
        shape = (shape[1], shape[0], *shape[2:])
    return shape


def _packed(
    space: Space, scene: Scene, side: Side, pool: Pool, parts: tuple[Part, ...], kept: Keeping, tp: int
) -> list[Placed]:
    """One array of bytes a layer; its states stand one after the other in each item, before some padding."""
    found = []
    for _, group in itertools.groupby(parts, key=lambda part: part.layer):
        inner = [Wanted(kept.items, _shape(side, pool, part, kept, tp, 0), pool.dtype) for part in group]
        padding = 5 if side.padded else 0
        page = sum(each.nbytes for each in inner) + padding
        [whole] = space.place([Wanted(kept.items, (page,), "uint8")], "separate", padded=side.padded)
        at = whole.offset
        for each in inner:
            dense = np.empty(each.shape, each.dtype).strides
            shape, strides = (kept.items, *each.shape), (whole.strides[0], *dense)
            found.append(Placed(whole.allocation, at, shape, strides, each.dtype))
            at += each.nbytes
    return found


def _beside(
    space: Space, scene: Scene, side: Side, pool: Pool, parts: tuple[Part, ...], kept: Keeping, tp: int
) -> list[Placed]:
    """One array a layer, with the keys and values of a page in turns; or an array of each."""
    if not kept.lay.beside:
        return _placed(space, scene, side, pool, parts, kept, tp)
    heads, page, size = len(share_of(parts[0], tp, side.tp)), kept.lay.page, np.dtype(pool.dtype).itemsize
    content = sum(part.shape[1] for part in parts[:2])
    layers = len(parts) // 2
    wholes = space.place(
        [Wanted(kept.items, (heads * page * content,), pool.dtype)] * layers, side.style, padded=side.padded
    )
    found = []
    for number, part in enumerate(parts):
        whole, width = wholes[number // 2], part.shape[1]
        before = content - width if number % 2 else 0
        if kept.lay.beside == "halves":
            by_head, by_token, before = page * content, width, page * before
        elif kept.lay.swapped:
            by_head, by_token = page * content, content
        else:
            by_head, by_token = content, heads * content
        shape, strides = (page, heads), (by_token * size, by_head * size)
        if kept.lay.swapped:
            shape, strides = (heads, page), (by_head * size, by_token * size)
        found.append(
            Placed(
                whole.allocation,
                whole.offset + before * size,
                (kept.items, *shape, width),
                (whole.strides[0], *strides, size),
                pool.dtype,
            )
        )
    return found


def _planar(
    space: Space, scene: Scene, side: Side, pool: Pool, parts: tuple[Part, ...], kept: Keeping, tp: int
) -> list[Placed]:
    """One array of bytes a layer; its fields stand one after the other in each page."""
    found = []
    page = kept.lay.page
    for _, group in itertools.groupby(parts, key=lambda part: part.layer):
        fields = list(group)
        row = sum(part.shape[0] for part in fields)
        [whole] = space.place([Wanted(kept.items, (page * row,), "uint8")], "separate", padded=side.padded)
        at = whole.offset
        for part in fields:
            width = part.shape[0]
            shape, strides = (kept.items, page, width), (whole.strides[0], width, 1)
            found.append(Placed(whole.allocation, at, shape, strides, "uint8"))
            at += page * width
    return found


def _describe(
    side: Side,
    pool: Pool,
    parts: tuple[Part, ...],
    kept: Keeping,
    space: Space,
    placed: dict[tuple[str, str], Placed],
    tp: int,
) -> state.Described:
    """Tell Statelink about it, in the words of its constructors."""
    made = _constructed(side, pool, parts, kept, {p.label: space.memory(placed[pool.name, p.label]) for p in parts}, tp)
    if pool.draft or not any(part.draft for part in parts):
        return made
    drafts = {part.label for part in parts if part.draft}
    buffers = tuple(
        msgspec.structs.replace(buffer, optional=buffer.name in drafts) for buffer in made.component.buffers
    )
    return made._replace(component=msgspec.structs.replace(made.component, buffers=buffers))


def _constructed(
    side: Side, pool: Pool, parts: tuple[Part, ...], kept: Keeping, memory: dict[str, state.Memory], tp: int
) -> state.Described:
    lay = kept.lay
    nested: dict[int, dict[str, state.Memory]] = {}
    for part in parts:
        if part.layer is not None:
            nested.setdefault(part.layer, {})[part.label.split(".")[2]] = memory[part.label]
    first = parts[0]
    rank = (tp, side.tp)
    # Without heads it is the same on every rank; with heads, on ranks that share positions out.
    replicated = side.shards > 1 or not any(part.heads for part in parts)
    common: dict[str, Any] = {"name": pool.name, "optional": pool.draft}
    kinds: dict[str, Any] = {**common, "type": pool.type}
    block = lay.block if kept.deal == "cyclic" else 1
    dealt: dict[str, Any] = {"partition": state.Partition(kept.deal, kept.size, kept.index, block)}
    windowed: dict[str, Any] = {"window": pool.window or None, "group": pool.group, "replicated": replicated}
    chunk = pool.group if pool.coverage == "open" else None
    if pool.build == "beside" and lay.beside:
        pages = {layer: _joined(each["k"], each["v"], lay) for layer, each in nested.items()}
        return state.fused_pages(
            pages,
            heads=first.heads[0][1],
            tp=rank,
            keys=first.shape[1],
            halves=lay.beside == "halves",
            window=pool.window or None,
            attention_chunk=chunk,
            replicated=replicated,
            **dealt,
            **kinds,
        )
    if pool.build in ("kv", "window", "chunked", "beside"):
        pairs = {layer: (each["k"], each["v"]) for layer, each in nested.items()}
        heads: dict[str, Any] = {"heads": first.heads[0][1], "tp": rank, "order": "hnd" if lay.swapped else "nhd"}
        if pool.window:
            return state.kv_pages(pairs, window=pool.window, replicated=replicated, **heads, **common)
        if chunk is not None:
            return state.kv_pages(pairs, attention_chunk=chunk, replicated=replicated, **heads, **dealt, **common)
        return state.kv_pages(pairs, replicated=replicated, **heads, **dealt, **kinds)
    if pool.build in ("fused", "opaque"):
        fused = {layer: _with_heads_first(each["kv"], lay, pool.build) for layer, each in nested.items()}
        return state.fused_pages(
            fused,
            heads=first.heads[0][1],
            tp=rank,
            opaque=pool.build == "opaque",
            window=pool.window or None,
            attention_chunk=chunk,
            replicated=replicated,
            **dealt,
            **kinds,
        )
    if pool.build == "mla":
        return state.mla_pages({layer: each["latent"] for layer, each in nested.items()}, **dealt, **common)
    if pool.build == "index":
        return state.index_pages({layer: each["index_k"] for layer, each in nested.items()}, **dealt, **kinds)
    if pool.build == "compressed":
        return state.compressed_pages(nested, page=lay.page, **windowed, **kinds)
    if pool.build == "planar":
        fields = [(part.label.split(".")[2], part.shape[0]) for part in parts if part.layer == first.layer]
        width = sum(width for _, width in fields)
        layers = {
            layer: msgspec.structs.replace(
                each[fields[0][0]],
                shape=(kept.items, lay.page * width),
                strides=(each[fields[0][0]].strides[0], 1),
            )
            for layer, each in nested.items()
        }
        return state.planar_pages(layers, fields=fields, replicated=replicated, **kinds)
    if pool.build in ("mamba", "packed"):
        groups: list[int | tuple[int, int]] = [each if each[0] != each[1] else each[0] for each in first.heads]
        recurrent: dict[str, Any] = {
            # As engines say it: nothing for one block of which any channel may go to any rank.
            "conv_groups": None if len(groups) == 1 and isinstance(groups[0], int) else groups,
            "heads": next(part.heads[0][1] for part in parts if part.label.endswith("ssm")),
            "tp": rank,
            "transposed": lay.swapped,
            "name": pool.name,
            "replicated": side.shards > 1,
        }
        if pool.build == "packed":
            [states] = {_states(each) for each in nested.values()}
            return state.packed_slots({n: _raw(each) for n, each in nested.items()}, states=states, **recurrent)
        return state.mamba_slots(
            conv={layer: each["conv"] for layer, each in nested.items()},
            ssm={layer: each["ssm"] for layer, each in nested.items()},
            **recurrent,
        )
    if pool.build == "rings":
        rings = {
            layer: {label: _as_rings(array, lay.ring) for label, array in each.items()}
            for layer, each in nested.items()
        }
        shared: dict[str, Any] = {"heads": first.heads[0][1], "tp": rank} if first.heads else {}
        return state.ring_rows(rings, keep=pool.keep, **windowed, **shared, **kinds)
    if pool.build == "aux":
        return state.aux_rows(memory, name=pool.name, replicated=True)
    assert pool.build == "items"
    layered = {part.label: part.layer for part in parts if part.layer is not None}
    spare = memory[first.label].shape[1] - first.shape[0]
    return state.whole_items(memory, layers=layered, page=lay.page, spare=spare, **dealt, **windowed, **kinds)


def _as_rings(rows: state.Memory, ring: int) -> state.Memory:
    shape = (rows.shape[0] // ring, ring, *rows.shape[1:])
    strides = (ring * rows.strides[0], *rows.strides)
    return msgspec.structs.replace(rows, shape=shape, strides=strides)


def _with_heads_first(pages: state.Memory, lay: Lay, build: str) -> state.Memory:
    """``[pages, heads, tokens, content]``, from pages in either order or with a page of a head as one item."""
    count, a, b = pages.shape[:3]
    size, x, y = pages.strides[:3]
    if build == "opaque":
        shape, strides = (count, a, lay.page, b // lay.page), (size, x, b // lay.page * y, y)
    elif lay.swapped:
        return pages
    else:
        shape, strides = (count, b, a, pages.shape[3]), (size, y, x, pages.strides[3])
    return msgspec.structs.replace(pages, shape=shape, strides=strides)


def _joined(keys: state.Memory, values: state.Memory, lay: Lay) -> state.Memory:
    """``[pages, heads, tokens, content]`` around keys and values that take turns."""
    count, a, b, width = keys.shape
    content = width + values.shape[3]
    heads, tokens = (a, b) if lay.swapped else (b, a)
    by_head, by_token = keys.strides[1:3] if lay.swapped else keys.strides[2:0:-1]
    if lay.beside == "halves":
        by_token = content * keys.itemsize
    shape, strides = (count, heads, tokens, content), (keys.strides[0], by_head, by_token, keys.itemsize)
    return msgspec.structs.replace(keys, shape=shape, strides=strides)


def _raw(states: dict[str, state.Memory]) -> state.Memory:
    """The raw pages around states, of which the first one begins where a page does."""
    first, last = states["conv"], states["ssm"]
    nbytes = last.address - first.address + last.itemsize * math.prod(last.shape[1:])
    return msgspec.structs.replace(
        first, shape=(first.shape[0], nbytes), strides=(first.strides[0], 1), dtype="uint8", itemsize=1
    )


def _states(states: dict[str, state.Memory]) -> tuple[state.PackedState, ...]:
    return tuple(
        state.PackedState(kind, each.shape[1:], each.dtype, each.itemsize) for kind, each in sorted(states.items())
    )
