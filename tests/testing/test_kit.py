"""The kit itself: a backend that is wrong in one way breaks the clause that says so, for that reason."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from statelink_conformance.report import Clause, Report

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

ALWAYS = {
    "test_its_class_is_complete",
    "test_no_memory_at_all_can_be_registered",
    "test_a_descriptor_is_bytes_and_bounded",
}
"""Clauses that every wrong backend keeps."""

MOVING = {
    "test_every_alignment_arrives",
    "test_an_unknown_peer_is_refused",
    "test_memory_that_is_not_registered_cannot_be_granted",
    "test_a_descriptor_of_somebody_else_is_refused",
}
"""Clauses that those keep whose bytes arrive: each of them ends with a move."""

BYTES_DO_NOT_ARRIVE = {"Early", "DropsLast", "TooFar", "HidesFence", "ForgetsOffset", "Sends", "ReturnsNothing"}
TOGETHER = 6
"""Wrong backends that are run in one process."""
HANGS = {"Hangs"}
DEFECTIVE = {"ForgetsLine", "OutcomeIsTrue", "DescribesAsText"}
"""Those that keep no clause that opens a backend, or that moves."""
ALSO = {"TakesGarbage": {"test_a_descriptor_of_somebody_else_is_refused"}}
"""What else follows from the same defect."""


def broken(file: str) -> dict[str, Any]:
    """The table of a file that cannot be imported here: what it tests is not installed."""
    tree = ast.parse((HERE / file).read_text())
    (table,) = [node.value for node in tree.body if isinstance(node, ast.AnnAssign) and node.value is not None]
    found: dict[str, Any] = ast.literal_eval(table)
    return found


BROKEN: dict[str, tuple[str, str]] = broken("wrong.py")


def kit(report: Path, *arguments: str, packages: Sequence[Path] = (HERE / "packages",)) -> dict[str, list[Clause]]:
    """What the kit says, by the name of the test class."""
    environment: dict[str, Any] = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, packages), *filter(None, sys.path)]),
        "STATELINK_TEST_LEFT": f"statelink-left-{uuid.uuid4().hex}",  # what some leave behind is found by it
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--timeout", "60", "-q", "--tb=short"]
    command += ["-o", "faulthandler_timeout=0", "--statelink-report", str(report), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    found = msgspec.json.decode(report.read_bytes(), type=Report)
    for left in Path("/dev/shm").glob(f"{environment['STATELINK_TEST_LEFT']}-*"):
        left.unlink()
    return {run.suite.removeprefix("Test"): run.clauses for run in found.runs}


Found = Callable[[str], list[Clause]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the kit says of a wrong backend; some of them are run at once, since that shares processes."""
    names, seen = list(BROKEN), dict[str, list[Clause]]()

    def of(name: str) -> list[Clause]:
        if name not in seen:
            first = names.index(name) // TOGETHER * TOGETHER
            nodes = [
                f"{HERE / 'wrong.py'}::Test{each}::{clause}"
                for each in names[first : first + TOGETHER]
                for clause in dict.fromkeys((BROKEN[each][0], *sorted(ALWAYS | MOVING)))
            ]
            seen.update(kit(tmp_path_factory.mktemp("kit") / "report.json", *nodes))
        return seen[name]

    return of


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_backend_fails_for_the_right_reason(found: Found, name: str) -> None:
    wrong, reason = BROKEN[name]
    clauses = found(name)
    failed = [clause for clause in clauses if clause.verdict == "failed"]
    if name in DEFECTIVE:
        failed = failed[:1]
    named = [clause for clause in failed if wrong in (clause.name, clause.name.partition("[")[0])]
    assert any(reason in clause.reason for clause in named), failed
    assert all(clause.todo for clause in named)
    also = {clause.name.partition("[")[0] for clause in failed} - {wrong.partition("[")[0]}
    if name in BYTES_DO_NOT_ARRIVE:
        assert also <= MOVING
    else:
        assert also == ALSO.get(name, set())
    assert {clause.name.partition("[")[0] for clause in clauses} >= ALWAYS | MOVING
    hung = [clause.name for clause in clauses if "did not end, and what comes after it" in clause.reason]
    assert bool(hung) == (name in HANGS)


def test_a_clause_that_hangs_ends_its_class(found: Found) -> None:
    """What comes after it would wait as long, and is said not to have been run."""
    for name in HANGS:
        first, *others = found(name)
        assert first.verdict == "failed"
        assert "Set an outcome with `ok=False`" in first.todo
        assert "`--verbose` shows every stack" in first.todo
        assert {(clause.verdict, clause.reason) for clause in others} == {
            ("not run", f"{first.name} did not end, and what comes after it may take as long")
        }


