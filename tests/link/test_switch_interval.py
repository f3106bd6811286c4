"""Links shorten the interpreter's switch interval while they are open, and leave what somebody else has set."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import statelink
from statelink import state
from statelink.cli import main
from statelink.errors import ConfigError

PYTHON = 0.005


@pytest.fixture(autouse=True)
def interval() -> Iterator[None]:
    """Python's own interval before the test, and after it."""
    sys.setswitchinterval(PYTHON)
    yield
    sys.setswitchinterval(PYTHON)


def opened(seconds: float | None = None, **config: Any) -> statelink.Link:
    inventory = state.describe("d", [state.aux_rows({"row": np.zeros((4, 64), np.uint8)})])
    if seconds is not None:
        config["switch_interval"] = seconds
    return statelink.open({"role": "decode", "backend": "tcp", **config}, inventory)


def test_a_link_leaves_it_alone_by_default() -> None:
    with opened() as link:
        assert sys.getswitchinterval() == PYTHON
        assert link.snapshot()["switch_interval"] == PYTHON


def test_the_shortest_counts_while_links_are_open(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "statelink.link"):
        with opened(0.002) as link:
            assert sys.getswitchinterval() == pytest.approx(0.002)
            with opened(0.0003), opened(0.001):
                assert sys.getswitchinterval() == pytest.approx(0.0003)
                assert link.snapshot()["switch_interval"] == pytest.approx(0.0003)
            assert sys.getswitchinterval() == pytest.approx(0.002)
        assert sys.getswitchinterval() == PYTHON
        with opened(0.001):
            assert sys.getswitchinterval() == pytest.approx(0.001)
    said = [each.getMessage() for each in caplog.records if "switch interval" in each.getMessage()]
    assert said[0] == "the interpreter's switch interval is 2 ms; it was 5 ms"
    assert said[-1] == "the interpreter's switch interval is 5 ms; it was 1 ms"


@pytest.mark.parametrize("theirs", [0.0001, 0.003, 0.02])
def test_what_somebody_else_has_set_stays(theirs: float, caplog: pytest.LogCaptureFixture) -> None:
    sys.setswitchinterval(theirs)
    found = sys.getswitchinterval()
    with caplog.at_level(logging.INFO, "statelink.link"), opened(0.001):
        assert sys.getswitchinterval() == found
    assert sys.getswitchinterval() == found
    assert f"stays at {theirs * 1e3:g} ms, which somebody else has set" in caplog.text


def test_what_somebody_else_sets_meanwhile_stays() -> None:
    with opened(0.001):
        sys.setswitchinterval(0.003)
        with opened(0.0005):
            assert sys.getswitchinterval() == 0.003
    assert sys.getswitchinterval() == 0.003
    sys.setswitchinterval(PYTHON)
    with opened(0.001):
        assert sys.getswitchinterval() == pytest.approx(0.001)


def test_a_link_that_does_not_open_restores_it() -> None:
    with opened() as link, pytest.raises(ConfigError):
        opened(0.001, listen=link.address)
    assert sys.getswitchinterval() == PYTHON


def test_a_forked_child_has_that_of_python() -> None:
    """Its links are those of the parent. One that it opens itself shortens the interval again."""
    with opened(0.001) as link:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            seen = [sys.getswitchinterval()]
            link.close()
            with opened(0.002):
                seen.append(sys.getswitchinterval())
            os.write(writing, json.dumps([*seen, sys.getswitchinterval()]).encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as told:
            assert json.loads(told.read()) == pytest.approx([PYTHON, 0.002, PYTHON])
        os.waitpid(child, 0)
        assert sys.getswitchinterval() == pytest.approx(0.001)


@pytest.mark.parametrize("seconds", [0, -1, 0.00001, 0.006, float("nan")])
def test_other_values_are_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"switch_interval must be 0\.0001 to 0\.005 seconds"):
        opened(seconds)
    assert sys.getswitchinterval() == PYTHON


def test_inspect_shows_another_one_than_pythons() -> None:
    def shown() -> str:
        return CliRunner().invoke(main, ["inspect", str(os.getpid())]).output

    with opened():
        assert "switch interval" not in shown()
    with opened(0.001):
        assert "1 ms" in next(line for line in shown().splitlines() if "switch interval" in line)
