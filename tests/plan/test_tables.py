"""The memory of blocks: taken again, and never while somebody holds a part of it."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from statelink.plan._tables import KEPT, SMALLEST, table

MOST = 4 * SMALLEST


def place_of(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_is_taken_again_when_nobody_holds_it() -> None:
    places = set()
    for _ in range(50):
        places.add(place_of(table(MOST, MOST)))
    assert len(places) <= KEPT


def test_is_not_taken_while_the_smallest_view_of_it_is_held() -> None:
    held = table(MOST, MOST)[5:6].view(np.uint32)[1:]
    held[0] = 77
    for _ in range(4 * KEPT):
        table(MOST, MOST)[:] = 1
    assert held[0] == 77


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, MOST + 9), st.integers(0, 5)), min_size=1, max_size=40))
def test_no_two_holders_share_a_byte(steps: list[tuple[int, int]]) -> None:
    held: list[tuple[np.ndarray, int]] = []
    for number, (nelements, kept) in enumerate(steps):
        mine = table(nelements, MOST)
        assert len(mine) == nelements
        mine[:] = number
        held.append((mine[nelements // 2 :], number))
        del mine
        for array, value in held:
            assert (array == value).all()
        held = held[-kept:] if kept else []


def test_threads_do_not_share() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            mine = table(MOST, MOST)
            mine[:] = number
            if not (mine == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
