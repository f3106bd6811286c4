"""The command that runs several releases of the engines, with a stand-in for ``make`` that reports tests."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tools import engine_window

if TYPE_CHECKING:
    from pathlib import Path

MAKE = """#!/bin/sh
echo "$@" >> {log}
for each in "$@"; do case $each in *--junitxml=*) report=${{each##*--junitxml=}};; esac; done
{then}
"""
REPORT = """<testsuites><testsuite tests="3" skipped="1" time="90"><testcase classname="tests.test_a" name="one"/>
<testcase classname="tests.test_a" name="two"><skipped/></testcase>
<testcase classname="tests.test_a" name="three[x]">{}</testcase></testsuite></testsuites>"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for what is written, and for the stand-in."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(engine_window, "FOUND", tmp_path / "window.json")
    monkeypatch.setattr(engine_window, "TABLE", tmp_path / "RESULTS.md")
    return tmp_path


def make_that(folder: Path, then: str) -> None:
    (folder / "make").write_text(MAKE.format(log=folder / "log", then=then))
    (folder / "make").chmod(0o755)


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["engine_window", *arguments])
    with pytest.raises(SystemExit) as exit_:
        engine_window.main()
    return int(exit_.value.code or 0)


def row(folder: Path, name: str) -> list[str]:
    lines = (folder / "RESULTS.md").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_what_failed_can_be_run_again_and_the_table_says_so(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"SGLang {engine_window.releases('sglang')[0]}"
    make_that(made, f"printf '%s' '{REPORT.format('<failure/>')}' > $report; exit 2")
    assert ended(monkeypatch, "--only", name) == 1
    one = '<testsuites><testsuite time="9"><testcase classname="tests.test_a" name="three[x]">{}</testcase></testsuite>'
    make_that(made, f"printf '%s' '{one.format('<failure/>')}</testsuites>' > $report; exit 2")
    assert ended(monkeypatch, "--only", name, "--again") == 1
    assert row(made, name)[1:6] == ["3", "1", "1", "1", "2"]
    make_that(made, f"printf '%s' '{one.format('')}</testsuites>' > $report")
    assert ended(monkeypatch, "--only", name, "--again") == 0
    said = (made / "log").read_text().splitlines()[-1]
    assert "ARGS=-m 'smoke or servers' -k 'test_a and three' --junitxml=" in said
    assert row(made, name)[1:6] == ["3", "2", "0", "1", "2"]
    results = (made / "RESULTS.md").read_text()
    assert "## What failed\n" not in results
    assert f"passed when it was run again\n\n- {name}: `test_a::three[x]`, " in results
    assert ended(monkeypatch, "--only", name, "--again") == 0
    assert (made / "log").read_text().splitlines()[-1] == said, "nothing is left to run"


@pytest.mark.parametrize("then", ["exit 2", "printf '<a><testsuite tests=\"0\"/></a>' > $report; exit 5"])
def test_a_run_without_tests_is_a_failure(made: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    name = f"SGLang {engine_window.releases('sglang')[0]}"
    make_that(made, then)
    assert ended(monkeypatch, "--only", name) == 1
    assert f"- {name}: `make ended with" in (made / "RESULTS.md").read_text()


def test_every_two_releases_meet_in_both_directions() -> None:
    names = [run.name for run in engine_window.runs()]
    for engine, title in engine_window.ENGINES.items():
        known = engine_window.releases(engine)
        assert len(known) == 3
        pairs = {(one, other) for one in known for other in known if one != other}
        assert {name for name in names if name.startswith(f"{title}: ")} == {
            f"{title}: prefill {one}, decode {other}" for one, other in pairs
        }
    listed = subprocess.run(
        [sys.executable, "-m", "tools.engine_window", "--list"], capture_output=True, text=True, check=True, timeout=60
    )
    assert listed.stdout.splitlines() == names
