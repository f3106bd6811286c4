"""Which thread goes on with the pushes of a room to one destination."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from statelink.backend import SubmitMode, Transfer
from statelink.link.prefill import _outgoing
from statelink.link.prefill._line import MOST_PROMPT_BLOCKS, Line
from statelink.link.prefill._outgoing import OutgoingDelivery

SMALL, LARGE = 1, MOST_PROMPT_BLOCKS + 1
"""Blocks of a push."""


class Threads:
    """Notes which thread each job was given to, and runs none but those of the control thread."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def submit_job(self, key: Any, job: Any) -> None:
        self.given.append("data")

    def submit_promptly(self, key: Any, job: Any, *, alone: bool) -> None:
        self.given.append("control")

    def take(self) -> list[str]:
        given, self.given = self.given, []
        return given


@pytest.fixture
def threads() -> Threads:
    return Threads()


@pytest.fixture
def context(threads: Threads) -> Any:
    """Over a backend that never blocks."""
    limits = SimpleNamespace(
        submit_mode=SubmitMode.ASYNC,
        ends_unpolled=True,
        prompt_bytes=0,
        joins_rooms=False,
        max_bytes=1 << 20,
        max_blocks=100,
        max_transfers=4,
    )
    return SimpleNamespace(
        config=SimpleNamespace(verify="off", slice_bytes=1 << 20),
        backend=SimpleNamespace(capabilities=limits),
        workers=SimpleNamespace(moves=threads),
        loop=SimpleNamespace(),
        post_job=lambda job, *given: job(*given),
        now=lambda: 0.0,
    )


@pytest.fixture
def delivery(context: Any, monkeypatch: pytest.MonkeyPatch) -> OutgoingDelivery:
    monkeypatch.setattr(_outgoing, "Pusher", lambda *given: SimpleNamespace(hooks={}))
    rank: Any = SimpleNamespace(name="d", exited=False)
    return OutgoingDelivery(context, rank, SimpleNamespace(room=1), 1, SimpleNamespace(), SimpleNamespace(), {})  # type: ignore[arg-type]


def test_transfers_that_do_not_end_are_polled_by_one_chain(delivery: OutgoingDelivery) -> None:
    """Whatever happens to the room meanwhile, which looks after every delivery each time."""
    polls: list[Any] = []
    pauses: list[Any] = []
    context: Any = delivery._context
    context.workers.poll = lambda key, transfers, then: polls.append(then)
    context.loop.after = lambda seconds, job: pauses.append(job)
    delivery.in_flight._running = [Transfer()]

    def look() -> None:
        for _time in range(5):
            delivery.in_flight.look_after(look)

    look()
    for _ in range(10):
        assert (len(polls), len(pauses)) == (1, 0)
        polls.pop()(True)
        look()
        assert (len(polls), len(pauses)) == (0, 1)
        pauses.pop()()


class Pushes:
    """Stands for a `Pusher`, each push of which ends at its first step."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.asks: Any = None
        self.queued = False
        self.prompt = True
        self.flights = 0
        self.cancelled = SimpleNamespace(raised=False)

    def step(self, answer: Any = None) -> None:
        del self.waiting[0]


def test_a_small_push_behind_a_large_one_is_left_to_the_data_threads(context: Any, threads: Threads) -> None:
    """Whoever goes on with it may go on with the large one, which the control thread must not carry."""
    line, pushes = Line(context, "d"), Pushes()

    def push(blocks: int) -> None:
        line.add_push(pushes, None, lambda pushed: None, blocks, 1)  # type: ignore[arg-type]

    push(LARGE)
    assert threads.take() == ["data"]
    push(SMALL)
    assert threads.take() == [], "the job that was asked for takes both"
    line._go()
    push(SMALL)
    assert threads.take() == ["control"]
    push(LARGE)
    line._go()
    line._go()
    assert not pushes.waiting
    assert threads.take() == []
