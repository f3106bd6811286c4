"""`tools.gpu` runs its parts, with a stand-in for the interpreter."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import click
import pytest
from tools import gpu

import statelink.cli

if TYPE_CHECKING:
    from pathlib import Path

Run = Callable[..., int]
TESTS = ("-m", "pytest")


@pytest.fixture(name="run")
def run_fixture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs `tools.gpu` in this process, on a machine with CUDA's driver."""
    monkeypatch.setattr(gpu, "driver", lambda: "a machine with a card")

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["tools.gpu", "--out", str(tmp_path), *words])
        return gpu.main()

    return run


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[tuple[str, ...]]]:
    """The stand-in for the interpreter writes down the words that it gets. Returns them, a tuple for each start."""
    python, written = tmp_path / "python", tmp_path / "words"
    python.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" >> "{written}"\nprintf "\\0" >> "{written}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return lambda: [tuple(words.split("\0")) for words in written.read_text().removesuffix("\0\0").split("\0\0")]


class Taken(Exception):
    """A program took all of its words, and would begin to work."""


def begin(monkeypatch: pytest.MonkeyPatch, how: str, what: str, *words: str) -> None:
    """Run the program that an interpreter would run, up to where it has read its words."""
    parse = argparse.ArgumentParser.parse_args

    def parsed(*arguments: Any, **named: Any) -> NoReturn:
        parse(*arguments, **named)  # exits if it does not know a word
        raise Taken

    def invoked(*arguments: Any) -> NoReturn:
        raise Taken

    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [what, *words])
        patch.delitem(sys.modules, what, raising=False)  # some import themselves by their name
        patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        patch.setattr(click.Command, "invoke", invoked)
        if how == "-m":
            runpy.run_module(what, run_name="__main__")
        else:
            assert (how, what) == ("-c", "from statelink.cli import main; main()")
            statelink.cli.main(words, standalone_mode=False)


def test_every_part_is_a_command_that_runs(
    run: Run,
    commands: Callable[[], list[tuple[str, ...]]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status, at_once = run(), run("--quick")
    said = capsys.readouterr().out
    assert (status, at_once) == (0, 0), said
    assert all(f"\n{name}: status: passed" in said for name in (*gpu.PARTS, *gpu.QUICK))
    started = commands()
    assert len(started) == len(gpu.PARTS) + len(gpu.QUICK)
    for words in dict.fromkeys(started):
        if words[:2] != TESTS:
            with pytest.raises(Taken):
                begin(monkeypatch, *words)


def test_parts_that_run_tests_find_some() -> None:
    commands = [part.command for part in (*gpu.PARTS.values(), *gpu.QUICK.values()) if part.command[:2] == TESTS]
    places = {word for command in commands for word in command if word.startswith("tests/")}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *places]
    done = subprocess.run(command, cwd=gpu.ROOT, check=True, capture_output=True, text=True)
    for place in places:
        assert f"\n{place}" in f"\n{done.stdout}"


def answered(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "quick.jsonl").read_text().splitlines()]


def script(text: str) -> tuple[str, ...]:
    return ("-c", text)


def test_a_part_that_fails_does_not_stop_the_next(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    says = "from tools.card.say import answer; answer('speed', 3.5, 'GB/s')"
    os.mkfifo(held := tmp_path / "held")
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    hangs = f"import os, time\nheld = open({str(held)!r}, 'w')\nos.fork() or os.setsid()\ntime.sleep(600)"
    parts = {
        "fails": gpu.Part("", script(f"{says}; print('why'); raise SystemExit(7)")),
        "hangs": gpu.Part("", script(hangs), 2),
        "crashes": gpu.Part("", script("import os; os.abort()")),
        "row": gpu.Part("", script('print(\'{"workload": "A", "request_ms": 2.0}\')')),
        "works": gpu.Part("", script(says)),
    }
    monkeypatch.setattr(gpu, "QUICK", parts)
    assert run("--quick") == 1
    found = answered(tmp_path)
    status = {line["part"]: line["value"] for line in found if line["what"] == "status"}
    assert status == {
        "fails": "exit status 7",
        "hangs": "ended after its 2 s",
        "crashes": "exit status -6",
        "row": "passed",
        "works": "passed",
    }
    speed = {"what": "speed", "value": 3.5, "unit": "GB/s"}
    assert [line["part"] for line in found if speed.items() <= line.items()] == ["fails", "works"]
    assert {"workload": "A", "request_ms": 2.0} in [line["value"] for line in found]
    assert "why" in (tmp_path / "quick.txt").read_text()
    os.set_blocking(reader, True)
    with os.fdopen(reader) as file:
        assert file.read() == ""  # at the end of the last process of the part that hung


@pytest.mark.parametrize("mode", [(), ("--quick",)], ids=["every part", "quick"])
def test_without_a_card(
    run: Run, mode: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "driver", str)
    assert run(*mode) == 0
    said = capsys.readouterr().out
    assert "these parts would run" in said
    assert all(name in said for name in (gpu.QUICK if mode else gpu.PARTS))
