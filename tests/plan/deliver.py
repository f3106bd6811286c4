"""Carries out a scene with plain copies, and compares every byte of every decode rank with what it should be."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from statelink import plan, state
from statelink.plan import Pages

from .carry import check_parts, compile_both, copy, pack
from .case import ceil_to, floor_to, heads_of
from .engine import over_the_wire
from .pools import Keeping, moved, need
from .space import Placed, Space, Wanted

if TYPE_CHECKING:
    from .pools import Half, Part, Pool, Scene
    from .space import Array, Bytes

__all__ = ["Station", "deliver", "stations"]


@dataclass
class Station:
    """One rank: its memory, its inventory, and where it keeps the request."""

    scene: Scene
    half: Half
    space: Space
    inventory: state.Inventory
    seen: state.Inventory
    tp: int
    keeping: dict[str, Keeping]
    placed: dict[tuple[str, str], Placed]

    def write(self, pool: Pool, part: Part, t: Array, data: Bytes, mask: Bytes | None = None) -> None:
        """Put these positions of the truth where this rank keeps them; all bits into ``mask``."""
        placed, keeping = self.placed[pool.name, part.label], self.keeping[pool.name]
        truth = self.scene.truth[pool.name, part.label]
        if part.sharded:
            truth = truth[:, heads_of(part.shape[0], self.tp, self.half.tp)]
        t = t[keeping.item[t] >= 0]
        rows = _has_rows(pool)
        where: Any = (keeping.item[t], keeping.row[t] // part.unit) if rows else keeping.item[t]
        for bytes_, what in ((data, truth[t // part.unit]), (mask, None)):
            if bytes_ is None:
                continue
            view = self.space.view(placed, bytes_)
            if keeping.lay.order == "hnd" and rows and len(part.shape) > 1:
                view = view.swapaxes(1, 2)
            view[where] = np.frombuffer(b"\xff" * truth.itemsize, truth.dtype)[0] if what is None else what

    def indices(self, pool: Pool, prefix: int) -> list[int]:
        """What the payload helper says, checked against the engine's own tables."""
        keeping, component = self.keeping[pool.name], self.inventory.component(pool.name)
        if keeping.lay.ring:
            given = plan.indices_of(component, self.scene.tokens, prefix, slot=self.half.slot, ring=keeping.lay.ring)
        elif pool.coverage == "request":
            given = plan.indices_of(component, self.scene.tokens, prefix, slot=self.half.slot)
        else:
            given = plan.indices_of(component, self.scene.tokens, prefix, pages=keeping.pages)
            again = plan.indices_of(component, self.scene.tokens, prefix, table=keeping.table)
            assert np.array_equal(given, again), "a token table and page ids say different things"
        assert given.tolist() == keeping.ids(*need(pool, self.scene.tokens, prefix)), f"indices of {pool.name}"
        ids: list[int] = given.tolist()
        return ids


def _has_rows(pool: Pool) -> bool:
    return pool.build not in ("items", "rings")


def stations(scene: Scene, half: Half, name: str, rng: np.random.Generator) -> list[Station]:
    """All ranks of one side, their memory filled with noise, and with the truth at the source."""
    grid = list(itertools.product(enumerate(half.stages), range(half.shards), range(half.tp)))
    return [
        _station(scene, half, name, set(layers), stage == len(half.stages) - 1, shard, tp, (number, len(grid)), rng)
        for number, ((stage, layers), shard, tp) in enumerate(grid)
    ]


