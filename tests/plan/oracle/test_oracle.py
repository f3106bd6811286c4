"""The planner against an oracle that knows nothing of it: see `carry` for what is compared with what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from statelink import state

from .carry import carry
from .draw import DEALINGS, TOPOLOGIES, at_scale, dealt_scene, scene
from .features import DEALT_FEATURES, FEATURES, Feature, features_of
from .kinds import KINDS

if TYPE_CHECKING:
    from .scene import Scene

CASES = 3
"""Cases of each kind of state in each topology."""
DEALT = 16
"""Cases of each way of dealing positions out."""


class Run:
    """Carries scenes out, and counts what they have."""

    def __init__(self, name: str, features: dict[str, Feature]) -> None:
        self.name, self.features = name, features
        self.cases = self.moved = 0
        self.seen: Counter[str] = Counter()

    def carry(self, make: Callable[..., Scene], *which: str | int) -> None:
        made = make(*which)
        try:
            nbytes = carry(made)
        except Exception as error:
            raise AssertionError(f"{make.__name__}{which}: {error}") from error
        self.cases += 1
        self.moved += bool(nbytes.total() if made.pools[0].draft else nbytes[made.pools[0].name])
        self.seen.update(features_of(self.features, self.name, made))

    def check(self) -> None:
        assert self.moved >= self.cases // 2, "too many of the cases have nothing to move"
        wanted = {name: each.least for name, each in self.features.items() if self.name in each.kinds}
        lacking = {name: (self.seen[name], least) for name, least in wanted.items() if self.seen[name] < least}
        assert not lacking, "too few cases have these features"


@at_scale
@pytest.mark.parametrize("kind", KINDS)
def test_every_decode_rank_holds_its_share_of_the_state(kind: str, scale: int) -> None:
    run = Run(kind, FEATURES)
    for topology in TOPOLOGIES:
        for number in range(scale * CASES):
            run.carry(scene, kind, topology, number)
    run.check()


@at_scale
@pytest.mark.parametrize("name", DEALINGS)
def test_positions_that_ranks_share_arrive_whole(name: str, scale: int) -> None:
    run = Run(name, DEALT_FEATURES)
    for number in range(scale * DEALT):
        run.carry(dealt_scene, name, number)
    run.check()


def test_every_built_in_type_is_drawn() -> None:
    drawn = {scene(kind, "prefix", 0).pools[0].type for kind in KINDS}
    built_in = {each.name for each in state.state_types() if "." not in each.name and ":" not in each.name}
    assert built_in <= drawn
