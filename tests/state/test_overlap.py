"""Buffers whose items interlock: refused exactly where they have a byte in common."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import numpy as np
import pytest

from statelink import state
from statelink.errors import StateError
from statelink.state import Buffer, Component, Inventory, Layout, Region, Slab

from .look import elements, zeros

COUNT = 3


def drawn(rng: Random) -> tuple[list[Buffer], int]:
    """Some buffers with one stride, whose first items begin within one stride, and that stride."""
    layouts = []
    for _ in range(rng.randint(1, 2)):
        itemsize = rng.choice([1, 2, 4])
        counts = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 4)
        axes = rng.sample(range(3), 3)
        strides, extent = [0, 0, 0], itemsize
        for axis in axes:
            strides[axis] = extent + rng.choice([0, extent, 2 * extent, rng.randint(0, 3 * extent)])
            extent += strides[axis] * (counts[axis] - 1)
        slab = Slab((0, 0, 0), counts, rng.randint(0, 5), tuple(strides))
        layouts.append(Layout("x", itemsize, counts, ("token", "head", "dim"), (slab,), position=0))
    page = {layout.shape[0] for layout in layouts}
    layouts = layouts if len(page) == 1 else layouts[:1]
    stride = max(layout.nbytes for layout in layouts) + rng.choice([0, 0, 1, 7, 40])
    buffers = [
        Buffer(f"b{number}", 0, 100 + rng.randrange(stride), stride, COUNT, rng.choice(layouts))
        for number in range(rng.choice([2, 2, 3]))
    ]
    return buffers, stride


def refusal(buffers: list[Buffer]) -> str:
    """Why a rank cannot hold these buffers; empty if it can."""
    component = Component(name="kv", type="kv", buffers=tuple(buffers), page=buffers[0].layout.shape[0])
    try:
        Inventory(instance="p", components=(component,), regions=(Region(1 << 30, 1 << 20),))
    except StateError as error:
        return str(error)
    return ""


def touched(buffer: Buffer) -> set[int]:
    """The bytes of a buffer, one after the other."""
    found: set[int] = set()
    (slab,) = buffer.layout.slabs
    for item in range(buffer.count):
        for place in itertools.product(*map(range, buffer.layout.shape)):
            inner = sum(n * stride for n, stride in zip(place, slab.strides, strict=True))
            begin = buffer.offset + item * buffer.stride + slab.offset + inner
            found.update(range(begin, begin + buffer.layout.itemsize))
    return found


def test_what_has_a_byte_in_common_is_refused_and_nothing_else() -> None:
    counted = {True: 0, False: 0}
    interlocked = 0
    for seed in range(1500):
        buffers, stride = drawn(Random(seed))
        bytes_of = {repr(buffer.name): touched(buffer) for buffer in buffers}
        common = any(a & b for a, b in itertools.combinations(bytes_of.values(), 2))
        said = refusal(buffers)
        assert bool(said) is common, (seed, said)
        counted[common] += 1
        if said:
            first, second = (bytes_of[name] for name in bytes_of if name in said)
            assert first & second, (seed, said)
        else:
            ordered = sorted(buffer.offset for buffer in buffers)
            size = max(buffer.layout.nbytes for buffer in buffers)
            interlocked += any(b - a < size for a, b in itertools.pairwise((*ordered, ordered[0] + stride)))
    assert min(counted.values()) > 200
    assert interlocked > 50


@pytest.mark.parametrize("order", ["hnd", "nhd"])
def test_keys_and_values_may_take_turns_in_a_page(order: str) -> None:
    both: Any = np.arange(5 * 4 * 2 * 7, dtype=np.uint16).reshape(5, 4, 2, 7)
    pair = both[..., :3], both[..., 3:]
    heads = 2 if order == "nhd" else 4
    inventory = state.describe("p", [state.kv_pages({0: pair}, heads=heads, order=order)])
    assert len(inventory.regions) == 1
    for part, array in zip("kv", pair, strict=True):
        found = elements(inventory, "kv", f"layers.0.{part}")
        assert len(found) == array.size
        for (page, token, head, dim), raw in found.items():
            row, column = (token, head) if order == "nhd" else (head, token)
            assert raw == array[page, row, column, dim].tobytes()


def test_keys_that_reach_into_the_values_beside_them_are_refused() -> None:
    both = zeros(5, 4, 2, 7)
    with pytest.raises(StateError, match=r"'layers\.0\.k' and 'layers\.0\.v' of component 'kv' overlap in memory"):
        state.describe("p", [state.kv_pages({0: (both[..., :4], both[..., 3:])}, heads=2)])


def test_many_buffers_that_interlock_are_compared_once_for_each_distance() -> None:
    """64 layers in turns: 2016 pairs, and 63 distances."""
    both = zeros(40, 4, 2, 64, 6)
    arrays = {n: (both[..., n, :3], both[..., n, 3:]) for n in range(64)}
    assert len(state.describe("p", [state.kv_pages(arrays, heads=2)]).component("kv").buffers) == 128


def test_items_of_too_many_pieces_are_not_compared() -> None:
    both = zeros(2, 1 << 10, 1 << 10, 2)
    with pytest.raises(StateError, match="interlock in too many pieces: 2097152 contiguous pieces"):
        state.describe("p", [state.kv_pages({0: (both[..., :1], both[..., 1:])}, heads=1 << 10)])
