"""Carries out a scene with plain copies, and compares every byte of every decode rank with what it should be."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from statelink import plan
from statelink.plan import Pages

from .ranks import Rank, instance, over_the_wire
from .scene import floor_to, moved, need

if TYPE_CHECKING:
    from statelink.plan import Assignment, Blocks, PairPlan
    from statelink.state import Component

    from .scene import Pool, Scene
    from .space import Bytes

__all__ = ["carry", "compile_both", "should_be"]

Contents = dict[tuple[int, int], bytes]
"""Bytes by part of the model's state and granule."""


def carry(scene: Scene) -> Counter[str]:
    """Move one request from every prefill rank to every decode rank, and check everything about it.

    Returns:
        Bytes by component.
    """
    rng = np.random.default_rng(scene.seed)
    sources = instance(scene, scene.source, "prefill", rng)
    targets = instance(scene, scene.target, "decode", rng)
    before = [rank.space.data.copy() for rank in (*sources, *targets)]
    written = [np.zeros(len(rank.space.data), np.uint8) for rank in targets]
    nbytes: Counter[str] = Counter()
    due = 0
    for part in _routed(sources, targets, rng):
        source, target = sources[part.source], targets[part.target]
        for component in compile_both(source, target, part).components.values():
            assert component.granule_nbytes == sum(component.layer_nbytes.values())
            due += _pair(scene, source, target, component, written[part.target], nbytes, rng)
    assert due == nbytes.total(), "what both sides count is not what moved"
    for rank, snapshot in zip(sources, before, strict=False):
        assert np.array_equal(rank.space.data, snapshot), "a source was written to"
    expected = 0
    for rank, snapshot, times in zip(targets, before[len(sources) :], written, strict=True):
        expected += _compare(scene, rank, sources, snapshot, times)
    assert expected == nbytes.total()
    return nbytes


def _routed(sources: list[Rank], targets: list[Rank], rng: np.random.Generator) -> list[Assignment]:
    seen = [rank.seen for rank in sources], [rank.inventory for rank in targets]
    plan.match(*seen)
    parts = plan.route(*seen)
    # Every decode rank finds the same route, whatever order it learns of the others in.
    shuffled = [[side[int(n)].seen for n in rng.permutation(len(side))] for side in (sources, targets)]
    assert plan.route(*shuffled) == parts
    assert {part.source for part in parts} == set(range(len(sources))), "a source does not hear of the request"
    assert len({(part.source, part.target) for part in parts}) == len(parts)
    busy = {part.source for part in parts if part.shares}
    for part in parts:
        if not part.shares:
            assert part.source not in busy
            assert part.target == part.source % len(targets)
    return parts


def compile_both(source: Rank, target: Rank, part: Assignment) -> PairPlan:
    """Both sides compile from what they know themselves and what they were sent."""
    told = over_the_wire(part)
    at_source = plan.compile_pair(source.inventory, target.seen, told)
    at_target = plan.compile_pair(source.seen, target.inventory, part)
    assert told == part
    assert at_source.digest == at_target.digest
    assert len(at_source.digest) == 16
    return at_target


def _pair(
    scene: Scene,
    source: Rank,
    target: Rank,
    component: plan.ComponentPlan,
    written: Bytes,
    nbytes: Counter[str],
    rng: np.random.Generator,
) -> int:
    """Move one component between two ranks; returns the bytes that both sides expect."""
    pool = next(pool for pool in scene.pools if pool.name == component.target.name)
    owed = plan.due(component.source, component.target, scene.tokens, scene.prefix)
    accepted = target.indices(pool, scene.prefix)
    if accepted and pool.rows and rng.integers(2):
        given: Any = Pages(accepted, target.keeping[pool.name].start(accepted[0]))
    else:
        given = accepted
    wanted = plan.required(component.target, scene.tokens, scene.prefix, given)
    sent: Contents = {}
    for items in _pushed(scene, pool, source, component.source, rng):
        for layers in _layers(scene, pool):
            move = plan.plan_move(component, items, wanted, owed, layers)
            _collect(sent, source, move.state_bytes())
            if scene.parcel:
                expected = plan.expected_move(component, wanted, owed)
                limit = max(scene.parcel, *(group.runs.total for group in component.groups))
                count = _by_parcels(move, expected, limit, source, target, written)
            else:
                count = _by_blocks(move, scene.max_blocks, source, target, written)
            assert count == move.nbytes
            nbytes[pool.name] += count
    arrived: Contents = {}
    read = _collect(arrived, target, plan.arrived_bytes(component, wanted, owed))
    assert arrived == sent, "what both sides would take digests of is not the same"
    due = component.granule_nbytes * len(owed)
    assert len(set(read)) == len(read) == due, "not every byte is read once"
    return due


