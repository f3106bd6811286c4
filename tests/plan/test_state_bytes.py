"""Which part of the model's state bytes are: both sides say the same of one part, and of no other."""

from __future__ import annotations

from typing import Any

import pytest

from statelink import plan, state
from statelink.plan import Assignment, Box, Share

from .small import describe, pointer

Parts = set[tuple[int, int]]
"""Seeds, and numbers of granules."""


def parts(first: int = 0, layer: int = 0, name: str = "kv", tokens: int = 4, side: str = "source") -> Parts:
    """What a digest of two heads of the last four tokens is made of."""
    fields: Any = {"heads": 4, "tp": (first // 2, 2), "name": name}
    made = describe("x", state.kv_pages({layer: (pointer(1, 4, 2, 2, 3), pointer(2, 4, 2, 2, 3))}, **fields))
    share = Share(name, (f"layers.{layer}.k", f"layers.{layer}.v"), (Box((first, 0), (first + 2, 3)),))
    component = plan.compile_pair(made, made, Assignment(0, 0, (share,))).components[name]
    owed = plan.due(component.source, component.target, tokens, tokens - 4)
    items = plan.required(component.target, tokens, tokens - 4, [1, 2])
    if side == "target":
        found = plan.arrived_bytes(component, items, owed)
    else:
        found = plan.plan_move(component, items, items, owed).state_bytes()
    return {(seed, granule) for each in found for seed in each.seeds.tolist() for granule in each.granules.tolist()}


def test_both_sides_say_the_same() -> None:
    assert parts() == parts(side="target")
    assert len(parts()) == 2 * 2, "keys and values of two pages"


@pytest.mark.parametrize("other", [{"first": 2}, {"layer": 1}, {"name": "other"}, {"tokens": 8}])
def test_other_heads_layers_names_and_positions_are_other_parts(other: dict[str, Any]) -> None:
    assert not parts() & parts(**other)
