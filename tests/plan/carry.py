"""Carries out a case with plain copies, and compares every byte of every decode rank with what it should be."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from statelink import plan
from statelink.link._verify import MODULUS, digest_of

from .case import Case, floor_to
from .engine import Rank, instance, over_the_wire

if TYPE_CHECKING:
    from statelink.plan import Assignment, Blocks, PairPlan

    from .space import Bytes, Holder

__all__ = ["Carried", "carry", "check_parts", "compile_both", "copy", "should_be"]


class Carried(NamedTuple):
    """What was seen on the way."""

    nbytes: dict[str, int]
    """Bytes per component."""
    blocks: int
    pairs: int
    idle: int


class Push(NamedTuple):
    """One call of an engine: these components, over this span and these layers."""

    components: tuple[str, ...]
    span: tuple[int, int]
    layers: tuple[int, int] | None


def carry(case: Case) -> Carried:
    """Move one request from every prefill rank to every decode rank, and check everything about it."""
    rng = np.random.default_rng(case.seed)
    sources = instance(case, case.source, "prefill", rng)
    targets = instance(case, case.target, "decode", rng)
    before = [rank.space.data.copy() for rank in (*sources, *targets)]
    written = [np.zeros(len(rank.space.data), np.uint8) for rank in targets]

    plan.match([rank.seen for rank in sources], [rank.inventory for rank in targets])
    parts = plan.route([rank.seen for rank in sources], [rank.inventory for rank in targets])
    # Every decode rank finds the same route, whatever order it learns of the others in.
    shuffled = [[side[int(n)].seen for n in rng.permutation(len(side))] for side in (sources, targets)]
    assert plan.route(*shuffled) == parts
    check_parts(parts, len(sources), len(targets))

    planned, blocks = 0, 0
    arrived: list[tuple[tuple[int, int, str], Iterator[plan.Content]]] = []
    nbytes: Counter[str] = Counter()
    digests: dict[tuple[int, int, str], int] = {}
    for part in parts:
        source, target = sources[part.source], targets[part.target]
        pair = compile_both(source, target, part)
        for component in pair.components.values():
            owed = plan.due(component.source, component.target, case.tokens, case.prefix)
            planned += component.granule_nbytes * len(owed)
            assert component.granule_nbytes == sum(component.layer_nbytes.values())
            name = component.target.name
            content = plan.arrived_content(component, _required(case, component, target.ids[name]), owed)
            arrived.append(((part.source, part.target, name), content))
        for move in _moves(case, source, target, pair, rng):
            promised = 0
            sent = digest_of(move.content(), memory=_memory_of(source))
            key = part.source, part.target, move.component
            digests[key] = (digests.get(key, 0) + sent) % MODULUS
            for batch in move.blocks(case.max_blocks):
                assert 0 < batch.count <= max(case.max_blocks, 1)
                copy(batch, source, target, written[part.target])
                promised += batch.total
                blocks += batch.count
            assert promised == move.nbytes
            nbytes[move.component] += promised

    assert planned == nbytes.total(), "what both sides count is not what moved"
    for rank, snapshot in zip(sources, before, strict=False):
        assert np.array_equal(rank.space.data, snapshot), "a source was written to"
    expected = 0
    for rank, snapshot, count in zip(targets, before[len(sources) :], written, strict=True):
        expected += _compare(case, rank, sources, snapshot, count)
    assert expected == nbytes.total()
    for key, content in arrived:
        assert digest_of(content, memory=_memory_of(targets[key[1]])) == digests.get(key, 0)
    busy = sum(bool(part.shares) for part in parts)
    return Carried(nbytes, blocks, busy, len(parts) - busy)


def _memory_of(rank: Holder) -> Callable[[int, int], Bytes]:
    def look(address: int, nbytes: int) -> Bytes:
        for region in rank.inventory.regions:
            if region.address <= address < region.address + region.nbytes:
                at = address - region.address + rank.space.start(region)
                assert address + nbytes <= region.address + region.nbytes, "content leaves its region"
                return rank.space.data[at : at + nbytes]
        raise AssertionError("content begins outside every region")

    return look


def _required(case: Case, component: plan.ComponentPlan, ids: Any) -> plan.Items:
    return plan.required(component.target, case.tokens, case.prefix, ids)


def copy(batch: Blocks, source: Holder, target: Holder, written: Bytes) -> None:
    """Plain copies, counting how often each byte of the target is written."""
    wide, narrow = (batch.source, batch.target, batch.nbytes), (batch.source_region, batch.target_region)
    assert {array.dtype.str for array in wide} == {"<u8"}
    assert {array.dtype.str for array in narrow} == {"<u4"}
    assert all(array.flags.c_contiguous for array in (*wide, *narrow))
    here = _locate(target, batch.target.tolist(), batch.target_region.tolist(), batch.nbytes.tolist())
    there = _locate(source, batch.source.tolist(), batch.source_region.tolist(), batch.nbytes.tolist())
    for t, s, n in zip(here, there, batch.nbytes.tolist(), strict=True):
        target.space.data[t : t + n] = source.space.data[s : s + n]
        written[t : t + n] += 1


def _locate(rank: Holder, addresses: list[int], regions: list[int], sizes: list[int]) -> list[int]:
    tables = [(region.address, region.nbytes, rank.space.start(region)) for region in rank.inventory.regions]
    found = []
    for address, number, nbytes in zip(addresses, regions, sizes, strict=True):
        base, length, start = tables[number]
        assert nbytes > 0
        assert base <= address, "a block begins before its region"
        assert address + nbytes <= base + length, "a block leaves its region"
        found.append(address - base + start)
    return found


def pack(move: plan.Move, expected: plan.Move, limit: int, source: Holder, target: Holder, written: Bytes) -> int:
    """The same by parcels: gathered at the source, and scattered by what the target knows itself; the bytes of all."""
    moved = 0
    for tiles in move.parcels(limit):
        there = [byte for tile in tiles for byte in _bytes_of(source, move.places(tile, "source"))]
        part = expected.only(move.layers)
        here = [byte for tile in tiles for byte in _bytes_of(target, part.places(tile, "target"))]
        assert 0 < len(there) == len(here) <= limit
        target.space.data[here] = source.space.data[there]
        np.add.at(written, here, 1)
        moved += len(here)
    return moved


def _bytes_of(rank: Holder, places: plan.Places) -> list[int]:
    """Where in the rank's data each byte of a tile is."""
    starts = (places.addresses[:, None] + places.rows.astype(np.uint64) * np.uint64(places.width)).ravel()
    found = []
    for region in rank.inventory.regions:
        begin, end = np.uint64(region.address), np.uint64(region.address + region.nbytes - places.width)
        inside = (starts >= begin) & (starts <= end)
        found.append(np.where(inside, (starts - begin).astype(np.int64) + rank.space.start(region), -1))
    at = np.max(found, axis=0)
    assert at.min() >= 0, "a row leaves its region"
    each: list[int] = (at[:, None] + np.arange(places.width)).ravel().tolist()
    return each


