"""The threads that may block: who waits for whom, and who does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator

import pytest

from statelink.link._lanes import HELD_AFTER, Lane
from statelink.link._order import Order

SOON = 20.0

Make = Callable[..., Lane]


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    """What blocked jobs wait for."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def make(go_on: threading.Event) -> Iterator[Make]:
    """Makes lanes, and closes them after the test."""
    made: list[Lane] = []

    def lane(width: int, spare: int = 0, order: Order | None = None) -> Lane:
        made.append(Lane(f"test-{len(made)}", width, spare, order))
        return made[-1]

    yield lane
    go_on.set()
    assert all(each.close(SOON) for each in made)
    assert not [each.name for each in threading.enumerate() if each.name.startswith("test-")]


def block(lane: Lane, count: int, go_on: threading.Event) -> None:
    """Let so many jobs, each of a key of its own, wait inside a call."""
    inside = threading.Semaphore(0)

    def job() -> None:
        inside.release()
        go_on.wait(SOON)

    for number in range(count):
        lane.submit(("blocked", number), job)
    for _ in range(count):
        assert inside.acquire(timeout=SOON)


def runs(lane: Lane, key: str = "another", within: float = SOON) -> bool:
    """Whether a job of another key runs."""
    ran = threading.Event()
    lane.submit(key, ran.set)
    return ran.wait(within)


@pytest.mark.parametrize("held", [1, 2, 8])
def test_jobs_that_are_held_keep_nobody_else_from_a_thread(make: Make, go_on: threading.Event, held: int) -> None:
    lane = make(2, spare=8)
    block(lane, held, go_on)
    assert runs(lane)
    assert runs(lane)


def test_more_than_the_bound_make_others_wait_and_then_go_on(make: Make, go_on: threading.Event) -> None:
    lane = make(1, spare=2)
    block(lane, 3, go_on)
    ran = threading.Event()
    lane.submit("another", ran.set)
    assert not ran.wait(3 * HELD_AFTER)
    go_on.set()
    assert ran.wait(SOON)


def test_a_lane_without_spare_threads_runs_one_job_at_a_time(make: Make, go_on: threading.Event) -> None:
    """However long it takes: what is not thread-safe depends on it."""
    lane = make(1)
    block(lane, 1, go_on)
    assert not runs(lane, within=3 * HELD_AFTER)


def test_threads_that_stood_in_for_held_ones_end(make: Make, go_on: threading.Event) -> None:
    lane = make(2, spare=16)
    block(lane, 16, go_on)
    assert len(lane._threads) >= 16
    go_on.set()
    until = time.monotonic() + SOON
    while len(lane._threads) > 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(lane._threads) <= 3
    assert runs(lane)


def test_jobs_of_one_key_keep_their_order_whatever_lane_they_are_in(make: Make) -> None:
    order = Order()
    lanes = [make(2, 4, order) for _ in range(3)]
    ran: dict[str, list[int]] = {key: [] for key in "abcd"}
    left = threading.Semaphore(0)
    busy: set[str] = set()

    def job(key: str, number: int) -> Iterator[float]:
        for pause in (0.0, 1e-4, 5e-3):
            assert key not in busy
            busy.add(key)
            time.sleep(1e-4)
            busy.remove(key)
            yield pause
        ran[key].append(number)
        left.release()

    for number in range(30):
        for key in ran:
            lanes[(number * 7 + ord(key)) % 3].submit(key, lambda key=key, number=number: job(key, number))  # type: ignore[misc]
    for _ in range(30 * len(ran)):
        assert left.acquire(timeout=SOON)
    assert all(numbers == list(range(30)) for numbers in ran.values())


def waiting(pause: float, done: threading.Event, looked: threading.Semaphore) -> Generator[float, None, None]:
    """A job that looks whether something is done, again and again."""
    while not done.is_set():
        looked.release()
        yield pause


def test_a_job_that_waits_holds_its_key_and_no_thread(make: Make) -> None:
    lane = make(1)
    done, looked = threading.Event(), threading.Semaphore(0)
    lane.submit("key", lambda: waiting(0.01, done, looked))
    assert looked.acquire(timeout=SOON)
    assert runs(lane)
    after = threading.Event()
    lane.submit("key", after.set)
    assert runs(lane)
    assert not after.is_set()
    done.set()
    assert after.wait(SOON)


def test_a_job_that_waits_for_long_looks_at_once_when_somebody_comes_after_it(make: Make) -> None:
    """A room that is given up need not wait for the next look at its transfers."""
    order = Order()
    lane, other = make(1, 0, order), make(1, 0, order)
    done, looked = threading.Event(), threading.Semaphore(0)
    lane.submit("key", lambda: waiting(10 * SOON, done, looked))
    assert looked.acquire(timeout=SOON)
    assert runs(lane)
    done.set()
    assert runs(other, "key")


def test_many_that_wait_delay_nobody(make: Make) -> None:
    lane = make(1)
    done, looked = threading.Event(), threading.Semaphore(0)
    for number in range(200):
        lane.submit(number, lambda: waiting(0.05, done, looked))
    for _ in range(200):
        assert looked.acquire(timeout=SOON)
    assert runs(lane)
    done.set()


def test_closing_runs_what_is_queued_and_what_waits(make: Make) -> None:
    lane = make(1, 1)
    done, looked, after = threading.Event(), threading.Semaphore(0), threading.Event()
    lane.submit("key", lambda: waiting(10 * SOON, done, looked))
    assert looked.acquire(timeout=SOON)
    lane.submit("key", after.set)
    done.set()
    assert lane.close(SOON)
    assert after.is_set()
    lane.submit("key", after.clear)
    assert after.is_set()


def test_a_job_that_raises_ends_no_thread(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    lane = make(1)

    def broken() -> Generator[float, None, None]:
        yield 0.0
        raise ZeroDivisionError("a defect")

    lane.submit("key", broken)
    assert runs(lane, "key")
    assert "a defect" in caplog.text