def _pushed(
    scene: Scene, pool: Pool, source: Rank, component: Component, rng: np.random.Generator
) -> Iterator[plan.Items]:
    """What the source pushes of one pool: all at once, or in chunks that end between its items."""
    prefix = scene.prefix if scene.prefix_known else None
    kept, lay = source.keeping[pool.name], source.keeping[pool.name].lay
    unit = math.lcm(lay.page, lay.block) * kept.size if kept.deal == "cyclic" else max(lay.page, 1)
    late = pool.coverage == "suffix" or (pool.coverage in ("window", "open") and rng.integers(2))
    start = floor_to(prefix or 0, unit) if late else 0
    ends = sorted({max(start, floor_to(part * scene.tokens // 20, unit)) for part in scene.chunks})
    spans = list(itertools.pairwise((start, *ends, scene.tokens)))
    if pool.coverage == "request" or not scene.chunks:
        whole = spans[-1] if pool.coverage == "request" else (0, scene.tokens)
        yield plan.pushed(component, scene.tokens, prefix, whole, source.indices(pool, prefix or 0))
        return
    a, b = need(pool, scene.tokens, prefix or 0)
    for low, high in spans:
        if low < high:
            first, last = max(a, low), min(b, high)
            ids = kept.ids(first, last) if first < last else []
            given: Any = Pages(np.array(ids), kept.start(ids[0])) if ids and rng.integers(2) else ids
            yield plan.pushed(component, scene.tokens, prefix, (low, high), given)


def _layers(scene: Scene, pool: Pool) -> list[tuple[int, int] | None]:
    """In how many pushes the layers go; what belongs to no layer goes with all of them."""
    if not scene.layer_cuts or any(part.layer is None for part in pool.parts):
        return [None]
    return list(itertools.pairwise((0, *scene.layer_cuts, scene.depth)))


def _by_blocks(move: plan.Move, max_blocks: int, source: Rank, target: Rank, written: Bytes) -> int:
    moved = 0
    for batch in move.blocks(max_blocks):
        assert 0 < batch.count <= max(max_blocks, 1)
        _copy(batch, source, target, written)
        moved += batch.total
    return moved


def _copy(batch: Blocks, source: Rank, target: Rank, written: Bytes) -> None:
    """Plain copies, counting how often each byte of the target is written."""
    wide, narrow = (batch.source, batch.target, batch.nbytes), (batch.source_region, batch.target_region)
    assert {array.dtype.str for array in wide} == {"<u8"}
    assert {array.dtype.str for array in narrow} == {"<u4"}
    assert all(array.flags.c_contiguous for array in (*wide, *narrow))
    sizes = batch.nbytes.tolist()
    here = _locate(target, batch.target.tolist(), batch.target_region.tolist(), sizes)
    there = _locate(source, batch.source.tolist(), batch.source_region.tolist(), sizes)
    for t, s, n in zip(here, there, sizes, strict=True):
        target.space.data[t : t + n] = source.space.data[s : s + n]
        written[t : t + n] += 1


def _locate(rank: Rank, addresses: list[int], regions: list[int], sizes: list[int]) -> list[int]:
    tables = [(region.address, region.nbytes, rank.space.start(region)) for region in rank.inventory.regions]
    found = []
    for address, number, nbytes in zip(addresses, regions, sizes, strict=True):
        base, length, start = tables[number]
        assert nbytes > 0
        assert base <= address, "a block begins before its region"
        assert address + nbytes <= base + length, "a block leaves its region"
        found.append(address - base + start)
    return found


def _by_parcels(move: plan.Move, expected: plan.Move, limit: int, source: Rank, target: Rank, written: Bytes) -> int:
    """The same by parcels: gathered at the source, and scattered by what the target knows itself."""
    moved = 0
    for tiles in move.parcels(limit):
        there = np.concatenate([_bytes_of(source, move.places(tile, "source")) for tile in tiles])
        part = expected.only(move.layers)
        here = np.concatenate([_bytes_of(target, part.places(tile, "target")) for tile in tiles])
        assert 0 < len(there) == len(here) <= limit
        target.space.data[here] = source.space.data[there]
        np.add.at(written, here, 1)
        moved += len(here)
    return moved


def _bytes_of(rank: Rank, places: plan.Places) -> Any:
    """Where in the rank's data each byte of a tile is."""
    starts = places.addresses[:, None] + places.rows.astype(np.uint64) * np.uint64(places.width)
    return _found(rank, starts.ravel(), places.width)


def _found(rank: Rank, starts: Any, width: int) -> Any:
    """Places in the rank's data of all bytes of rows of one width, whose addresses are given."""
    at = np.full(len(starts), -1, np.int64)
    for region in rank.inventory.regions:
        inside = (starts >= np.uint64(region.address)) & (starts <= np.uint64(region.address + region.nbytes - width))
        at[inside] = (starts[inside] - np.uint64(region.address)).astype(np.int64) + rank.space.start(region)
    assert at.min(initial=0) >= 0, "a row leaves its region"
    return (at[:, None] + np.arange(width)).ravel()


def _collect(found: Contents, rank: Rank, contents: Iterable[plan.StateBytes]) -> list[int]:
    """Read what digests are taken of: each part of the state once. Returns where its bytes are in the rank's data."""
    read: list[int] = []
    for content in contents:
        starts = content.addresses[:, None, None] + content.offsets.astype(np.uint64)
        places = _found(rank, starts.ravel(), content.piece)
        read += places.tolist()
        each = rank.space.data[places].reshape(len(content.seeds), len(content.granules), -1)
        for number, seed in enumerate(content.seeds.tolist()):
            for place, granule in enumerate(content.granules.tolist()):
                assert (seed, granule) not in found, "a part of the state is read twice"
                found[seed, granule] = each[number, place].tobytes()
    return read


def _compare(scene: Scene, rank: Rank, sources: list[Rank], before: Bytes, written: Bytes) -> int:
    """Compare the rank's memory with what it should be now; returns how many bytes should have come."""
    image, mask = should_be(scene, rank, sources, before)
    once = (mask > 0).astype(np.uint8)
    for name, wrong in (("is not written once", written != once), ("is wrong", rank.space.data != image)):
        assert not wrong.any(), _where(name, scene, rank, wrong)
    return int(once.sum())


def should_be(scene: Scene, rank: Rank, sources: list[Rank], before: Bytes) -> tuple[Bytes, Bytes]:
    """Build by hand what the rank's memory should become, and a mask of what should come."""
    image, mask = before.copy(), np.zeros(len(before), np.uint8)
    sent = {key for source in sources for key, placed in source.placed.items() if placed.shape[0]}
    for pool in scene.pools:
        for part in pool.parts:
            placed = rank.placed.get((pool.name, part.label))
            if placed is not None and placed.shape[0] and (pool.name, part.label) in sent:
                positions = np.arange(*moved(scene, pool, rank.keeping[pool.name]))
                rank.write(pool, part, positions, image, mask)
    return image, mask


def _where(what: str, scene: Scene, rank: Rank, wrong: Any) -> str:
    first = int(np.flatnonzero(wrong)[0])
    for (pool, label), placed in rank.placed.items():
        if placed.shape[0]:
            mark = np.zeros(len(rank.space.data), np.uint8)
            rank.space.view(placed, mark)[...] = np.frombuffer(b"\xff" * 8, placed.dtype)[0]
            if mark[first]:
                return f"{pool}/{label} of rank {rank.inventory.rank} {what}: byte {first}"
    return f"memory of rank {rank.inventory.rank} outside every buffer {what}: byte {first}"
