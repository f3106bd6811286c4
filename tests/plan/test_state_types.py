"""Every type of state, and every way of dealing positions out, against the oracle of `deliver`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings

from statelink import state

from .deliver import deliver
from .pool_strategies import DEALT, TYPES, dealt_scenes, scenes
from .strategies import PROFILE, at_scale

if TYPE_CHECKING:
    from .pools import Scene

EXAMPLES = 10
"""Cases per type of state and per way of dealing."""


@at_scale
@pytest.mark.parametrize("kind", TYPES)
def test_a_type_of_state_arrives_whole_and_nothing_else_is_touched(kind: str, scale: int) -> None:
    examples = scale * EXAMPLES
    counted: Counter[str] = Counter()

    @settings(PROFILE, max_examples=examples)
    @given(scenes(kind))
    def check(scene: Scene) -> None:
        nbytes = deliver(scene)
        counted["cases"] += 1
        counted["moved"] += bool(nbytes[kind if kind != "draft on decode only" else "its target"])

    check()
    assert counted["cases"] >= examples
    assert counted["moved"] >= examples // 2, "too many of the cases have nothing to move"


@at_scale
@pytest.mark.parametrize("topology", DEALT)
def test_positions_that_ranks_share_arrive_whole(topology: str, scale: int) -> None:
    examples = 2 * scale * EXAMPLES
    counted: Counter[str] = Counter()

    @settings(PROFILE, max_examples=examples)
    @given(dealt_scenes(topology))
    def check(scene: Scene) -> None:
        nbytes = deliver(scene)
        counted["cases"] += 1
        counted["moved"] += bool(nbytes["dealt"])

    check()
    assert counted["cases"] >= examples
    assert counted["moved"] >= examples // 2, "too many of the cases have nothing to move"


def test_every_built_in_type_is_generated() -> None:
    generated = {name.split(" ")[0] for name in TYPES} | {"mamba"}
    built_in = {each.name for each in state.state_types() if "." not in each.name and ":" not in each.name}
    assert built_in <= generated | {"draft"}
