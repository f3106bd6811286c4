"""Pages with key and value side by side: the right share in every order of memory, or a refusal that says why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from statelink import state
from statelink.errors import StateError

from .look import elements, names, zeros

LAYERS, PAGES, HEADS, TOKENS, CONTENT = 3, 5, 2, 4, 6
ORDERS = ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"]


def views(order: str) -> dict[int, np.ndarray[Any, Any]]:
    """One allocation of distinct elements in some order, and a view of each layer with its axes in one order."""
    sizes = dict(zip("LBHNC", (LAYERS, PAGES, HEADS, TOKENS, CONTENT), strict=True))
    shape = [sizes[axis] for axis in order]
    whole = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    ordered = whole.transpose([order.index(axis) for axis in "LBHNC"])
    return {7 + 2 * number: ordered[number] for number in range(LAYERS)}


@pytest.mark.parametrize("order", ORDERS)
def test_a_page_by_token_in_every_order_of_memory(order: str) -> None:
    arrays = views(order)
    made = state.fused_pages(arrays, heads=8, tp=(1, 4))
    inventory = state.describe("p", [made])
    assert (made.component.type, made.component.page, made.component.name) == ("kv", TOKENS, "kv")
    assert names(made) == ["layers.7.kv", "layers.9.kv", "layers.11.kv"]
    assert len(inventory.regions) == 1
    layout = made.component.buffers[0].layout
    assert (layout.shape, layout.axes, layout.position) == ((TOKENS, 8, CONTENT), ("token", "head", "kv"), 0)
    for layer, array in arrays.items():
        found = elements(inventory, "kv", f"layers.{layer}.kv")
        assert len(found) == array.size
        for (page, token, head, cell), raw in found.items():
            assert raw == array[page, head - 2, token, cell].tobytes()


@pytest.mark.parametrize("order", ORDERS)
def test_keys_and_values_apart_in_every_order_of_memory(order: str) -> None:
    arrays = views(order)
    made = state.fused_pages(arrays, heads=2, keys=4)
    inventory = state.describe("p", [made])
    assert names(made) == [f"layers.{layer}.{part}" for layer in (7, 9, 11) for part in "kv"]
    assert len(inventory.regions) == 1
    assert [buffer.layout.axes for buffer in made.component.buffers] == [("token", "head", "dim")] * 6
    for layer, array in arrays.items():
        for part, cells in (("k", range(4)), ("v", range(4, 6))):
            found = elements(inventory, "kv", f"layers.{layer}.{part}")
            assert len(found) == PAGES * HEADS * TOKENS * len(cells)
            for (page, token, head, dim), raw in found.items():
                assert raw == array[page, head, token, cells[dim]].tobytes()


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC", "BHLNC"])
@pytest.mark.parametrize("keys", [3, 4])
def test_all_keys_of_a_head_before_its_values(order: str, keys: int) -> None:
    arrays = views(order)
    inventory = state.describe("p", [state.fused_pages(arrays, heads=2, keys=keys, halves=True)])
    for layer, array in arrays.items():
        for part, (before, width) in (("k", (0, keys)), ("v", (keys * TOKENS, CONTENT - keys))):
            found = elements(inventory, "kv", f"layers.{layer}.{part}")
            assert len(found) == PAGES * HEADS * TOKENS * width
            for (page, token, head, dim), raw in found.items():
                assert raw == array[page, head].reshape(-1)[before + token * width + dim].tobytes()


@pytest.mark.parametrize("halves", [False, True])
def test_keys_and_values_apart_are_what_separate_arrays_are(halves: bool) -> None:
    apart = state.describe("p", [state.kv_pages({0: (zeros(5, 4, 2, 3), zeros(5, 4, 2, 3))}, heads=2)])
    fused = state.describe("d", [state.fused_pages({0: zeros(5, 2, 8, 6)}, heads=2, keys=3, halves=halves)])
    assert apart.diff(fused) == []


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"keys": 6}, "the content of 'layers.7' is no key and a value: 6 elements of 6"),
        ({"keys": -1}, "the content of 'layers.7' is no key and a value: -1 elements"),
        ({"halves": True}, "pages have either a known number of elements of the key, or are opaque"),
        ({"keys": 3, "opaque": True}, "pages have either a known number of elements of the key, or are opaque"),
    ],
)
def test_keys_that_cannot_be_are_refused(given: dict[str, Any], what: str) -> None:
    with pytest.raises(StateError, match=what):
        state.fused_pages(views("LBHNC"), heads=2, **given)


def test_keys_before_values_need_the_tokens_of_a_head_next_to_each_other() -> None:
    with pytest.raises(StateError, match=r"the tokens of a head of 'layers\.7' are not next to each other"):
        state.fused_pages(views("LBNHC"), heads=2, keys=3, halves=True)


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC", "BHLNC"])
def test_an_opaque_page_is_one_run_of_bytes_for_each_head(order: str) -> None:
    arrays = views(order)
    made = state.fused_pages(arrays, heads=4, tp=(1, 2), opaque=True, window=9, name="g1", format="flash")
    component = made.component
    assert (component.type, component.name, component.window, component.page) == ("swa", "g1", 9, TOKENS)
    layout = component.buffers[0].layout
    assert (layout.shape, layout.axes, layout.position) == ((4, TOKENS * CONTENT), ("head", "cell"), None)
    found = elements(state.describe("p", [made]), "g1", "layers.9.kv")
    assert {key[1] for key in found} == {2, 3}
    for (page, head, cell), raw in found.items():
        assert raw == arrays[9][page, head - 2].reshape(-1)[cell].tobytes()


@pytest.mark.parametrize("opaque", [False, True])
def test_attention_chunks_are_the_groups_of_a_component(opaque: bool) -> None:
    made = state.fused_pages(views("LBHNC"), heads=4, tp=(1, 2), opaque=opaque, attention_chunk=64).component
    assert (made.type, made.name, made.window, made.group) == ("chunked_local", "chunked_local", None, 64)
    plain = state.fused_pages(views("LBHNC"), heads=4, tp=(1, 2), opaque=opaque).component
    assert (plain.type, plain.group) == ("kv", 1)
    assert [each.layout for each in made.buffers] == [each.layout for each in plain.buffers]
    with pytest.raises(StateError, match="either sliding windows or attention chunks: window is 9, attention_chunk 64"):
        state.fused_pages(views("LBHNC"), heads=4, tp=(1, 2), opaque=opaque, attention_chunk=64, window=9)


@pytest.mark.parametrize("order", ["LBNHC", "BLNHC"])
def test_opaque_pages_need_the_tokens_of_a_head_next_to_each_other(order: str) -> None:
    with pytest.raises(
        StateError, match=r"the tokens of a head of 'layers\.7\.kv' are not next to each other"
    ) as caught:
        state.fused_pages(views(order), heads=2, opaque=True)
    assert "heads before tokens" in str(caught.value)


@pytest.mark.parametrize("opaque", [False, True])
def test_an_order_with_heads_before_pages_is_refused(opaque: bool) -> None:
    with pytest.raises(StateError, match="is a transposed array"):
        state.describe("p", [state.fused_pages(views("LHBNC"), heads=2, opaque=opaque)])


def test_groups_of_layers_may_share_every_byte_of_an_allocation() -> None:
    arrays = views("LBHNC")
    groups = [
        state.fused_pages({n: arrays[7]}, heads=2, name=f"g{n}", window=window) for n, window in ((0, None), (1, 8))
    ]
    inventory = state.describe("p", groups)
    assert len(inventory.regions) == 1
    first, second = (each.buffers[0] for each in inventory.components)
    assert (first.offset, first.stride) == (second.offset, second.stride)


def test_what_a_rank_does_not_hold_is_refused() -> None:
    with pytest.raises(StateError, match="does not hold the share it should"):
        state.fused_pages({0: zeros(5, 2, 4, 6)}, heads=2, tp=(0, 2))
    with pytest.raises(StateError, match=r"needs the axes \[pages, heads, tokens, content\]"):
        state.fused_pages({0: zeros(5, 2, 4)}, heads=2)
    with pytest.raises(StateError, match="one number of tokens a page: they have 4, 8"):
        state.fused_pages({0: zeros(5, 2, 4, 6), 1: zeros(5, 2, 8, 6)}, heads=2)
    with pytest.raises(StateError, match="they have none"):
        state.fused_pages({}, heads=2)


def test_pages_of_another_size_fit_by_token_and_not_where_they_are_opaque() -> None:
    small, large = zeros(9, 2, 4, 6), zeros(9, 2, 8, 6)

    def sides(opaque: bool) -> list[str]:
        p, d = (
            state.describe(name, [state.fused_pages({0: array}, heads=2, opaque=opaque)])
            for name, array in (("p", small), ("d", large))
        )
        return [each.path for each in p.diff(d)]

    assert sides(opaque=False) == []
    assert sides(opaque=True) == [
        "kv/layers.0.kv: extent of axis 'cell'",
        "kv: tokens an item (buffer layers.0.kv has no position axis to split on)",
    ]
