"""The control thread's loop: what wakes it, and in which order posted jobs run."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator

import pytest
from tests.helpers.loops import note_rings

from statelink.link.runtime import Loop

SOON = 20.0


class Waits:
    """What the loop calls to wait for messages: it waits for the loop's own descriptor alone."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.count = 0
        self.begun = threading.Semaphore(0)

    def __call__(self, timeout: float | None) -> None:
        self.count += 1
        self.begun.release()
        select.select([self.loop], [], [], SOON if timeout is None else timeout)

    def sleeps(self) -> None:
        """Returns once the loop waits, or is about to. Nothing may have been posted since it was asked last."""
        while True:
            assert self.begun.acquire(timeout=SOON)
            if self.loop.idle:
                return


@pytest.fixture
def waits() -> Iterator[Waits]:
    loop = Loop()
    made = Waits(loop)
    loop.start(made, lambda: None)
    yield made
    assert loop.stop(SOON)


def test_a_job_wakes_a_loop_that_sleeps(waits: Waits) -> None:
    for _ in range(50):
        waits.sleeps()
        done = threading.Event()
        waits.loop.post_job(done.set)
        assert done.wait(SOON / 2)


def test_a_quiet_job_lets_it_sleep_and_keeps_its_place(waits: Waits) -> None:
    waits.sleeps()
    before, done, order = waits.count, threading.Event(), list[int]()
    waits.loop.post_quietly(lambda: order.append(1))
    waits.loop.post_quietly(lambda: order.append(2))
    assert waits.loop.asleep
    assert (waits.count, order) == (before, [])
    waits.loop.post_job(order.append, 3)
    waits.loop.post_job(done.set)
    assert done.wait(SOON / 2)
    assert order == [1, 2, 3]


def test_who_asks_wakes_it_for_quiet_jobs(waits: Waits) -> None:
    for _ in range(50):
        waits.sleeps()
        done = threading.Event()
        waits.loop.post_quietly(done.set)
        waits.loop.wake()
        assert done.wait(SOON / 2)


def test_a_quiet_job_of_a_job_runs_before_the_next_sleep(waits: Waits) -> None:
    done = threading.Event()
    waits.loop.post_job(waits.loop.post_quietly, done.set)
    assert done.wait(SOON / 2)


def test_one_sleep_is_broken_by_one_bell(waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many jobs are posted before the thread has the interpreter again."""
    rings = note_rings(waits.loop, monkeypatch, mute=True)
    waits.sleeps()
    done = threading.Event()
    for _ in range(10):
        waits.loop.post_job(lambda: None)
    waits.loop.post_job(done.set)
    assert (len(rings), done.is_set()) == (1, False)
    monkeypatch.undo()
    rings[0].ring()
    assert done.wait(SOON / 2)


def test_no_job_of_many_threads_is_forgotten(waits: Waits) -> None:
    """Each thread waits for its job before it posts the next one, so that one missed bell stops it for good."""
    late = []

    def play() -> None:
        done = threading.Semaphore(0)
        for _ in range(500):
            waits.loop.post_job(done.release)
            if not done.acquire(timeout=SOON / 2):
                late.append(threading.current_thread().name)
                return

    threads = [threading.Thread(target=play) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert late == []
    # Every ring has been taken: the loop does not spin.
    waits.sleeps()
    assert select.select([waits.loop], [], [], 0)[0] == []


def test_jobs_that_come_too_late_do_nothing() -> None:
    loop = Loop()
    loop.start(lambda timeout: None, lambda: None)
    assert loop.stop(SOON)
    loop.post_job(pytest.fail, "the thread has ended")
    loop.asleep = True  # as a thread saw it that posted just before the end
    loop.wake()
    assert loop.fileno() == -1


def test_a_thread_that_does_not_end_in_time_keeps_its_descriptor() -> None:
    """Until it ends: once the descriptor is closed, its number may belong to another file."""
    loop, held, goes_on = Loop(), threading.Event(), threading.Event()

    def job() -> None:
        held.set()
        goes_on.wait(SOON)

    loop.start(Waits(loop), lambda: None)
    loop.post_job(job)
    assert held.wait(SOON)
    assert not loop.stop(0)
    assert loop.fileno() >= 0
    goes_on.set()
    assert loop.stop(SOON)
    assert loop.fileno() == -1
