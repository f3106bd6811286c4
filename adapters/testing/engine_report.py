"""A report of what the tests with an engine found, which `tools/engine_table.py` makes a table of.

The ``conftest.py`` of an adapter hands its hooks on to `add_option` and `configure`. A test says with
``@pytest.mark.shows("...")`` what it is there to show. Its parameters stand in braces: ``"tokens over {backend}"``.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

__all__ = ["add_option", "configure"]

LIBRARIES = ("torch", "transformers", "nixl", "mooncake-transfer-engine-non-cuda")
"""Distributions whose versions are in each report, beside the engine, its adapter and the core."""


def add_option(parser: pytest.Parser) -> None:
    """Add ``--engine-report FILE``. For ``pytest_addoption``."""
    parser.addoption("--engine-report", type=Path, help="write what every test found to this file, as JSON")


def configure(config: pytest.Config, engine: str) -> None:
    """Collect a report, if one was asked for. For ``pytest_configure``.

    Args:
        config: Pytest's.
        engine: The engine's name, as its users write it. In small letters, it is the name of its distribution.
    """
    config.addinivalue_line("markers", "shows(text): what the test is there to show, for the table of results")
    path = config.getoption("--engine-report")
    if path is not None:
        config.pluginmanager.register(_Report(path, engine))


class _Report:
    """Collects the outcome of each test, and writes it at the end."""

    def __init__(self, path: Path, engine: str) -> None:
        self._path = path
        self._engine = engine
        self._began = time.monotonic()
        self._files: dict[str, str] = {}
        self._shows: dict[str, list[str]] = {}
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            text = getattr(getattr(item, "module", None), "__doc__", None) or ""
            self._files[item.nodeid.partition("::")[0]] = text.partition("\n")[0]
            self._shows[item.nodeid] = list(_shown(item))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, name = report.nodeid.partition("::")
        shows = self._shows.get(report.nodeid, [])
        test = self._tests.setdefault(
            report.nodeid,
            {"file": file, "name": name, "outcome": "passed", "seconds": 0.0, "why": "", "shows": shows},
        )
        test["seconds"] += report.duration
        if report.outcome != "passed":
            test["outcome"] = report.outcome
            test["why"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""

    def pytest_sessionfinish(self) -> None:
        found = {
            "engine": self._engine,
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)),
            "versions": {name: _version(name) for name in _packages(self._engine)},
            "seconds": time.monotonic() - self._began,
            "files": self._files,
            "tests": list(self._tests.values()),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(found, indent=1))


def _shown(item: pytest.Item) -> Iterable[str]:
    """What a test is there to show, with its parameters. Marks are in the order from the module to the test."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    for mark in reversed(list(item.iter_markers("shows"))):
        yield mark.args[0].format(**parameters)


def _packages(engine: str) -> tuple[str, ...]:
    """Distributions whose versions are in the report of an engine."""
    name = engine.lower()
    return ("statelink", f"statelink-{name}", name, *LIBRARIES)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
