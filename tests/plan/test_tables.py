"""The memory of large batches: used again once nobody holds any of it, and never before."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from statelink import plan, state
from statelink.plan import Blocks

from .small import describe, pointer

PAGES, LAYERS = 512, 32
SCATTERED = np.random.default_rng(5).permutation(PAGES)


def room(turn: int = 0) -> Iterator[Blocks]:
    """The batches of a room of 16,384 blocks; those of another turn have other bytes."""
    p, d = (describe(name, state.mla_pages({n: pointer(n + 1, PAGES, 2, 4) for n in range(LAYERS)})) for name in "pd")
    component = plan.compile_pair(p, d, plan.route([p], [d])[0]).components["kv"]
    tokens = 2 * PAGES
    here, there = np.roll(SCATTERED, turn), np.roll(SCATTERED[::-1], turn)
    items = plan.pushed(component.source, tokens, 0, (0, tokens), there)
    wanted = plan.required(component.target, tokens, 0, here)
    return plan.plan_move(component, items, wanted, plan.due(component.source, component.target, tokens, 0)).blocks()


def test_memory_that_nobody_holds_is_used_again() -> None:
    places = {int(batch.source.ctypes.data) for turn in range(40) for batch in room(turn)}
    assert len(places) <= 3


def test_memory_is_not_used_again_while_the_smallest_view_of_it_is_held() -> None:
    held: list[tuple[np.ndarray, list[int]]] = []
    for turn in range(30):
        for batch in room(turn):
            column = (batch.source, batch.target, batch.nbytes, batch.target_region)[turn % 4]
            view = column[turn : turn + 3].view(np.uint32)[1:]
            held.append((view, view.tolist()))
        if turn % 3 == 2:
            del held[turn // 3]
    assert len(held) > 15
    for view, was in held:
        assert view.tolist() == was


def test_threads_do_not_share() -> None:
    wrong: list[int] = []
    first, second = (Blocks.concatenate([batch[:] for batch in room(turn)]) for turn in (0, 1))

    def work(number: int) -> None:
        expected = (first, second)[number % 2]
        for _ in range(40):
            at = 0
            for batch in room(number % 2):
                part, at = expected[at : at + batch.count], at + batch.count
                if not (np.array_equal(batch.source, part.source) and np.array_equal(batch.target, part.target)):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
