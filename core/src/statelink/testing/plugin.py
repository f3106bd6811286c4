"""The kit's pytest plugin: its options, the deviations that a plugin states, and the report."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from statelink import __version__

from ._fixtures import memory_of, statelink_lab, statelink_pool, statelink_pools, subject
from ._report import FAILED, NOT_APPLICABLE, Cell, Clause, Report, Run, Verdict

__all__ = ["statelink_lab", "statelink_pool", "statelink_pools", "subject"]

_RUNS = pytest.StashKey[dict[str, Run]]()
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


def pytest_configure(config: pytest.Config) -> None:
    """Add the kit's marker."""
    config.addinivalue_line("markers", "soak: takes long")
    config.stash[_RUNS] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect the failures that a test class states."""
    for item in items:
        suite = _suite_of(item)
        if suite is None:
            continue
        for name, reason in suite.deviations.items():
            if name in (item.name, getattr(item, "originalname", "")):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep what came of a clause."""
    report = yield
    suite = _suite_of(item)
    if suite is not None:
        item.stash[FAILED] = item.stash.get(FAILED, False) or (call.excinfo is not None and not report.skipped)
        if report.when == "call" or not report.passed:
            _keep(item, suite, report)
    return report


def _keep(item: pytest.Item, suite: Any, report: pytest.TestReport) -> None:
    verdict, reason = _verdict(report)
    function: Any = getattr(item, "function")  # noqa: B009 - items in general have none
    run = item.config.stash[_RUNS].setdefault(
        item.nodeid.rpartition("::")[0],
        Run(
            suite=suite.__name__,
            backend=suite.backend,
            options=dict(suite.options),
            memory=memory_of(item.config, suite),
            clauses=[],
            states=[],
        ),
    )
    says = " ".join(
        (function.__doc__ or function.__name__.removeprefix("test_").replace("_", " ")).split("\n\n")[0].split()
    )
    theme = function.__qualname__.partition(".")[0]
    if run.clauses and run.clauses[-1].name == item.name:
        run.clauses.pop()  # it passed, and failed when it was cleaned up after
    run.clauses.append(
        Clause(
            name=item.name, theme=theme, says=says, verdict=verdict, reason=reason, seconds=round(report.duration, 3)
        )
    )
    callspec = getattr(item, "callspec", None)
    if callspec is not None and {"label", "topology"} <= set(callspec.params):
        moved = "simulator" if suite.simulator else "real"
        how: Any = moved if verdict == "passed" else "not run"
        run.states.append(Cell(type=callspec.params["label"], topology=callspec.params["topology"], how=how))


def _verdict(report: pytest.TestReport) -> tuple[Verdict, str]:
    if hasattr(report, "wasxfail"):
        return ("deviates", str(report.wasxfail).removeprefix("reason: ")) if report.skipped else ("passed", "")
    if report.passed:
        return "passed", ""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        return "failed", str(crash.message if crash else report.longrepr)[:2000]
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if reason.startswith("got empty parameter set"):
        return "not applicable", "nothing that it declares"
    if reason.startswith(NOT_APPLICABLE):
        return "not applicable", reason.removeprefix(NOT_APPLICABLE)
    return "not run", reason


def _suite_of(item: pytest.Item) -> Any:
    suite = getattr(item, "cls", None)
    return suite if getattr(suite, "is_statelink_suite", False) else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the report; where tests run side by side, each worker hands its part to the one who started it."""
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


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take a worker's part of the report (pytest-xdist)."""
    part = getattr(node, "workeroutput", {}).get(_PART, "{}")
    node.config.stash[_RUNS].update(msgspec.json.decode(part, type=dict[str, Run]))
