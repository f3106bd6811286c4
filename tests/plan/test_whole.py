"""The shapes of small requests that two ranks remember. `oracle.test_whole` compares their blocks."""

from __future__ import annotations

import numpy as np

from statelink import plan

from .small import describe, keys

OFTEN, KNOWN, SMALL = 3, 32, 250
PAGE, PAGES = 2, 300


class Ranks:
    """Two ranks with pages of one layer."""

    def __init__(self) -> None:
        p, d = (describe(name, keys([0], PAGES, PAGE, 1, 4, heads=1)) for name in "pd")
        self.plan = plan.compile_pair(p, d, plan.route([p], [d])[0])

    def whole(self, ids: list[int], there: list[int] | None = None, *, chunk: int = 0) -> plan.Whole | None:
        """A request of these pages; without the last ``chunk`` of them."""
        component, tokens = self.plan.components["kv"], PAGE * len(ids)
        pushed = (ids if there is None else there)[: len(ids) - chunk]
        theirs = {"kv": plan.pushed(component.source, tokens, 0, (0, PAGE * len(pushed)), pushed)}
        ours = {"kv": plan.required(component.target, tokens, 0, ids)}
        return self.plan.shapes.whole(self.plan.components, theirs, ours, tokens, 0)

    def knows(self, pages: int) -> bool:
        return self.whole(list(range(pages))) is not None


def test_a_shape_is_worked_out_when_it_has_come_often() -> None:
    ranks = Ranks()
    assert [ranks.knows(3) for _ in range(5)] == [False] * (OFTEN - 1) + [True] * (6 - OFTEN)


def test_a_shape_that_comes_again_and_again_is_remembered_among_others() -> None:
    ranks = Ranks()
    for turn in range(60):
        assert ranks.knows(1) == (turn >= OFTEN - 1)
        ranks.knows(turn + 2)


def test_shapes_that_come_seldom_are_forgotten() -> None:
    ranks = Ranks()
    assert not any([ranks.knows(pages) for _ in range(2 * OFTEN) for pages in range(1, KNOWN + 2)])


def test_what_has_many_blocks_or_lacks_something_goes_the_long_way() -> None:
    ranks = Ranks()
    for _ in range(OFTEN + 1):
        large = ranks.knows(SMALL // 2 + 1)  # a page has keys and values
        partial = ranks.whole(list(range(8)), chunk=1)
        nothing = ranks.plan.shapes.whole(ranks.plan.components, {}, {}, 8, 0)
    assert not large
    assert partial is None
    assert nothing is None


def test_pages_in_any_order() -> None:
    """Neighbours on both sides are one block, and others are not, whatever requests of one shape came before."""
    ranks = Ranks()
    orders = [0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 5, 6], [9, 2, 3, 7], [4, 5, 6, 7], [4, 3, 5, 7]
    for _ in range(OFTEN):
        for here in orders:
            for there in orders:
                found = ranks.whole(here, there)
    for here in orders:
        for there in orders:
            found = ranks.whole(here, there)
            assert found is not None
            together = np.diff(here) == 1
            together &= np.diff(there) == 1
            assert found.counts == [2 * (4 - int(together.sum()))]
            assert found.blocks.total == found.nbytes[0]
