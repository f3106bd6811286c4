"""Items that are larger on decode, as with multi-token prediction; and what cannot be right, refused at connect."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statelink import plan, state
from statelink.errors import MismatchError, StateError
from statelink.state import Buffer, Component, Inventory, Layout, Partition, Slab

from .carry import check_parts, compile_both, copy
from .engine import over_the_wire
from .space import Placed, Space, Wanted
from .strategies import PROFILE

EXAMPLES = 60


@dataclass
class Bench:
    """One rank with one pool of items that move whole."""

    space: Space
    inventory: Inventory
    seen: Inventory
    placed: Placed


@dataclass(frozen=True)
class Pool:
    rows: int
    width: int
    items: int
    ids: tuple[int, ...]
    padded: bool
    optional: int
    """Rows at the end that the other side may lack."""


def bench(name: str, pool: Pool, kind: dict[str, Any], rank: int, ranks: int, rng: np.random.Generator) -> Bench:
    space = Space(rng, one_region=False)
    [placed] = space.place([Wanted(pool.items, (pool.rows, pool.width), "uint16")], "separate", padded=pool.padded)
    space.seal()
    memory = space.memory(placed)
    most = pool.rows - pool.optional
    row = 2 * pool.width
    slabs = [Slab((0, 0), (most, pool.width), 0, (row, 2))]
    if pool.optional:
        slabs.append(Slab((most, 0), (pool.rows, pool.width), most * row, (row, 2), optional=True))
    layout = Layout("uint16", 2, (pool.rows, pool.width), ("row", "width"), tuple(slabs))
    stride = memory.strides[0] if pool.items > 1 else layout.nbytes
    buffer = Buffer("layers.1.state", 0, memory.offset, stride, pool.items, layout, 1)
    component = Component(buffers=(buffer,), **kind)
    inventory = Inventory(
        instance=name, rank=rank, ranks=ranks, components=(component,), regions=(memory.region,), model="m"
    )
    return Bench(space, inventory, over_the_wire(inventory), placed)


SLOT: dict[str, Any] = {"name": "qsa_pending", "type": "qsa_pending", "replicated": True}
PAGE: dict[str, Any] = {"name": "swa", "type": "swa", "page": 4, "window": 8, "replicated": True}
TOKENS = 14
"""The window [6, 14) lies in pages 1, 2 and 3."""


@st.composite
def pools(draw: st.DrawFn) -> tuple[Pool, Pool, dict[str, Any], tuple[int, int]]:
    kind: dict[str, Any] = draw(st.sampled_from([SLOT, PAGE]))
    needed = 1 if kind is SLOT else 3
    both, width = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    side = st.sampled_from([0, 0, 1, 2, 5])
    made = []
    for surplus in (draw(side), draw(side)):
        items = needed + draw(st.integers(0, 4))
        ids = draw(st.permutations(range(items)))[:needed]
        made.append(Pool(both + surplus, width, items, tuple(ids), draw(st.booleans()), surplus))
    return made[0], made[1], kind, draw(st.sampled_from([(1, 1), (2, 1), (1, 2)]))


def test_what_only_one_side_has_stays_as_it_is() -> None:
    counted = 0

    @settings(PROFILE, max_examples=EXAMPLES)
    @given(pools(), st.integers(0, 1 << 32))
    def check(drawn: tuple[Pool, Pool, dict[str, Any], tuple[int, int]], seed: int) -> None:
        nonlocal counted
        source, target, kind, widths = drawn
        rng = np.random.default_rng(seed)
        sources = [bench("prefill", source, kind, rank, widths[0], rng) for rank in range(widths[0])]
        targets = [bench("decode", target, kind, rank, widths[1], rng) for rank in range(widths[1])]
        for other in sources[1:]:
            other.space.view(other.placed)[...] = sources[0].space.view(sources[0].placed)
        expected = []
        shared = min(source.rows, target.rows)
        for each in targets:
            image = each.space.data.copy()
            pool = each.space.view(each.placed, image)
            pool[list(target.ids), :shared] = sources[0].space.view(sources[0].placed)[list(source.ids), :shared]
            expected.append(image)
        written = [np.zeros(len(each.space.data), np.uint8) for each in targets]
        carried(sources, targets, source, target, written)
        for each, image, times in zip(targets, expected, written, strict=True):
            assert np.array_equal(each.space.data, image)
            assert times.max(initial=0) <= 1
            assert times.sum() == len(target.ids) * shared * source.width * 2
        counted += source.rows != target.rows

    check()
    assert counted >= EXAMPLES // 3


def carried(
    sources: list[Bench], targets: list[Bench], source: Pool, target: Pool, written: list[np.ndarray[Any, Any]]
) -> None:
    sides = [each.seen for each in sources], [each.inventory for each in targets]
    plan.match(*sides)
    parts = plan.route(*sides)
    check_parts(parts, len(sources), len(targets))
    for part in parts:
        here, there = targets[part.target], sources[part.source]
        for component in compile_both(there, here, part).components.values():
            items = plan.pushed(component.source, TOKENS, 0, (0, TOKENS), list(source.ids))
            wanted = plan.required(component.target, TOKENS, 0, list(target.ids))
            owed = plan.due(component.source, component.target, TOKENS, 0)
            for batch in plan.plan_move(component, items, wanted, owed).blocks():
                copy(batch, there, here, written[part.target])


@pytest.mark.parametrize("kind", [SLOT, PAGE], ids=["slot", "page"])
@pytest.mark.parametrize(("prefill", "decode"), [(8, 16), (16, 8)])
def test_a_larger_item_whose_surplus_is_not_optional_is_refused_with_both_sizes(
    kind: dict[str, Any], prefill: int, decode: int
) -> None:
    rng = np.random.default_rng(3)
    pool = Pool(prefill, 2, 4, (0,), False, 0)
    source = bench("prefill", pool, kind, 0, 1, rng).inventory
    target = bench("decode", replace(pool, rows=decode), kind, 0, 1, rng).inventory
    with pytest.raises(MismatchError) as caught:
        plan.match([source], [target])
    assert f"extent of axis 'row': {decode} on decode, {prefill} on prefill" in str(caught.value)


def test_the_offsets_of_a_half_size_item() -> None:
    """§6.5: page 5 of 8 rows at the source is row 40, and row 80 of a destination with 16 rows a page."""
    rng = np.random.default_rng(3)
    kind = {**PAGE, "window": 1}
    source = bench("prefill", Pool(8, 1, 8, (5,), False, 0), kind, 0, 1, rng)
    target = bench("decode", Pool(16, 1, 8, (5,), False, 8), kind, 0, 1, rng)
    [part] = plan.route([source.inventory], [target.inventory])
    component = compile_both(source, target, part).components["swa"]
    items = plan.pushed(component.source, 4, 0, (0, 4), [5])
    wanted = plan.required(component.target, 4, 0, [5])
    move = plan.plan_move(component, items, wanted, plan.due(component.source, component.target, 4, 0))
    [batch] = move.blocks()
    starts = [
        each.inventory.regions[0].address + each.inventory.components[0].buffers[0].offset for each in (source, target)
    ]
    assert [int(batch.source[0]) - starts[0], int(batch.target[0]) - starts[1]] == [40 * 2, 80 * 2]
    assert batch.nbytes.tolist() == [16]


@pytest.mark.parametrize("kind", [{"type": "qsa_pending"}, {"type": "swa", "page": 4, "window": 4}])
def test_spare_rows_are_said_with_the_constructor(kind: dict[str, Any]) -> None:
    """Rings of 8 rows, and of 16 where decode speculates: each at its own stride, and the second half untouched."""
    arrays = np.arange(4 * 8 * 3, dtype=np.uint16).reshape(4, 8, 3), np.zeros((4, 16, 3), np.uint16)

    def described(number: int, spare: Any) -> Inventory:
        return state.describe("x", [state.whole_items({"ring": arrays[number]}, spare=spare, **kind)])

    source, target = described(0, 0), described(1, 8)
    with pytest.raises(MismatchError, match="extent of axis 'axis0': 16 on decode, 8 on prefill"):
        plan.match([source], [described(1, 0)])
    plan.match([source], [target])
    [part] = plan.route([source], [target])
    [component] = plan.compile_pair(source, target, part).components.values()
    items = plan.pushed(component.source, 4, 0, (0, 4), [3])
    wanted = plan.required(component.target, 4, 0, [2])
    move = plan.plan_move(component, items, wanted, plan.due(component.source, component.target, 4, 0))
    [batch] = move.blocks()
    assert batch.nbytes.tolist() == [8 * 3 * 2]
    assert int(batch.source[0]) - arrays[0].ctypes.data == 3 * 8 * 3 * 2
    assert int(batch.target[0]) - arrays[1].ctypes.data == 2 * 16 * 3 * 2
    for wrong in (-1, 16, 1.0):
        with pytest.raises(StateError, match="spare"):
            described(1, wrong)


def pages(page: int = 4, heads: int = 2, **fields: Any) -> Inventory:
    arrays = [state.Memory.pointer(0x1000 * (n + 1), (8, page, heads, 2), "uint8", 1) for n in range(2)]
    return state.describe("x", [state.kv_pages({0: (arrays[0], arrays[1])}, heads=heads, **fields)])


@pytest.mark.parametrize(
    ("prefill", "decode", "text"),
    [
        (1.0, 2.0, "kv/layers.0.k: scale: 2.0 on decode, 1.0 on prefill"),
        (None, 2.0, "kv/layers.0.k: scale: 2.0 on decode, None on prefill"),
        (0.5, None, "kv/layers.0.k: scale: None on decode, 0.5 on prefill"),
    ],
)
def test_scales_that_differ_are_refused(prefill: float | None, decode: float | None, text: str) -> None:
    sides = [pages(scales={0: (scale, 1.0)}) for scale in (prefill, decode)]
    with pytest.raises(MismatchError) as caught:
        plan.match([sides[0]], [sides[1]])
    assert text in str(caught.value)
    plan.match([sides[0]], [sides[0]])


def compressed(page: int, rows: int) -> Inventory:
    array = state.Memory.pointer(0x1000, (8, rows, 3), "uint8", 1)
    return state.describe("x", [state.compressed_pages({0: {"kv": array}}, page=page)])


def test_rows_that_stand_for_different_numbers_of_positions_are_refused() -> None:
    with pytest.raises(MismatchError, match="positions a row: 4 on decode, 3 on prefill"):
        plan.match([compressed(6, 2)], [compressed(8, 2)])


def scales(partition: Partition) -> Inventory:
    array = state.Memory.pointer(0x1000, (8, 10), "uint8", 1)
    return state.describe("x", [state.whole_items({"k": array}, type="block_scale", page=4, partition=partition)])


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize("dealing", ["prefill", "decode"])
def test_items_that_dealing_would_cut_are_refused(block: int, dealing: str) -> None:
    """Decode context parallelism deals single tokens: an item without rows cannot be dealt out so."""
    sides = {"prefill": scales(Partition()), "decode": scales(Partition())}
    sides[dealing] = scales(Partition("cyclic", 2, 0, block))
    with pytest.raises(MismatchError) as caught:
        plan.match([sides["prefill"]], [sides["decode"]])
    assert "an item without an axis of positions would be cut" in str(caught.value)
    assert f"positions dealt out in blocks of {block} on {dealing}" in str(caught.value)
    plan.match([scales(Partition())], [scales(Partition("cyclic", 2, index, 8)) for index in range(2)])


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_positions_that_nobody_holds_are_refused(missing: int) -> None:
    sources = [
        msgspec.structs.replace(pages(partition=Partition("contiguous", 3, index)), rank=index, ranks=3)
        for index in range(3)
        if index != missing
    ]
    with pytest.raises(MismatchError, match=f"nobody holds share {missing} of 3"):
        plan.route(sources, [pages()])
