"""What a push moves, to the byte: as few blocks as possible, with addresses that no float has touched."""

from __future__ import annotations

import tracemalloc

import numpy as np

from statelink import plan, state
from statelink.state import Inventory, Memory, Region

from .small import STEP, describe, keys, moves, pointer, ranks


def mla(name: str, layers: int, *, pages: int = 64) -> Inventory:
    return describe(name, state.mla_pages({n: pointer(n + 1, pages, 16, 8) for n in range(layers)}))


def envelope(name: str, layers: int, *, order: int = 1, pages: int = 64) -> Inventory:
    """All layers of a page side by side."""
    item = 16 * 8
    region = Region(STEP, pages * layers * item)
    places = range(layers)[::order]
    arrays = {
        layer: Memory.pointer(
            STEP + place * item, (pages, 16, 8), "uint8", 1, strides=(layers * item, 8, 1), region=region
        )
        for layer, place in enumerate(places)
    }
    return describe(name, state.mla_pages(arrays))


def stacked(name: str, layers: int, *, pages: int = 64) -> Inventory:
    """All layers in one allocation, one after the other."""
    size = pages * 16 * 8
    region = Region(STEP, layers * size)
    arrays = {
        layer: Memory.pointer(STEP + layer * size, (pages, 16, 8), "uint8", 1, region=region) for layer in range(layers)
    }
    return describe(name, state.mla_pages(arrays))


def count(p: Inventory, d: Inventory, source: list[int], target: list[int]) -> int:
    (part,) = plan.route([p], [d])
    found = moves(p, d, part, "kv", (source, target), tokens=16 * len(source))
    assert sum(n for _, _, n in found) == len(source) * 16 * 8 * len(p.components[0].buffers)
    return len(found)


def test_contiguous_pages_are_one_block_a_layer() -> None:
    run = list(range(10, 42))
    assert count(mla("p", 6), mla("d", 6), run, run) == 6
    assert count(mla("p", 6), mla("d", 6), run, [*range(0, 16), *range(40, 56)]) == 12
    assert count(mla("p", 6), mla("d", 6), run, run[::-1]) == 6 * 32


def test_layers_of_one_allocation_are_one_block_each() -> None:
    run = list(range(10, 42))
    assert count(stacked("p", 6), stacked("d", 6), run, run) == 6
    assert count(stacked("p", 6), mla("d", 6), run, run) == 6
    assert count(stacked("p", 6), envelope("d", 6), run, run) == 6 * 32
    # One after the other on one side, whole: the end of a layer is the beginning of the next.
    everything = list(range(64))
    assert count(stacked("p", 1), stacked("d", 1), everything, everything) == 1


def test_an_envelope_on_both_sides_moves_whole_pages() -> None:
    run = list(range(10, 42))
    assert count(envelope("p", 6), envelope("d", 6), run, run) == 1
    assert count(envelope("p", 6), envelope("d", 6), run, run[::-1]) == 32
    # In another order, or against a layer each, every layer of a page is a block of its own.
    assert count(envelope("p", 6), envelope("d", 6, order=-1), run, run) == 6 * 32
    assert count(envelope("p", 6), mla("d", 6), run, run) == 6 * 32


def test_a_push_by_layers_takes_only_those_of_an_envelope() -> None:
    p, d = envelope("p", 6), envelope("d", 6)
    (part,) = plan.route([p], [d])
    found = moves(p, d, part, "kv", ([3, 4], [3, 4]), tokens=32, layers=(2, 4))
    assert sorted((s % STEP, n) for s, _, n in found) == [
        (page * 768 + layer * 128, 128) for page in (3, 4) for layer in (2, 3)
    ]
    assert moves(p, d, part, "kv", ([3, 4], [3, 4]), tokens=32, layers=(6, 9)) == []


def test_long_contiguous_runs_are_glued_beyond_one_batch() -> None:
    """One block for forty thousand neighbouring pages, though a batch holds fewer blocks."""
    count = 40_000
    inventory = describe("x", state.mla_pages({0: pointer(1, count, 2, 4)}))
    compiled = plan.compile_pair(inventory, inventory, plan.route([inventory], [inventory])[0]).components["kv"]
    ids, tokens = np.arange(count), 2 * count
    move = plan.plan_move(
        compiled,
        plan.pushed(compiled.source, tokens, None, (0, tokens), ids),
        plan.required(compiled.target, tokens, 0, ids),
        plan.due(compiled.source, compiled.target, tokens, 0),
    )
    batches = list(move.blocks())
    assert [batch.nbytes.tolist() for batch in batches] == [[move.nbytes]]
    assert sum(batch.total for batch in move.blocks(max_blocks=1)) == move.nbytes


def test_plans_of_many_runs_never_stand_in_memory_at_once() -> None:
    """A gibibyte in pieces of 256 bytes: four million blocks, of which a batch is what stands in memory."""
    pages = 1 << 15
    sources = ranks("p", 2, lambda r: keys([0], pages, 64, 1, 128, itemsize=2, heads=2, tp=(r, 2)))
    d = describe("d", keys([0], pages, 64, 2, 128, itemsize=2, heads=2))
    compiled = plan.compile_pair(sources[0], d, plan.route(sources, [d])[0]).components["kv"]
    tokens = pages * 64
    ids = np.arange(pages)
    move = plan.plan_move(
        compiled,
        plan.pushed(compiled.source, tokens, None, (0, tokens), ids),
        plan.required(compiled.target, tokens, 0, ids),
        plan.due(compiled.source, compiled.target, tokens, 0),
    )
    assert move.nbytes == 1 << 30
    tracemalloc.start()
    try:
        first = next(move.blocks())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 1 << 12 < first.count <= 1 << 13
    assert set(first.nbytes.tolist()) == {256}
    assert peak < 64 << 20
