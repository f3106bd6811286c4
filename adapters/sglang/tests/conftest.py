"""Fixtures for tests with SGLang, and a report of what they found. Without SGLang, nothing here is collected."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.sides import Side

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]

NAMED = (
    "statelink",
    "statelink-sglang",
    "sglang",
    "torch",
    "transformers",
    "nixl",
    "mooncake-transfer-engine-non-cuda",
)
"""Packages whose versions are in the report."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine-report", type=Path, help="write what every test found to this file, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--engine-report")
    if path is not None:
        config.pluginmanager.register(_Report(path))


class _Report:
    """Collects the outcome of each test, and writes it at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = time.monotonic()
        self._files: dict[str, str] = {}
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            text = getattr(getattr(item, "module", None), "__doc__", None) or ""
            self._files[item.nodeid.partition("::")[0]] = text.partition("\n")[0]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, name = report.nodeid.partition("::")
        test = self._tests.setdefault(
            report.nodeid, {"file": file, "name": name, "outcome": "passed", "seconds": 0.0, "why": ""}
        )
        test["seconds"] += report.duration
        if report.outcome != "passed":
            test["outcome"] = report.outcome
            test["why"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""

    def pytest_sessionfinish(self) -> None:
        found = {
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)),
            "versions": {name: _version(name) for name in NAMED},
            "seconds": time.monotonic() - self._began,
            "files": self._files,
            "tests": list(self._tests.values()),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(found, indent=1))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with full attention."""
    from support.models import make_llama

    folder = tmp_path_factory.mktemp("models") / "llama"
    make_llama(folder)
    return folder


@pytest.fixture(scope="session")
def sglang_context(llama: Path) -> Any:
    """SGLang's configuration, published as in a scheduler of a prefill server. Pools need it."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import prepare_server_args

    given = prepare_server_args(
        [
            *("--model-path", str(llama), "--device", "cpu", "--attention-backend", "torch_native"),
            *("--page-size", "16", "--disaggregation-mode", "prefill"),
            *("--disaggregation-transfer-backend", "statelink"),
        ]
    )
    given.resolve_once()
    publish(given, role="scheduler")
    return given


@pytest.fixture(scope="module")
def pair(sglang_context: Any) -> Iterator[tuple[Side, Side]]:
    """One rank on each side, with full attention, over SGLang's real pools. No scheduler."""
    from support.sides import sides

    with sides("mha") as (sources, targets):
        yield sources[0], targets[0]
