"""What a caller passes by mistake to any function that describes state is refused in Statelink's own words."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.helpers.bad_values import BAD, escaped

from statelink import Pages, indices_of, state
from statelink.errors import RoomError, StateError
from statelink.state import Axis, Coverage, IndexSpace, Memory, Partition, Region

PAGES = np.zeros((4, 2, 1, 3), np.uint8)
ROWS = np.zeros((4, 2, 3), np.uint8)
RAW = np.zeros((4, 64), np.uint8)
LAYOUT = state.Layout("uint8", 1, (2,), ("x",), (state.Slab((0,), (2,), 0, (1,)),))
BUFFER = state.Buffer("x", 0, 0, 2, 1, LAYOUT)
REGION = Region(4096, 64)
PACKED = (state.PackedState("conv", (4, 2), "uint8", 1), state.PackedState("ssm", (2, 3), "uint8", 1))
COMPONENT = state.kv_pages({0: (PAGES, PAGES)}, heads=1).component
RING = state.ring_rows({0: {"k": np.zeros((3, 4, 2), np.uint8)}}, type="swa_ring", window=2).component
WIDE_RING = state.ring_rows({0: {"k": np.zeros((3, 4, 2), np.uint8)}}, type="swa_ring", window=1 << 40).component

KEYS = {"layers": {0: (PAGES, PAGES)}, "heads": 1}
FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "kv_pages": (state.kv_pages, {**KEYS, "scales": {0: (1.0, 1.0)}}),
    "kv_pages with windows": (state.kv_pages, {**KEYS, "window": 4}),
    "kv_pages with attention chunks": (state.kv_pages, {**KEYS, "attention_chunk": 4}),
    "mla_pages": (state.mla_pages, {"layers": {0: ROWS}}),
    "index_pages": (state.index_pages, {"layers": {0: ROWS}}),
    "compressed_pages": (state.compressed_pages, {"layers": {0: {"k": ROWS}}, "page": 4}),
    "planar_pages": (state.planar_pages, {"layers": {0: RAW}, "fields": [("k", 2), ("s", 2)], "name": "x"}),
    "fused_pages": (state.fused_pages, {"layers": {0: PAGES.swapaxes(1, 2)}, "heads": 1, "keys": 1}),
    "mamba_slots": (
        state.mamba_slots,
        {
            "conv": {0: np.zeros((4, 4, 2), np.uint8)},
            "ssm": {0: np.zeros((4, 2, 3), np.uint8)},
            "conv_groups": [2, (2, 1)],
            "heads": 2,
        },
    ),
    "packed_slots": (state.packed_slots, {"layers": {0: RAW}, "states": PACKED, "heads": 2}),
    "ring_rows": (
        state.ring_rows,
        {"layers": {0: {"k": np.zeros((3, 4, 2), np.uint8)}}, "type": "swa_ring", "window": 2},
    ),
    "whole_items": (state.whole_items, {"arrays": {"x": ROWS}, "type": "qsa_pending", "layers": {"x": 0}}),
    "aux_rows": (state.aux_rows, {"rows": {"x": ROWS}}),
    "describe": (
        state.describe,
        {"instance": "x", "components": [state.aux_rows({"x": ROWS})], "axes": {"pp": (0, 1)}},
    ),
    "Memory.pointer": (
        Memory.pointer,
        {"address": 4096, "shape": (2, 3), "dtype": "uint8", "itemsize": 1, "strides": (3, 1), "region": REGION},
    ),
    "Memory.of": (Memory.of, {"array": ROWS}),
    "Memory": (
        Memory,
        {"address": 4096, "shape": (2, 3), "strides": (3, 1), "dtype": "uint8", "itemsize": 1, "region": REGION},
    ),
    "Region": (Region, {"address": 4096, "nbytes": 1}),
    "Axis": (Axis, {"index": 0, "size": 1}),
    "Partition": (Partition, {"kind": "cyclic", "size": 2, "index": 0, "block": 1}),
    "Slab": (state.Slab, {"start": (0,), "stop": (2,), "offset": 0, "strides": (1,), "step": (1,)}),
    "Layout": (
        state.Layout,
        {"dtype": "uint8", "itemsize": 1, "shape": (2,), "axes": ("x",), "slabs": LAYOUT.slabs},
    ),
    "Buffer": (
        state.Buffer,
        {"name": "x", "region": 0, "offset": 0, "stride": 2, "count": 1, "layout": LAYOUT, "layer": 0, "scale": 1.0},
    ),
    "Component": (state.Component, {"name": "x", "type": "kv", "buffers": (BUFFER,), "page": 2}),
    "Inventory": (
        state.Inventory,
        {"instance": "x", "components": (), "regions": (REGION,), "axes": {"tp": Axis(0, 1)}},
    ),
    "PackedState": (state.PackedState, {"kind": "conv", "shape": (2, 2), "dtype": "uint8", "itemsize": 1}),
    "StateType": (
        state.StateType,
        {"name": "x", "index": IndexSpace.PAGE, "coverage": Coverage.SUFFIX, "aliases": ("y",)},
    ),
    "register_state_type": (state.register_state_type, {"new": state.state_type("kv")}),
    "state_type": (state.state_type, {"name": "kv"}),
    "indices_of": (
        indices_of,
        {"component": COMPONENT, "tokens": 4, "pages": Pages([1, 0], 0), "slot": 1, "ring": 4},
    ),
    "indices_of, table": (indices_of, {"component": COMPONENT, "tokens": 4, "table": [0, 1, 2, 3]}),
    "indices_of, ring": (indices_of, {"component": RING, "tokens": 4, "slot": 1, "ring": 4}),
}
"""Each function, with arguments that it takes; the others have their defaults."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_argument_makes_a_description_fail_in_other_words_than_statelinks(name: str) -> None:
    call, given = FUNCTIONS[name]
    call(**given)
    found = {}
    for argument in inspect.signature(call).parameters:

        def other(value: Any, argument: str = argument) -> object:
            return call(**{**given, argument: value})

        if said := escaped(other, BAD):
            found[argument] = said
    assert not found