def _station(
    scene: Scene,
    half: Half,
    name: str,
    layers: set[int],
    last: bool,
    shard: int,
    tp: int,
    number: tuple[int, int],
    rng: np.random.Generator,
) -> Station:
    space = Space(rng, one_region=half.one_region)
    is_source = half is scene.source
    mine: dict[str, tuple[Part, ...]] = {}
    keeping: dict[str, Keeping] = {}
    placed: dict[tuple[str, str], Placed] = {}
    for pool in scene.pools:
        parts = tuple(part for part in pool.parts if (last if part.layer is None else part.layer in layers))
        if not parts or (pool.decode_only and is_source):
            continue
        mine[pool.name], kept = parts, Keeping(scene, half, pool, shard, rng)
        keeping[pool.name] = kept
        wanted = [_wanted(half, pool, part, kept, tp, is_source) for part in parts]
        if pool.build == "planar":
            placed.update(_planar(space, half, pool, parts, kept))
        else:
            found = space.place(wanted, half.style, padded=half.padded)
            placed.update({(pool.name, part.label): where for part, where in zip(parts, found, strict=True)})
    space.seal()
    described = [
        _describe(half, pool, mine[pool.name], keeping[pool.name], space, placed, tp, shard)
        for pool in scene.pools
        if pool.name in mine
    ]
    inventory = state.describe(name, described, rank=number[0], ranks=number[1], model="m")
    station = Station(scene, half, space, inventory, over_the_wire(inventory), tp, keeping, placed)
    if is_source:
        for pool in scene.pools:
            for part in mine.get(pool.name, ()):
                if placed[pool.name, part.label].shape[0]:
                    a, b = need(pool, scene.tokens, 0)
                    page = max(half.lays[pool.name].page, 1)
                    station.write(pool, part, np.arange(floor_to(a, page), ceil_to(b, page)), space.data)
    return station