def test_what_is_wrong_with_bytes_is_said(tmp_path: Path) -> None:
    """Bytes at a wrong place are not called early; early ones are, and a hint does not speak of an error."""
    clauses = ("test_bytes_are_visible_before_a_move_is_done", "test_every_alignment_arrives")
    nodes = [f"{HERE / 'wrong.py'}::Test{name}::{clause}" for name in ("ForgetsOffset", "Sends") for clause in clauses]
    nodes.append(f"{HERE / 'wrong.py'}::TestSends::test_a_move_to_a_dead_peer_fails[before]")
    said = kit(tmp_path / "report.json", *nodes)
    at_end, *_, arrives = said["ForgetsOffset"]
    assert "also 0.3 s after its move was done" in at_end.reason
    assert at_end.todo.startswith("Nothing was early")
    place = r"block \d+ of 256 has 64 bytes for address 0x\w+, byte \d+ of region 3, .* are at address 0x\w+, byte 0 of"
    assert re.search(place, arrives.reason)
    *_, arrives, dead = said["Sends"]
    assert "they came after their move was reported done" in arrives.reason
    assert arrives.todo.startswith("Let a transfer succeed when the other side has its bytes")
    assert dead.reason == "move 1 to a dead peer was reported done"
    assert "never let it succeed before the peer has its bytes" in dead.todo


def test_a_hint_fits_what_was_found(tmp_path: Path) -> None:
    """What any clause could find has a hint of its own. That of the clause follows it, the first time."""
    bytes_ = "Write each byte of each block to its place, and no other, before the transfer succeeds; change no source."
    clauses = ("test_many_regions_can_be_registered", "test_every_alignment_arrives")
    nodes = [f"{HERE / 'wrong.py'}::TestDropsLast::{clause}" for clause in clauses]
    nodes.append(f"{HERE / 'wrong.py'}::TestSilent::test_a_move_fails_when_its_peer_dies")
    nodes.append(f"{HERE / 'wrong.py'}::TestOutcomeIsTrue::test_every_alignment_arrives")
    nodes.append(f"{HERE / 'wrong.py'}::TestRefusesStrangers::test_disconnecting_twice_or_from_nobody_is_ignored")
    nodes.append(f"{HERE / 'wrong.py'}::TestClosesOnce::test_a_backend_can_be_closed_twice")
    said = kit(tmp_path / "report.json", *nodes)
    first, second = said["DropsLast"]
    assert first.todo.startswith(f"{bytes_} If only this clause fails: Register all in one call")
    assert second.todo == bytes_
    (silent,) = said["Silent"]
    assert silent.todo.startswith("Give each failure a reason: ")
    (outcome,) = said["OutcomeIsTrue"]
    assert outcome.todo == "Set `Transfer.outcome` to an `Outcome`; `succeed` and `fail` do so."
    (stranger,) = said["RefusesStrangers"]
    assert stranger.todo.startswith("Let `disconnect` never raise: ")
    (twice,) = said["ClosesOnce"]
    assert twice.todo.startswith("Let `close` never raise: ")


def test_every_clause_says_what_to_do() -> None:
    """As the last paragraph of its docstring; and whatever it checks says in words what was found."""
    silent, bare = [], []
    for path in sorted((ROOT / "plugins/conformance/src/statelink_conformance").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert) and node.msg is None:
                bare.append(f"{path.name}:{node.lineno}")
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                silent += [] if "\n\n" in (ast.get_docstring(node) or "") else [node.name]
    assert not silent
    assert not bare


def test_failures_for_one_reason_are_one(found: Found) -> None:
    """Where the constructor lacks a line, one clause is explained, some name it, and the rest is not run."""
    clauses = found("ForgetsLine")
    failed = [clause for clause in clauses if clause.verdict == "failed"]
    first, *others = [clause for clause in failed if "has no attribute" in clause.reason]
    assert {clause.like for clause in others} == {first.name}
    assert len(failed) == 5
    rest = [clause for clause in clauses if clause.verdict == "not run"]
    assert {clause.reason for clause in rest} == {f"5 clauses failed as {first.name} did: mend that first"}


def test_a_backend_with_low_limits_passes(tmp_path: Path) -> None:
    """It refuses more blocks and more bytes than it declares, and nothing more than that is given to it."""
    choice = "(Moving or Stalling or Fencing or Leaking or Dying) and not thousand"
    found = kit(tmp_path / "report.json", f"{HERE / 'honest.py'}::TestBounded", "-k", choice)["Bounded"]
    assert not [clause for clause in found if clause.verdict in ("failed", "not run")]
    assert "test_a_quarter_of_a_gibibyte_arrives" in {clause.name for clause in found}


def test_a_right_backend_passes(tmp_path: Path) -> None:
    """One that reaches no other process, and moves two state types only."""
    found = kit(
        tmp_path / "report.json", f"{HERE / 'honest.py'}::TestHonest", "-k", "not quarter and not thousand and not 2"
    )["Honest"]
    verdicts = {clause.name: clause.verdict for clause in found}
    assert [name for name, verdict in verdicts.items() if verdict in ("failed", "not run")] == [
        "test_its_class_is_complete"  # a deviation that is stated, and is none
    ]
    assert verdicts["test_bytes_are_visible_before_a_move_is_done[4096]"] == "passed"
    assert verdicts["test_a_state_type_that_is_not_declared_is_refused"] == "passed"
    assert verdicts["test_an_aborted_room_ends_on_both_sides[decode-moving]"] == "passed"
    assert verdicts["test_a_revoke_does_not_wait_for_the_peer"] == "not applicable"
