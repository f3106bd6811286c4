"""The threads that may block: who waits for whom, and who does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from statelink.link.runtime import HELD_AFTER_SECONDS, KeyedExecutor, KeyOrder

SOON = 20.0

Make = Callable[..., KeyedExecutor]


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    """What blocked jobs wait for."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def make(go_on: threading.Event) -> Iterator[Make]:
    """Makes executors, and closes them after the test."""
    made: list[KeyedExecutor] = []

    def executor(width: int, spare: int = 0, order: KeyOrder | None = None) -> KeyedExecutor:
        made.append(KeyedExecutor(f"test-{len(made)}", width, spare, order))
        return made[-1]

    yield executor
    go_on.set()
    assert all(each.close(SOON) for each in made)
    assert not threads()


def threads() -> list[str]:
    """Names of the threads of executors."""
    return [each.name for each in threading.enumerate() if each.name.startswith("test-")]


def block(executor: KeyedExecutor, count: int, go_on: threading.Event) -> None:
    """Let so many jobs, each of a key of its own, wait inside a call."""
    inside = threading.Semaphore(0)

    def job() -> None:
        inside.release()
        go_on.wait(SOON)

    for number in range(count):
        executor.submit_job(("blocked", number), job)
    for _ in range(count):
        assert inside.acquire(timeout=SOON)


def runs(executor: KeyedExecutor, key: str = "another", within: float = SOON) -> bool:
    """Whether a job of another key runs."""
    ran = threading.Event()
    executor.submit_job(key, ran.set)
    return ran.wait(within)


@pytest.mark.parametrize("held", [1, 2, 8])
def test_jobs_that_are_held_keep_nobody_else_from_a_thread(make: Make, go_on: threading.Event, held: int) -> None:
    executor = make(2, spare=8)
    block(executor, held, go_on)
    assert runs(executor)
    assert runs(executor)


def test_more_than_the_bound_make_others_wait_and_then_go_on(make: Make, go_on: threading.Event) -> None:
    executor = make(1, spare=2)
    block(executor, 3, go_on)
    ran = threading.Event()
    executor.submit_job("another", ran.set)
    assert not ran.wait(3 * HELD_AFTER_SECONDS)
    go_on.set()
    assert ran.wait(SOON)


def test_an_executor_without_spare_threads_runs_one_job_at_a_time(make: Make, go_on: threading.Event) -> None:
    """However long it takes: what is not thread-safe depends on it."""
    executor = make(1)
    block(executor, 1, go_on)
    assert not runs(executor, within=3 * HELD_AFTER_SECONDS)


def test_threads_that_stood_in_for_held_ones_end(make: Make, go_on: threading.Event) -> None:
    executor = make(2, spare=16)
    block(executor, 16, go_on)
    assert len(threads()) >= 16
    go_on.set()
    until = time.monotonic() + SOON
    while len(threads()) > 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(threads()) <= 3
    assert runs(executor)


def test_jobs_of_one_key_keep_their_order_whatever_executor_they_are_in(make: Make) -> None:
    order = KeyOrder()
    executors = [make(2, 4, order) for _ in range(3)]
    ran: dict[str, list[int]] = {key: [] for key in "abcd"}
    left = threading.Semaphore(0)
    busy: set[str] = set()

    def job(key: str, number: int) -> None:
        assert key not in busy
        busy.add(key)
        time.sleep(1e-4)
        busy.remove(key)
        ran[key].append(number)
        left.release()

    for number in range(30):
        for key in ran:
            executors[(number * 7 + ord(key)) % 3].submit_job(key, lambda key=key, number=number: job(key, number))  # type: ignore[misc]
    for _ in range(30 * len(ran)):
        assert left.acquire(timeout=SOON)
    assert all(numbers == list(range(30)) for numbers in ran.values())


def test_a_job_that_comes_later_holds_neither_its_key_nor_a_thread(make: Make) -> None:
    executor = make(1)
    done, looks = threading.Event(), [0]

    def look() -> None:
        looks[0] += 1
        if looks[0] == 3:
            done.set()
        else:
            executor.submit_after("key", look, 0.05)

    executor.submit_job("key", look)
    assert runs(executor)
    assert runs(executor, "key")
    assert done.wait(SOON)


def test_of_jobs_that_come_later_the_earliest_comes_first(make: Make) -> None:
    executor, done = make(2), threading.Event()
    ran: list[int] = []

    def begin() -> None:
        for number in (2, 0, 1):
            executor.submit_after(number, partial(ran.append, number), 0.05 * (1 + number))
        executor.submit_after("last", done.set, 0.3)

    executor.submit_job("begin", begin)
    assert done.wait(SOON)
    assert ran == [0, 1, 2]


def test_a_job_that_comes_after_others_of_its_key_keeps_its_place(make: Make, go_on: threading.Event) -> None:
    executor, begun = make(2), threading.Event()
    ran: list[str] = []

    def first() -> None:
        executor.submit_after("key", lambda: ran.append("later"), 0.0)
        begun.set()

    executor.submit_job("key", first)
    assert begun.wait(SOON)
    assert runs(executor, "key")
    until = time.monotonic() + SOON
    while not ran and time.monotonic() < until:
        time.sleep(0.001)
    assert ran == ["later"]


