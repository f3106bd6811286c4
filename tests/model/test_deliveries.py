"""Which thread goes on with the pushes of a room to one destination."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from statelink.backend import SubmitMode, Transfer
from statelink.link.prefill import _delivery
from statelink.link.prefill._delivery import MOST_PROMPT_BLOCKS, Delivery

SMALL, LARGE = 1, MOST_PROMPT_BLOCKS + 1
"""Blocks of a push."""


class Threads:
    """Notes which thread each job was given to, and runs none but those of the control thread."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def submit(self, key: Any, job: Any) -> None:
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
def delivery(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> Delivery:
    """One over a backend and a strategy that never block."""
    pusher = SimpleNamespace(hooks={}, open_hooks=lambda: True, add=None, resume=None)
    monkeypatch.setattr(_delivery, "Pusher", lambda *given: pusher)
    pusher.add = pusher.resume = lambda *given: None
    limits = SimpleNamespace(submit_mode=SubmitMode.ASYNC, ends_unpolled=True, prompt_bytes=0)
    context: Any = SimpleNamespace(
        config=SimpleNamespace(verify="off"),
        backend=SimpleNamespace(capabilities=limits, prompt_bytes_to=lambda peer: limits.prompt_bytes),
        workers=SimpleNamespace(moves=threads),
        loop=SimpleNamespace(),
        post=lambda job: job(),
    )
    rank: Any = SimpleNamespace(name="d", joint=None, exited=False)
    plan: Any = SimpleNamespace(components={"kv": SimpleNamespace(item_blocks=1, item_nbytes=1)})
    made = Delivery(context, rank, SimpleNamespace(room=1), 1, plan, {})  # type: ignore[arg-type]
    made.open_hooks()
    return made


def test_transfers_that_do_not_end_are_polled_by_one_chain(delivery: Delivery) -> None:
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


def push(delivery: Delivery, blocks: int) -> None:
    given: Any = SimpleNamespace(items={"kv": SimpleNamespace(ids=range(blocks))})
    delivery.start(given, lambda *ended: None)


def end(delivery: Delivery) -> None:
    nothing = SimpleNamespace(pending=[], unsettled=None, strays=[])
    delivery.take(SimpleNamespace(moved={}, moving=nothing))  # type: ignore[arg-type]


def test_a_small_push_behind_a_large_one_is_left_to_the_data_threads(delivery: Delivery, threads: Threads) -> None:
    """Who goes on with it goes on with the large one first, which the control thread must not carry."""
    push(delivery, LARGE)
    push(delivery, SMALL)
    delivery._wake()
    assert threads.take() == ["data"] * 3
    end(delivery)
    delivery._wake()
    assert threads.take() == ["data"]
    end(delivery)
    push(delivery, SMALL)
    push(delivery, SMALL)
    delivery._wake()
    assert threads.take() == ["control"] * 3
    push(delivery, LARGE)
    delivery._wake()
    assert threads.take() == ["data"] * 2