def _wanted(half: Half, pool: Pool, part: Part, kept: Keeping, tp: int, is_source: bool) -> Wanted:
    shape = part.shape
    if part.sharded:
        heads = heads_of(shape[0], tp, half.tp)
        shape = (heads.stop - heads.start, *shape[1:])
    if _has_rows(pool):
        shape = (kept.lay.page // part.unit, *shape)
        if kept.lay.order == "hnd" and len(part.shape) > 1:
            shape = (shape[1], shape[0], *shape[2:])
    return Wanted(0 if part.empty[not is_source] else kept.items, shape, pool.dtype)


def _planar(
    space: Space, half: Half, pool: Pool, parts: tuple[Part, ...], kept: Keeping
) -> dict[tuple[str, str], Placed]:
    """One array of bytes a layer; its fields stand one after the other in each page."""
    found = {}
    page = kept.lay.page
    for _, group in itertools.groupby(parts, key=lambda part: part.layer):
        fields = list(group)
        row = sum(part.shape[0] for part in fields)
        [whole] = space.place([Wanted(kept.items, (page * row,), "uint8")], "separate", padded=half.padded)
        at = whole.offset
        for part in fields:
            width = part.shape[0]
            shape, strides = (kept.items, page, width), (whole.strides[0], width, 1)
            found[pool.name, part.label] = Placed(whole.allocation, at, shape, strides, "uint8")
            at += page * width
    return found


def _describe(
    half: Half,
    pool: Pool,
    parts: tuple[Part, ...],
    kept: Keeping,
    space: Space,
    placed: dict[tuple[str, str], Placed],
    tp: int,
    shard: int,
) -> state.Described:
    """Tell Statelink about it, in the words of its constructors."""
    lay = kept.lay
    partition = state.Partition(lay.deal, kept.size, shard if lay.deal != "all" else 0, lay.block)
    memory = {part.label: space.memory(placed[pool.name, part.label]) for part in parts}
    nested: dict[int, dict[str, state.Memory]] = {}
    for part in parts:
        if part.layer is not None:
            nested.setdefault(part.layer, {})[part.label.split(".")[2]] = memory[part.label]
    common: dict[str, Any] = {"name": pool.name, "optional": pool.decode_only}
    if pool.build not in ("mla", "index"):
        # Without heads it is the same on every rank; with heads, on ranks that share positions out.
        common["replicated"] = half.shards > 1 or not any(part.sharded for part in parts)
    kinds: dict[str, Any] = {**common, "type": pool.type}
    if pool.build in ("kv", "window"):
        pairs = {layer: (each["k"], each["v"]) for layer, each in nested.items()}
        if pool.build == "window":
            heads = parts[0].shape[0]
            return state.window_pages(
                pairs, heads=heads, window=pool.window, tp=(tp, half.tp), order=lay.order, **common
            )
        return state.kv_pages(
            pairs, heads=parts[0].shape[0], tp=(tp, half.tp), order=lay.order, partition=partition, **kinds
        )
    if pool.build == "mla":
        return state.mla_pages({layer: each["latent"] for layer, each in nested.items()}, partition=partition, **common)
    if pool.build == "index":
        return state.index_pages(
            {layer: each["index_k"] for layer, each in nested.items()}, partition=partition, **kinds
        )
    windowed = {**kinds, "window": pool.window or None, "group": pool.group}
    if pool.build == "compressed":
        return state.compressed_pages(nested, page=lay.page, **windowed)
    if pool.build == "planar":
        layers = {}
        fields = [(part.label.split(".")[2], part.shape[0]) for part in parts if part.layer == parts[0].layer]
        for layer, each in nested.items():
            first = each[fields[0][0]]
            shape = (first.shape[0], lay.page * sum(width for _, width in fields))
            layers[layer] = msgspec.structs.replace(first, shape=shape, strides=(first.strides[0], 1))
        return state.planar_pages(layers, fields=fields, **kinds)
    if pool.build == "rings":
        rings = {
            layer: {label: _as_rings(array, lay.ring) for label, array in each.items()}
            for layer, each in nested.items()
        }
        if parts[0].sharded:
            windowed |= {"heads": parts[0].shape[0], "tp": (tp, half.tp)}
        return state.ring_rows(rings, keep=pool.keep, **windowed)
    assert pool.build == "items"
    layered = {part.label: part.layer for part in parts if part.layer is not None}
    return state.whole_items(memory, layers=layered, page=lay.page, partition=partition, **windowed)


def _as_rings(rows: state.Memory, ring: int) -> state.Memory:
    shape = (rows.shape[0] // ring, ring, *rows.shape[1:])
    strides = (ring * rows.strides[0], *rows.strides)
    return msgspec.structs.replace(rows, shape=shape, strides=strides)


def deliver(scene: Scene, parcel: int = 0) -> Counter[str]:
    """Move one request from every prefill rank to every decode rank, check all of it; returns bytes per component.

    Args:
        scene: What is where.
        parcel: Most bytes of a parcel, if it is to be moved by parcels.
    """
    rng = np.random.default_rng(scene.seed)
    sources = stations(scene, scene.source, "prefill", rng)
    targets = stations(scene, scene.target, "decode", rng)
    before = [station.space.data.copy() for station in (*sources, *targets)]
    written = [np.zeros(len(station.space.data), np.uint8) for station in targets]
    told = [[station.seen for station in sources], [station.inventory for station in targets]]
    plan.match(*told)
    parts = plan.route(*told)
    check_parts(parts, len(sources), len(targets))
    pools = {pool.name: pool for pool in scene.pools}
    nbytes: Counter[str] = Counter()
    planned = 0
    for part in parts:
        source, target = sources[part.source], targets[part.target]
        known = plan.compile_pair(source.seen, target.inventory, part)
        for name, component in compile_both(source, target, part).components.items():
            owed = plan.due(component.source, component.target, scene.tokens, scene.prefix)
            planned += component.granule_nbytes * len(owed)
            wanted = plan.required(
                component.target, scene.tokens, scene.prefix, target.indices(pools[name], scene.prefix)
            )
            for items in _pushed(scene, pools[name], source, component.source, rng):
                for layers in _layers(scene, pools[name]):
                    move = plan.plan_move(component, items, wanted, owed, layers)
                    promised = 0
                    if parcel:
                        expected_move = plan.expected_move(known.components[name], wanted, owed)
                        limit = max(parcel, *(group.runs.total for group in component.groups))
                        promised = pack(move, expected_move, limit, source, target, written[part.target])
                        assert promised == move.nbytes
                        nbytes[name] += promised
                        continue
                    for batch in move.blocks(scene.max_blocks):
                        copy(batch, source, target, written[part.target])
                        promised += batch.total
                    assert promised == move.nbytes
                    nbytes[name] += promised
    assert planned == nbytes.total(), "what both sides count is not what moved"
    for station, snapshot in zip(sources, before, strict=False):
        assert np.array_equal(station.space.data, snapshot), "a source was written to"
    expected = 0
    for station, snapshot, count in zip(targets, before[len(sources) :], written, strict=True):
        expected += _compare(scene, station, snapshot, count)
    assert expected == nbytes.total()
    return nbytes


def _layers(scene: Scene, pool: Pool) -> list[tuple[int, int] | None]:
    """In how many pushes the layers go; what belongs to no layer goes with all of them."""
    depth = scene.source.cuts[-1]
    cut = scene.seed % (depth + 2)
    if not 0 < cut < depth or any(part.layer is None for part in pool.parts):
        return [None]
    return [(0, cut), (cut, depth)]


def _pushed(
    scene: Scene, pool: Pool, source: Station, component: state.Component, rng: np.random.Generator
) -> Iterator[plan.Items]:
    """What the source pushes of one pool: all at once, or in chunks that end between its items."""
    prefix = scene.prefix if scene.prefix_known else None
    kept = source.keeping[pool.name]
    whole = (0, scene.tokens)
    lay = kept.lay
    unit = lay.page if lay.deal != "cyclic" else math.lcm(lay.page, lay.block) * kept.size
    if pool.coverage == "request" or not scene.chunks:
        yield plan.pushed(component, scene.tokens, prefix, whole, source.indices(pool, prefix or 0))
        return
    start = floor_to(prefix or 0, unit) if pool.coverage == "suffix" else 0
    ends = sorted({max(start, floor_to(int(part * scene.tokens), unit)) for part in scene.chunks})
    a, b = need(pool, scene.tokens, prefix or 0)
    for low, high in itertools.pairwise((start, *ends, scene.tokens)):
        if low >= high:
            continue
        ids = kept.ids(max(a, low), min(b, high)) if max(a, low) < min(b, high) else []
        given: Any = Pages(np.array(ids), kept.start(ids[0])) if ids and rng.integers(2) else ids
        yield plan.pushed(component, scene.tokens, prefix, (low, high), given)


def _compare(scene: Scene, station: Station, before: Bytes, written: Bytes) -> int:
    """Build by hand what the rank's memory should be now; returns how many bytes should have come."""
    image, mask = before.copy(), np.zeros(len(before), np.uint8)
    for pool in scene.pools:
        for part in pool.parts:
            if (pool.name, part.label) in station.placed and not pool.decode_only and not any(part.empty):
                station.write(pool, part, np.arange(*moved(scene, pool)), image, mask)
    once = (mask > 0).astype(np.uint8)
    for name, wrong in (("is not written once", written != once), ("is wrong", station.space.data != image)):
        assert not wrong.any(), _where(name, scene, station, wrong)
    return int(once.sum())


def _where(what: str, scene: Scene, station: Station, wrong: Any) -> str:
    first = int(np.flatnonzero(wrong)[0])
    for pool in scene.pools:
        for part in pool.parts:
            placed = station.placed.get((pool.name, part.label))
            if placed is not None and placed.shape[0]:
                mark = np.zeros(len(station.space.data), np.uint8)
                station.space.view(placed, mark)[...] = np.frombuffer(b"\xff" * 8, placed.dtype)[0]
                if mark[first]:
                    return f"{pool.name}/{part.label} of rank {station.inventory.rank} {what}: byte {first}"
    return f"memory of rank {station.inventory.rank} outside every buffer {what}: byte {first}"
