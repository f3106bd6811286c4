"""The child processes of a command end with it, whenever a signal comes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from statelink.cli._alone import Alone, end_all


def sleeps() -> Iterator[int]:
    yield 1
    time.sleep(60)


def number(child: Alone) -> int:
    """The child's process."""
    return child._pid


def runs(process: int) -> bool:
    """Whether a process runs, or has ended and nobody has waited for it."""
    return Path(f"/proc/{process}").exists()


def test_a_child_that_nobody_closes_is_ended() -> None:
    """A signal may come before the block that closes it has begun."""
    process = number(Alone(sleeps))
    assert runs(process)
    end_all()
    assert not runs(process)


def test_an_interrupt_while_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Alone(sleeps)
    process = number(child)

    def interrupted(*_: int) -> tuple[int, int]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "waitpid", interrupted)
        with pytest.raises(KeyboardInterrupt):
            child.close()
    assert runs(process)
    end_all()
    assert not runs(process)


def test_a_signal_during_the_fork_counts_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, children = os.fork, list[int]()

    def forks() -> int:
        if child := fork():
            children.append(child)
            signal.raise_signal(signal.SIGINT)
            assert runs(child)
        return child

    monkeypatch.setattr(os, "fork", forks)
    with pytest.raises(KeyboardInterrupt):
        Alone(sleeps)
    end_all()
    (process,) = children
    assert not runs(process)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_closing_twice_is_no_error() -> None:
    with Alone(sleeps) as child:
        assert next(child.values()) == 1
        child.close()
    end_all()
