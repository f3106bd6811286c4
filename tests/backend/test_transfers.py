"""What a transfer tells the core, and when."""

from __future__ import annotations

import threading

import pytest

from statelink.backend import Outcome, Side, Transfer


def test_whoever_asks_is_told_of_the_end() -> None:
    told: list[Outcome | None] = []
    transfer = Transfer()
    transfer.notify(lambda: told.append(transfer.outcome))
    assert told == []
    transfer.succeed()
    assert told == [Outcome(True)]


def test_whoever_asks_late_is_told_at_once() -> None:
    told: list[bool] = []
    transfer = Transfer(Outcome(False, "it broke"))
    transfer.notify(lambda: told.append(True))
    assert told == [True]


def test_the_last_one_who_asks_is_told_once() -> None:
    told: list[str] = []
    transfer = Transfer()
    transfer.notify(lambda: told.append("first"))
    transfer.notify(lambda: told.append("second"))
    transfer.fail("it broke", settled=Side.SOURCE)
    transfer.settle()
    assert told == ["second"]
    assert transfer.outcome == Outcome(False, "it broke", settled=True)


@pytest.mark.parametrize("attempt", range(3))
def test_an_end_at_any_moment_is_told(attempt: int) -> None:
    """Also one between the moment at which the core asks and the moment at which it looks."""
    for _ in range(200):
        transfer, told = Transfer(), threading.Event()
        thread = threading.Thread(target=transfer.succeed, daemon=True)
        thread.start()
        transfer.notify(told.set)
        assert told.wait(20)
        thread.join(20)
