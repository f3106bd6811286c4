"""``statelink conform``: the kit from the command line, with a summary that says what was broken."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from statelink.cli import main

PACKAGES = Path(__file__).parents[3] / "tests" / "testing" / "packages"


def conform(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["conform", *arguments])


def test_a_backend_that_keeps_its_contract() -> None:
    arguments = (
        "tcp",
        "--option",
        "stall_timeout=2",
        "-k",
        "Moving and alignment or Declaration and unknown_option",
    )
    done = conform(*arguments)
    assert done.exit_code == 0, done.output
    assert "tcp: 2 passed in" in done.output
    assert "need not be aligned" in done.output
    assert "1 of 2: Declaration" in done.stderr, "it says nothing while it runs"
    done = conform(*arguments, "--json")
    assert done.exit_code == 0, done.output
    (run,) = json.loads(done.stdout)["runs"]
    assert (run["backend"], run["options"]) == ("tcp", {"stall_timeout": 2})
    assert {clause["theme"] for clause in run["clauses"]} == {"Moving", "Declaration"}


def test_a_backend_that_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGES))
    done = conform("wrong-takes-garbage", "-k", "damaged or class_is_complete")
    assert done.exit_code == 1, done.output
    assert "failed: test_a_damaged_descriptor_is_refused" in done.output
    assert "the contract: Garbage, part of a descriptor" in " ".join(done.output.split())
    assert "what to do: Check all of a descriptor" in " ".join(done.output.split())
    assert "Connecting: test_a_damaged_descriptor_is_refused failed" in done.output, "it says nothing while it runs"
    assert "was accepted: b''" in done.output
    assert "wrong-takes-garbage: 1 passed, 1 failed in" in done.output


def test_it_stops_at_the_first_failure_if_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGES))
    done = conform("wrong-forgets-line", "-k", "Registration or Connecting", "-x")
    assert done.exit_code == 1, done.output
    assert ", 1 failed in" in done.output or ": 1 failed in" in done.output
    assert "stopped at the first clause that failed" in done.output


def test_failures_for_one_reason_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constructor that lacks a line fails every clause that opens the backend."""
    monkeypatch.syspath_prepend(str(PACKAGES))
    done = conform("wrong-forgets-line", "-k", "Registration or Connecting")
    assert done.exit_code == 1, done.output
    assert done.output.count("has no attribute") <= 2
    assert len(done.output.splitlines()) < 90  # most of it is the table of clauses
    said = " ".join(done.output.split())  # its lines are as wide as the terminal
    assert "and 2 more" in said
    assert "not run: 5 clauses failed as test_no_memory_at_all_can_be_registered did" in said


def test_a_group_of_failures_has_all_that_one_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of the contract, a hint that is true, and the number of each clause."""
    monkeypatch.syspath_prepend(str(PACKAGES))
    done = conform("wrong-leaks-files", "-k", "often")
    assert "failed: test_opening_often_leaves_nothing_behind" in done.output
    assert re.search(r"6 descriptors more after 3 times: 6 of \S+", " ".join(done.output.split()))
    done = conform("wrong-returns-nothing", "-k", "alignment or several_places or rooms_follow")
    said = " ".join(done.output.split())
    assert "the contract, of the first: " in said
    assert "found: `submit` returned None, and not a `Transfer` what to do: Return a `Transfer` from `submit`." in said
    done = conform("wrong-raises-in-probe", "-k", "probe_answers")
    said = " ".join(done.output.split())
    assert "found: `probe` raised RuntimeError: boom what to do: Let `probe` never raise." in said
    assert "TransferError" not in said


def test_numbers_of_a_group_are_told_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGES))
    done = conform("wrong-leaks-threads", "-k", "often")
    said = " ".join(done.output.split())
    assert "found: 40 threads more after 40 times" in said
    assert re.search(r"found by test_opening_often_leaves_nothing_behind: \d threads more after 3 times", said)


def test_kinds_of_memory_that_were_not_tried_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGES))
    done = conform("anywhere", "--memory", "cpu:0", "-k", "class_is_complete")
    assert done.exit_code == 0, done.output
    assert "declared kind granite: not tested here; --memory moves it" in done.output
    assert json.loads(conform("tcp", "-k", "class_is_complete", "--json").stdout)["runs"][0]["untested"] == []


def test_names_are_listed() -> None:
    done = conform("tcp", "--list")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    at = lines.index("  test_every_alignment_arrives")
    assert lines[at + 1] == "      Source and target need not be aligned, nor aligned alike."
    assert lines.index("Moving") < at < lines.index("Refusing")
    assert "thousand_times" not in done.output, "a run does not have it"
    listed = json.loads(conform("tcp", "--list", "--json").output)
    assert {"theme": "Declaration", "name": "test_its_probe_answers", "says": listed[3]["says"]} in listed


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("tpc",), 1, "did you mean 'tcp'?"),
        (("tpc", "--list"), 1, "did you mean 'tcp'?"),
        (("tcp", "-o", "stall_timout=2"), 1, "did you mean 'stall_timeout'?"),
        (("tcp", "-o", "stall_timeout"), 2, "is not KEY=VALUE"),
        (("tcp", "-k", "no_such_clause"), 2, "none matches 'no_such_clause'\nhint: `statelink conform tcp --list`"),
        (("tcp", "--memory", "cuda:0"), 1, "cannot register memory of kind 'cuda:0': it declares dram"),
    ],
)
def test_what_cannot_be_run(arguments: tuple[str, ...], status: int, said: str) -> None:
    done = conform(*arguments)
    assert done.exit_code == status
    assert said in done.output
