"""``statelink conform``: the kit from the command line, with a summary that says what was broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from statelink.cli import main

PACKAGES = Path(__file__).parents[1] / "testing" / "packages"


def conform(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["conform", *arguments])


def test_a_backend_that_keeps_its_contract() -> None:
    arguments = (
        "tcp",
        "--option",
        "drain_timeout=2",
        "-k",
        "Moving and alignment or Declaration and option",
    )
    done = conform(*arguments)
    assert done.exit_code == 0, done.output
    assert "tcp: 2 passed in" in done.output
    assert "need not be aligned" in done.output
    assert "1 of 2: Declaration" in done.stderr, "it says nothing while it runs"
    done = conform(*arguments, "--json")
    assert done.exit_code == 0, done.output
    (run,) = json.loads(done.stdout)["runs"]
    assert (run["backend"], run["options"]) == ("tcp", {"drain_timeout": 2})
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
    assert len(done.output.splitlines()) < 80  # most of it is the table of clauses
    assert "and 2 more" in done.output
    assert "not run: 5 clauses failed as test_no_memory_at_all_can_be_registered did" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("tpc",), 1, "did you mean 'tcp'?"),
        (("tcp", "-o", "drain_timout=2"), 1, "did you mean 'drain_timeout'?"),
        (("tcp", "-o", "drain_timeout"), 2, "is not KEY=VALUE"),
        (("tcp", "-k", "no_such_clause"), 2, "no clause was run"),
        (("tcp", "--memory", "cuda:0"), 1, "cannot register memory of kind 'cuda:0': it declares dram"),
    ],
)
def test_what_cannot_be_run(arguments: tuple[str, ...], status: int, said: str) -> None:
    done = conform(*arguments)
    assert done.exit_code == status
    assert said in done.output