def test_many_that_come_later_delay_nobody(make: Make) -> None:
    executor = make(1)
    looked, done = threading.Semaphore(0), threading.Event()

    def look(number: int) -> None:
        looked.release()
        if not done.is_set():
            executor.submit_after(number, partial(look, number), 0.05)

    for number in range(200):
        executor.submit_job(number, partial(look, number))
    for _ in range(400):
        assert looked.acquire(timeout=SOON)
    assert runs(executor)
    done.set()


def test_jobs_that_come_later_need_no_job_that_ends(make: Make, go_on: threading.Event) -> None:
    """The thread that submitted them for later is held by the next job."""
    executor, ran = make(1, spare=1), threading.Event()
    executor.submit_job("a", lambda: executor.submit_after("later", ran.set, 0.01))
    block(executor, 1, go_on)
    assert ran.wait(SOON)


def test_closing_runs_what_is_queued_and_what_comes_later(make: Make) -> None:
    executor, after = make(1, 1), threading.Event()
    later = threading.Event()
    executor.submit_job("key", lambda: executor.submit_after("key", later.set, 10 * SOON))
    assert runs(executor, "key")
    executor.submit_job("key", after.set)
    assert executor.close(SOON)
    assert after.is_set()
    assert later.is_set()
    executor.submit_job("key", after.clear)
    assert after.is_set()


def test_a_job_that_raises_ends_no_thread(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    executor = make(1)

    def broken() -> None:
        raise ZeroDivisionError("a defect")

    executor.submit_job("key", broken)
    assert runs(executor, "key")
    assert "a defect" in caplog.text


def test_a_thread_that_does_not_start_ends_no_thread_of_another_executor(
    make: Make, go_on: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A job of one executor hands its key on to an executor that has no thread, and gets none."""
    order = KeyOrder()
    first, second = make(1, order=order), make(1, order=order)
    start: Any = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("test-1"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ran = threading.Event()
    first.submit_job("room", lambda: go_on.wait(SOON))
    second.submit_job("room", ran.set)
    go_on.set()
    assert runs(first)
    assert second.waiting == 1
    assert "jobs of test-1 wait: can't start new thread" in caplog.text
    monkeypatch.undo()
    second.revive()
    assert ran.wait(SOON)


def test_a_job_runs_on_the_thread_that_asks(make: Make) -> None:
    executor, ran = make(1), []
    assert executor.run_here("a", lambda: ran.append(threading.get_ident()))
    assert ran == [threading.get_ident()]
    assert not threads()


def test_a_job_behind_another_of_its_key_does_not_run_here(make: Make, go_on: threading.Event) -> None:
    """The key keeps its order over all executors, and the caller has to submit the job."""
    order = KeyOrder()
    executor, other = make(2, order=order), make(2, order=order)
    block(executor, 1, go_on)
    assert not other.run_here(("blocked", 0), lambda: pytest.fail("it ran before the one before it had ended"))
    assert other.run_here("another", lambda: None)


def test_a_job_does_not_run_here_while_too_many_run(make: Make, go_on: threading.Event) -> None:
    """An executor of one thread makes one call at a time, whichever thread makes it."""
    executor = make(1)
    block(executor, 1, go_on)
    assert not executor.run_here("another", lambda: pytest.fail("two jobs ran at once"))


def test_a_job_that_has_to_be_alone_does_not_run_here_beside_another(make: Make, go_on: threading.Event) -> None:
    executor = make(2)
    assert executor.run_here("another", lambda: None, alone=True)
    block(executor, 1, go_on)
    assert not executor.run_here("another", lambda: pytest.fail("it did not run alone"), alone=True)
    assert executor.run_here("another", lambda: None)


def test_a_held_job_has_its_thread_for_itself(make: Make, go_on: threading.Event) -> None:
    """An executor without spare threads makes no second call, however long the first one takes."""
    executor = make(1)
    block(executor, 1, go_on)
    time.sleep(2 * HELD_AFTER_SECONDS)
    assert not executor.run_here("another", lambda: pytest.fail("two jobs ran at once"))


def test_jobs_of_a_key_wait_for_the_one_that_runs_here(make: Make) -> None:
    executor, order = make(2), []
    after = threading.Event()

    def second() -> None:
        order.append("second")
        after.set()

    def first() -> None:
        executor.submit_job("a", second)
        time.sleep(0.05)  # the second one would run now
        order.append("first")

    assert executor.run_here("a", first)
    assert after.wait(SOON)
    assert order == ["first", "second"]


def test_what_a_job_that_runs_here_submits_for_later_runs_on_a_thread_of_the_executor(make: Make) -> None:
    executor, ran = make(1), []
    done = threading.Event()

    def later() -> None:
        ran.append(threading.current_thread().name)
        done.set()

    assert executor.run_here("a", lambda: executor.submit_after("a", later, 0.01))
    assert done.wait(SOON)
    assert ran[0].startswith("test-")


def test_a_job_that_raises_here_harms_nobody(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    executor = make(1)
    assert executor.run_here("a", lambda: 1 / 0)
    assert "ZeroDivisionError" in caplog.text
    assert executor.run_here("a", lambda: None)


def test_nothing_runs_here_after_the_end(make: Make) -> None:
    executor = make(1)
    assert executor.close(SOON)
    assert not executor.run_here("a", lambda: pytest.fail("it ran"))