@pytest.mark.parametrize("given", [{"pages": [0]}, {"table": [0]}])
def test_more_items_than_a_component_has_are_refused_before_they_are_listed(given: dict[str, Any]) -> None:
    with pytest.raises(RoomError, match="the request has 549755813888 items, and at most 4 are possible"):
        indices_of(COMPONENT, 1 << 40, **given)
    slot: dict[str, Any] = {"slot": 0, "ring": 1 << 40}
    with pytest.raises(RoomError, match="and at most 12 are possible"):
        indices_of(WIDE_RING, 1 << 40, **slot)
    lent = state.mla_pages({0: np.zeros((0, 2, 3), np.uint8)}).component
    with pytest.raises(RoomError, match="and at most 4194304 are possible"):
        indices_of(lent, 1 << 40, **given)


@pytest.mark.parametrize("layer", [1 << 31, 1 << 63, 1 << 64, -1, True, "0", 0.0, 2**4000])
def test_a_number_that_no_layer_has(layer: Any) -> None:
    with pytest.raises(
        StateError, match=r"a key of 'layers' of kv_pages is .*a whole number (from 0 to 2147483647 )?is"
    ):
        state.kv_pages({layer: (PAGES, PAGES)}, heads=1)
    with pytest.raises(StateError, match=r"the layer of buffer 'x' is "):
        state.Buffer("x", 0, 0, 2, 1, LAYOUT, layer)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "x", True, 1j, 2**4000])
def test_a_scale_that_is_no_number(scale: Any) -> None:
    with pytest.raises(StateError, match=r"the scale of buffer 'layers.0.v' is .*a finite number is expected"):
        state.kv_pages({0: (PAGES, PAGES)}, heads=1, scales={0: (1.0, scale)})


@pytest.mark.parametrize("wrong", [5, None, b"x", "\ud800", "x" * 100_000])
def test_a_text_that_is_none(wrong: Any) -> None:
    with pytest.raises(StateError, match="'format' of kv_pages"):
        state.kv_pages({0: (PAGES, PAGES)}, heads=1, format=wrong)
    with pytest.raises(StateError, match="'model' of describe"):
        state.describe("x", [], model=wrong)


def test_numbers_of_numpy_become_pythons() -> None:
    n: Any = np.int64
    yes: Any = np.True_
    made = state.kv_pages(
        {n(3): (PAGES, PAGES)}, heads=n(1), tp=(n(0), n(1)), scales={3: (n(2), np.float32(2))}, optional=yes
    )
    plain = state.kv_pages({3: (PAGES, PAGES)}, heads=1, scales={3: (2.0, 2.0)}, optional=True)
    assert made == plain
    found = [
        type(getattr(buffer, field)) for buffer in made.component.buffers for field in ("layer", "scale", "optional")
    ]
    assert set(found) == {int, float, bool}
