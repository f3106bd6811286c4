"""A whole small request: the same blocks in one expression as its components have one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from statelink import plan
from statelink.plan import Blocks, Items, PairPlan, Whole

from .draw import DEALINGS, TOPOLOGIES, at_scale, dealt_scene, scene
from .kinds import KINDS
from .ranks import Rank, instance

if TYPE_CHECKING:
    from .scene import Scene

CASES = 1
"""Cases of each kind of state in each topology."""
OFTEN = 3
"""How often a shape comes before it is worked out."""
SMALL = 250
"""Most blocks that are listed in one expression, before neighbours are merged."""


class Request:
    """One push of a whole request between two ranks.

    Args:
        scene: The scene.
        source: The source.
        target: The destination.
        part: What the source writes.
        known: Whether the source's engine knows the prefix. If not, it names the items before it, too.
    """

    def __init__(self, scene: Scene, source: Rank, target: Rank, part: plan.Assignment, *, known: bool) -> None:
        self.scene = scene
        self.plan: PairPlan = plan.compile_pair(source.inventory, target.inventory, part)
        self.sources: dict[str, Items] = {}
        self.targets: dict[str, Items] = {}
        prefix = scene.prefix if known else 0
        for pool in scene.pools:
            component = self.plan.components.get(pool.name)
            if component is not None:
                ids, accepted = source.indices(pool, prefix), target.indices(pool, scene.prefix)
                wanted = plan.required(component.target, scene.tokens, scene.prefix, accepted)
                given = plan.pushed(component.source, scene.tokens, prefix, (0, scene.tokens), ids)
                self.sources[pool.name], self.targets[pool.name] = given, wanted

    def moves(self) -> list[plan.Move]:
        """What moves of each component."""
        found = []
        for name, component in self.plan.components.items():
            owed = plan.due(component.source, component.target, self.scene.tokens, self.scene.prefix)
            found.append(plan.plan_move(component, self.sources[name], self.targets[name], owed))
        return [move for move in found if move.nbytes]

    def whole(self) -> Whole | None:
        """The same in one expression."""
        return self.plan.shapes.whole(
            self.plan.components, self._in_order(), self.targets, self.scene.tokens, self.scene.prefix
        )

    @property
    def most(self) -> int:
        """The most blocks that it can have."""
        parts = self.plan.components
        return sum(len(items.ids) * parts[name].item_blocks for name, items in self.sources.items())

    def _in_order(self) -> dict[str, Items]:
        return {name: self.sources[name] for name in self.plan.components}


def same(found: Whole, moves: list[plan.Move]) -> None:
    batches = [Blocks.concatenate(list(move.blocks())) for move in moves]
    expected = Blocks.concatenate(batches)
    for name in Blocks.__slots__:
        one, other = getattr(found.blocks, name), getattr(expected, name)
        assert one.dtype == other.dtype
        assert one.flags.c_contiguous
        assert one.flags.writeable
        assert np.array_equal(one, other), name
    assert found.granules == {move.component: move.granules for move in moves}
    assert list(found.nbytes) == [move.nbytes for move in moves]
    assert found.counts == [batch.count for batch in batches]


def check(made: Scene) -> tuple[int, int]:
    """Compare every pair of ranks. Returns how many were listed in one expression, and how many of them were merged."""
    rng = np.random.default_rng(made.seed)
    sources, targets = (instance(made, side, name, rng) for side, name in ((made.source, "p"), (made.target, "d")))
    listed = merged = 0
    for part in plan.route([rank.seen for rank in sources], [rank.inventory for rank in targets]):
        if not part.shares:
            continue
        request = Request(made, sources[part.source], targets[part.target], part, known=bool(rng.integers(2)))
        moves = request.moves()
        for _ in range(OFTEN - 1):
            assert request.whole() is None, "a shape is worked out when it has come often"
        found = request.whole()
        sides = [side for each in request.plan.components.values() for side in (each.source, each.target)]
        cyclic = any(side.partition.kind == "cyclic" for side in sides)
        if not cyclic:
            assert (found is not None) == (bool(moves) and request.most <= SMALL)
        if found is not None:
            same(found, moves)
            same_again = request.whole()
            assert same_again is not None
            same(same_again, moves)
            assert not any(np.shares_memory(a, b) for a in _arrays(found) for b in _arrays(same_again))
            listed += 1
            merged += found.blocks.count < request.most
    return listed, merged


def _arrays(whole: Whole) -> list[np.ndarray]:
    return [getattr(whole.blocks, name) for name in Blocks.__slots__]


@at_scale
@pytest.mark.parametrize("kind", KINDS)
def test_it_has_the_blocks_of_its_moves(kind: str, scale: int) -> None:
    cases = [(topology, number) for topology in TOPOLOGIES for number in range(scale * CASES)]
    found = [check(scene(kind, topology, number)) for topology, number in cases]
    assert sum(listed for listed, _ in found) > len(cases) // 4
    assert sum(merged for _, merged in found) > 0


@at_scale
@pytest.mark.parametrize("name", DEALINGS)
def test_positions_that_ranks_share(name: str, scale: int) -> None:
    for number in range(scale * CASES):
        check(dealt_scene(name, number))