def check_parts(parts: list[Assignment], sources: int, targets: int) -> None:
    assert {part.source for part in parts} == set(range(sources)), "a source does not hear of the request"
    assert len({(part.source, part.target) for part in parts}) == len(parts)
    busy = {part.source for part in parts if part.shares}
    for part in parts:
        if not part.shares:
            assert part.source not in busy
            assert part.target == part.source % targets


def compile_both(source: Holder, target: Holder, part: Assignment) -> PairPlan:
    """Both sides compile from what they know themselves and what they were sent."""
    told = over_the_wire(part)
    at_source = plan.compile_pair(source.inventory, target.seen, told)
    at_target = plan.compile_pair(source.seen, target.inventory, part)
    assert told == part
    assert at_source.digest == at_target.digest
    assert len(at_source.digest) == 16
    return at_source


def _moves(case: Case, source: Rank, target: Rank, pair: PairPlan, rng: np.random.Generator) -> Iterator[plan.Move]:
    prefix = case.prefix if case.prefix_known else None
    wanted = {
        name: plan.required(component.target, case.tokens, case.prefix, _accepted(target, name, rng))
        for name, component in pair.components.items()
    }
    for push in _pushes(case, tuple(pair.components)):
        for name in push.components:
            component = pair.components[name]
            given = source.given(name, push.span, rng)
            items = plan.pushed(component.source, case.tokens, prefix, push.span, given)
            owed = plan.due(component.source, component.target, case.tokens, case.prefix)
            yield plan.plan_move(component, items, wanted[name], owed, push.layers)


