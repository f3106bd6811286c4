"""The kit's pytest plugin: options, deviations, and the report."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from statelink import __version__

from ._fixtures import memory_of, statelink_lab, statelink_pool, statelink_pools, subject, untested
from ._lab import FAILED, NOT_APPLICABLE
from ._worker import Finding, Hung, Unexpected
from ._workers import Died
from .report import Cell, Clause, Report, Run, Verdict

__all__ = ["statelink_lab", "statelink_pool", "statelink_pools", "subject"]

_RUNS = pytest.StashKey[dict[str, Run]]()
_ENDED = pytest.StashKey[dict[str, str]]()
"""Why no more clauses of a test class are run."""
MOST_ALIKE = 5
"""The kit ends after this many clauses with one defect: a crash, or a call that did what no call may do."""
_SEEN = pytest.StashKey[dict[tuple[str, str, str], str]]()
"""The first of several clauses that failed alike, by test class, verdict and kind of reason."""
_PART = "statelink_runs"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the kit's options."""
    group = parser.getgroup("statelink", "Statelink's conformance kit")
    group.addoption(
        "--statelink-require",
        action="store_true",
        help="fail, rather than skip, where a backend cannot run on this machine",
    )
    group.addoption(
        "--statelink-memory",
        metavar="KIND",
        default="",
        help="move memory of this kind, such as cuda:0, instead of what the test class says; torch allocates it",
    )
    group.addoption("--statelink-report", metavar="FILE", type=Path, help="write what was found as JSON")
    group.addoption(
        "--statelink-progress",
        metavar="FD",
        type=int,
        help="write to this file descriptor: the number of clauses, and each clause that was run, as lines of JSON",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Add the kit's marker."""
    config.addinivalue_line("markers", "soak: takes long")
    config.stash[_RUNS], config.stash[_ENDED], config.stash[_SEEN] = {}, {}, {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect the failures that a test class states."""
    for item in items:
        suite = _suite_of(item)
        if suite is None:
            continue
        for name, reason in suite.deviations.items():
            if name in (item.name, getattr(item, "originalname", "")):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let ``-k`` also select clauses by theme, which is their class, such as ``Fencing``."""
    if _suite_of(item) is not None:
        item.extra_keyword_matches.add(_theme_of(item))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip clauses of a test class after one that hung, or after several with the same defect."""
    why = item.config.stash[_ENDED].get(item.nodeid.rpartition("::")[0])
    if why is not None:
        pytest.skip(why)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record the result of a clause."""
    report = yield
    suite = _suite_of(item)
    if suite is not None:
        item.stash[FAILED] = item.stash.get(FAILED, False) or (call.excinfo is not None and not report.skipped)
        if report.when == "call" or not report.passed:
            error = call.excinfo.value if call.excinfo is not None else None
            clause = _keep(item, suite, report, error)
            if report.failed:
                _explain(report, clause, traceback=item.config.getoption("tbstyle") != "auto")
                _end_early(item, clause, error)
            _tell(item.config, clause)
    return report


def _keep(item: pytest.Item, suite: Any, report: pytest.TestReport, error: BaseException | None) -> Clause:
    verdict, reason = _verdict(report, error)
    function: Any = getattr(item, "function")  # noqa: B009 - items in general have none
    run = item.config.stash[_RUNS].setdefault(
        item.nodeid.rpartition("::")[0],
        Run(
            suite=suite.__name__,
            backend=suite.backend,
            options=dict(suite.options),
            memory=memory_of(item.config, suite),
            moved_by=suite.moved_by,
            untested=untested(suite, memory_of(item.config, suite)),
            clauses=[],
            states=[],
        ),
    )
    says, _, todo = inspect.cleandoc(function.__doc__ or function.__name__).rpartition("\n\n")
    says, todo = (says, todo) if says else (todo, "")
    if run.clauses and run.clauses[-1].name == item.name:
        run.clauses.pop()  # it passed, and its clean-up failed
    alike = item.nodeid.rpartition("::")[0], verdict, _kind_of_reason(reason)
    first = item.config.stash[_SEEN].setdefault(alike, item.name) if verdict in ("failed", "deviates") else item.name
    kept = Clause(
        name=item.name,
        theme=_theme_of(item),
        says=" ".join(says.split()),
        verdict=verdict,
        reason=reason,
        todo=_todo(error, " ".join(todo.split()), run.clauses) if verdict == "failed" else "",
        like=first if first != item.name else "",
        seconds=round(report.duration, 3),
    )
    run.clauses.append(kept)
    callspec = getattr(item, "callspec", None)
    if callspec is not None and {"label", "topology"} <= set(callspec.params):
        moved = "simulator" if suite.simulator else "real"
        how: Any = moved if verdict == "passed" else "not run"
        run.states.append(Cell(type=callspec.params["label"], topology=callspec.params["topology"], how=how))
    return kept


def _verdict(report: pytest.TestReport, error: BaseException | None) -> tuple[Verdict, str]:
    if hasattr(report, "wasxfail"):
        return ("deviates", str(report.wasxfail).removeprefix("reason: ")) if report.skipped else ("passed", "")
    if report.passed:
        return "passed", ""
    if report.failed:
        return "failed", (str(report.longrepr) if error is None else _words_of(error))[:4000]
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if reason.startswith("got empty parameter set"):
        return "not applicable", "nothing that it declares"
    if reason.startswith(NOT_APPLICABLE):
        return "not applicable", reason.removeprefix(NOT_APPLICABLE)
    return "not run", reason


def _words_of(error: BaseException) -> str:
    """The text of an exception. Assertions of the clauses need no type before their text."""
    ours = isinstance(error, AssertionError | Unexpected | pytest.fail.Exception)
    words = str(error).partition("\nassert ")[0]  # drop what pytest adds to the text of an assert
    return words if ours and words else f"{type(error).__name__}: {words}"


def _todo(error: BaseException | None, todo: str, before: Sequence[Clause]) -> str:
    """What to do about a failure.

    If any clause could have found it, this depends on what was found. The hint in the clause's docstring comes after
    that, unless an earlier clause found the same. Otherwise it is the hint in the docstring.
    """
    if isinstance(error, Died):
        return "The process of the backend ended. See what it printed last: most often, native code crashed."
    if not isinstance(error, Unexpected | Finding):
        return todo
    told = error.todo or todo
    if error.general and not any(each.todo.startswith(told) for each in before):
        told += f" If only this clause fails: {todo}"
    if isinstance(error, Hung):
        longer = "If the library needs longer, make `patience` larger."
        told += f" See where it waits: `--verbose` shows every stack. {longer}"
    return told


def _end_early(item: pytest.Item, clause: Clause, error: BaseException | None) -> None:
    """End a test class if the other clauses would hang as long as this one, or would only meet the same defect."""
    suite, ended = item.nodeid.rpartition("::")[0], item.config.stash[_ENDED]
    if isinstance(error, Hung):
        ended.setdefault(suite, f"{clause.name} did not end, and what comes after it may take as long")
    elif isinstance(error, Unexpected | Died):
        alike = [each for each in item.config.stash[_RUNS][suite].clauses if each.like and each.like == clause.like]
        if len(alike) + 1 >= MOST_ALIKE:
            ended.setdefault(suite, f"{MOST_ALIKE} clauses failed as {clause.like} did: mend that first")


class _Shown:
    """A failure in words. A traceback would only show the kit, which is not at fault."""

    def __init__(self, words: str, where: Any) -> None:
        self.words = words
        self.reprcrash = where

    def __str__(self) -> str:
        return self.words

    def toterminal(self, writer: Any) -> None:
        """Print it, as pytest asks for."""
        for line in self.words.splitlines():
            writer.line(line)


def _explain(report: pytest.TestReport, clause: Clause, *, traceback: bool) -> None:
    """Print the clause, what was found, and what to do. If an earlier clause failed alike, print one line."""
    where: Any = getattr(report.longrepr, "reprcrash", None)
    if where is not None:
        where.message = clause.reason.partition("\n")[0]
    lines = [f"the contract: {clause.says}", f"found: {clause.reason}"]
    if clause.like:
        lines = [f"as {clause.like}: {clause.reason.partition(chr(10))[0]}"]
        report.sections.clear()
    elif clause.todo:
        lines.append(f"what to do: {clause.todo}")
    if clause.like or not traceback:
        longrepr: Any = _Shown("\n".join(lines), where)
        report.longrepr = longrepr
    else:
        report.sections.append(("the clause", "\n".join(lines)))


def _kind_of_reason(reason: str) -> str:
    """The kind of a reason: its first line without numbers, so that equal failures at other places compare equal."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", reason.partition("\n")[0])


def _suite_of(item: pytest.Item) -> Any:
    suite = getattr(item, "cls", None)
    return suite if getattr(suite, "is_statelink_suite", False) else None


def _theme_of(item: pytest.Item) -> str:
    function: Any = getattr(item, "function")  # noqa: B009 - items in general have none
    theme: str = function.__qualname__.partition(".")[0]
    return theme


def _tell(config: pytest.Config, clause: Clause) -> None:
    descriptor = config.getoption("statelink_progress")
    if descriptor is not None:
        os.write(descriptor, msgspec.json.encode(clause) + b"\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Report the number of clauses."""
    descriptor = session.config.getoption("statelink_progress")
    if descriptor is not None:
        os.write(descriptor, b"%d\n" % len(session.items))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the report. If tests run in several processes, each worker sends its part to the main process."""
    runs = session.config.stash[_RUNS]
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_PART] = msgspec.json.encode(runs).decode()
        return
    path = session.config.getoption("statelink_report")
    if path is not None:
        report = Report(statelink=__version__, runs=[runs[each] for each in sorted(runs)])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what moved the bytes, and which declared kinds of memory no test class has moved."""
    runs = list(config.stash[_RUNS].values())
    for backend, moved_by in sorted({(run.backend, run.moved_by) for run in runs if run.moved_by}):
        terminalreporter.write_line(f"{backend}: bytes were moved by {moved_by}")
    moved = {(run.backend, run.memory.partition(":")[0]) for run in runs}
    lacks = {(run.backend, kind) for run in runs for kind in run.untested} - moved
    for backend, kind in sorted(lacks):
        terminalreporter.write_line(f"{backend}: declared kind {kind}: not tested here; --statelink-memory moves it")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take a worker's part of the report (pytest-xdist)."""
    part = getattr(node, "workeroutput", {}).get(_PART, "{}")
    node.config.stash[_RUNS].update(msgspec.json.decode(part, type=dict[str, Run]))
