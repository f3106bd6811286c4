"""Keys and values that take turns in a page move as the page does, and meet separate arrays on the other side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from statelink import plan, state
from statelink.plan import compile_pair, route

from .small import STEP, Moved, describe, moves, pointer

if TYPE_CHECKING:
    from statelink.state import Inventory, Memory

PAGES, HEADS, PAGE, DIM, LAYERS = 6, 2, 4, 3, 3
CONTENT = 2 * DIM
WHOLE = HEADS * PAGE * CONTENT
"""Bytes of a page of one layer."""


def stacked(number: int, order: str, page: int = PAGE) -> dict[int, Memory]:
    """One allocation with the pages of all layers in some order, by layer as ``[pages, heads, tokens, content]``."""
    sizes = dict(zip("LBHNC", (LAYERS, PAGES, HEADS, page, CONTENT), strict=True))
    stride, at = {}, 1
    for axis in reversed(order):
        stride[axis], at = at, at * sizes[axis]
    region = state.Region(number * STEP, at)
    return {
        layer: state.Memory.pointer(
            number * STEP + layer * stride["L"],
            tuple(sizes[axis] for axis in "BHNC"),
            "uint8",
            1,
            strides=tuple(stride[axis] for axis in "BHNC"),
            region=region,
        )
        for layer in range(LAYERS)
    }


def fused(name: str, number: int, order: str = "LBHNC", page: int = PAGE, **fields: Any) -> Inventory:
    return describe(name, state.fused_pages(stacked(number, order, page), heads=HEADS, keys=DIM, **fields))


def apart(name: str) -> Inventory:
    """Keys and values in arrays of their own, tokens before heads."""
    shape = PAGES, PAGE, HEADS, DIM
    pairs = {layer: (pointer(10 + 2 * layer, *shape), pointer(11 + 2 * layer, *shape)) for layer in range(LAYERS)}
    return describe(name, state.kv_pages(pairs, heads=HEADS))


def every(source: Inventory, target: Inventory, tokens: int, ids: tuple[Any, Any], **more: Any) -> list[Moved]:
    return moves(source, target, None, "kv", ids, tokens=tokens, **more)


def compiled(source: Inventory, target: Inventory) -> plan.ComponentPlan:
    (part,) = (part for part in route([source], [target]) if part.shares)
    return compile_pair(source, target, part).components["kv"]


@pytest.mark.parametrize("halves", [False, True])
def test_a_page_that_is_alike_on_both_sides_is_one_block(halves: bool) -> None:
    found = every(fused("p", 1, halves=halves), fused("d", 2, halves=halves), 8, ([4, 1], [0, 3]))
    area = PAGES * WHOLE
    expected = [
        (STEP + layer * area + s * WHOLE, 2 * STEP + layer * area + t * WHOLE, WHOLE)
        for layer in range(LAYERS)
        for s, t in ((4, 0), (1, 3))
    ]
    assert sorted(found) == sorted(expected)


def test_layers_that_are_alike_share_one_table_and_one_group() -> None:
    component = compiled(fused("p", 1), fused("d", 2))
    assert [len(group.source) for group in component.fused] == [LAYERS]
    assert [len(group.source) for group in component.layered] == [LAYERS]
    assert component.layered[0].layers.tolist() == [0, 1, 2]
    assert sum(len(group.source) for group in component.groups) == 2 * LAYERS
    assert component.item_blocks == LAYERS
    assert component.block_nbytes == WHOLE


def test_a_push_of_one_layer_is_joined_too() -> None:
    found = every(fused("p", 1, "BLHNC"), fused("d", 2, "BLHNC"), 4, ([5], [2]), layers=(1, 2))
    envelope = LAYERS * WHOLE
    assert found == [(STEP + 5 * envelope + WHOLE, 2 * STEP + 2 * envelope + WHOLE, WHOLE)]


def test_pages_that_hold_all_layers_are_one_block() -> None:
    found = every(fused("p", 1, "BLHNC"), fused("d", 2, "BLHNC"), 4, ([5], [2]))
    envelope = LAYERS * WHOLE
    assert found == [(STEP + 5 * envelope, 2 * STEP + 2 * envelope, envelope)]


@pytest.mark.parametrize("layers", [None, (0, 1), (1, LAYERS), (0, LAYERS), (LAYERS, LAYERS + 1)])
def test_what_a_push_of_some_layers_becomes_at_most(layers: tuple[int, int] | None) -> None:
    """As many blocks and bytes as a page becomes of those layers alone."""
    for target in (fused("d", 2), fused("d", 2, page=2 * PAGE), apart("d")):
        source = fused("p", 1)
        found = every(source, target, PAGE, ([2], [5]), layers=layers)
        assert compiled(source, target).most(layers) == (len(found), sum(each[2] for each in found))


def test_what_would_make_too_long_tables_is_moved_as_it_is() -> None:
    """A table has at most two million pieces: a key and a value of each layer, head and token of a page."""
    longest = (1 << 21) // (LAYERS * 2 * HEADS)
    for page, blocks in ((longest, 1), (longest + 1, LAYERS * 2 * HEADS * (longest + 1))):
        found = compiled(fused("p", 1, "BLHNC", page), fused("d", 2, "BLHNC", page))
        assert found.item_blocks == blocks