def _accepted(target: Rank, component: str, rng: np.random.Generator) -> Any:
    ids = target.ids[component]
    if component not in ("mamba", "aux") and rng.integers(2):
        return plan.Pages(ids, target.first_page(component) * target.page(component))
    return ids.tolist()


def _pushes(case: Case, components: tuple[str, ...]) -> Iterator[Push]:
    """What an engine would push: pages chunk by chunk, states with the end, and metadata last of all."""
    unit = math.lcm(case.source.page, case.source.window_page)
    start = floor_to(case.prefix, unit) if case.prefix_known else 0
    ends = [min(max(end * unit, start), case.tokens) for end in case.chunks]
    spans = list(itertools.pairwise((start, *ends[:-1], case.tokens)))
    depth = max((case.model.depth, *(layer + 1 for layer in case.model.draft)))
    layered = tuple(itertools.pairwise((0, *case.layer_cuts, depth))) if case.layer_cuts else (None,)
    for number, span in enumerate(spans):
        last = number == len(spans) - 1
        paged = [name for name in components if name not in ("mamba", "aux") and span[0] < span[1]]
        named = (*paged, *(name for name in components if name == "mamba" and last))
        for layers in layered:
            yield Push(named, span, layers)
    if "aux" in components:
        yield Push(("aux",), spans[-1], None)


def _compare(case: Case, rank: Rank, sources: list[Rank], before: Bytes, written: Bytes) -> int:
    """Compare the rank's memory with what it should be now; returns how many bytes should have come."""
    image, mask = should_be(case, rank, sources, before)
    once = (mask > 0).astype(np.uint8)
    assert np.array_equal(written, once), _where("is not written exactly once", rank, written != once)
    assert np.array_equal(rank.space.data, image), _where("holds other bytes", rank, rank.space.data != image)
    return int(once.sum())


def should_be(case: Case, rank: Rank, sources: list[Rank], before: Bytes) -> tuple[Bytes, Bytes]:
    """Build by hand what the rank's memory should become, and a mask of what should come."""
    image, mask = before.copy(), np.zeros(len(before), np.uint8)
    sent = {(piece.component, piece.name) for source in sources for piece in source.pieces if piece.placed.shape[0]}
    for piece in rank.pieces:
        if piece.placed.shape[0] and (piece.component, piece.name) in sent:
            rank.write(piece, *case.span(piece.component), image, mask)
    return image, mask


def _where(what: str, rank: Rank, wrong: Any) -> str:
    first = int(np.flatnonzero(wrong)[0])
    for piece in rank.pieces:
        mark = np.zeros(len(rank.space.data), np.uint8)
        rank.space.view(piece.placed, mark)[...] = np.frombuffer(b"\xff" * 8, piece.local.dtype)[0]
        if mark[first]:
            return f"{piece.component}/{piece.name} of rank {rank.inventory.rank} {what}: byte {first}"
    return f"memory of rank {rank.inventory.rank} outside every buffer {what}: byte {first}"
