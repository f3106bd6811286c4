"""Flags that threads wait for."""

from __future__ import annotations

import threading

import pytest

from statelink.link.runtime import Flag

SOON = 20.0


@pytest.mark.parametrize("raised", [False, True])
def test_it_is_what_it_was_set_to(raised: bool) -> None:
    flag = Flag(raised)
    assert flag.is_set() is raised
    assert flag.wait(0) is raised
    flag.set()
    assert flag.is_set()
    assert flag.wait(0)
    flag.clear()
    assert not flag.is_set()
    assert not flag.wait(0)


def test_everybody_who_waits_is_woken() -> None:
    flag, woken = Flag(), threading.Semaphore(0)
    waiting = threading.Barrier(5)

    def wait() -> None:
        waiting.wait(SOON)
        assert flag.wait(SOON)
        woken.release()

    for _ in range(4):
        threading.Thread(target=wait, daemon=True).start()
    waiting.wait(SOON)
    flag.set()
    for _ in range(4):
        assert woken.acquire(timeout=SOON)


def test_a_flag_set_at_any_moment_is_seen() -> None:
    """Also between the moment at which a thread finds it unset and the moment at which it waits."""
    for _ in range(300):
        flag = Flag()
        thread = threading.Thread(target=flag.set, daemon=True)
        thread.start()
        assert flag.wait(SOON)
        thread.join(SOON)


def test_what_is_cleared_is_waited_for_again() -> None:
    flag = Flag()
    for _ in range(3):
        timer = threading.Timer(0.01, flag.set)
        timer.start()
        assert flag.wait(SOON)
        timer.join(SOON)
        flag.clear()
        assert not flag.wait(0.001)
