"""What tests share: backends to run on, made-up packages, counts of long runs, and a look at threads left behind."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.availability import problem_of
from tests.helpers.etcd import PROGRAM
from tests.registry.sites import Site, bare

BACKENDS = ("tcp", "nixl", "mooncake")
TESTING = Path(__file__).parent / "testing"
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores it in jobs that it starts in the background, and every process of a test would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
LONG = (TESTING / "test_kit.py", TESTING / "test_strategies.py", TESTING / "test_packages.py")
"""Files that come first: a process of `make test` that ended with one of them would keep the others waiting."""


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Name of a backend that works here. One that STATELINK_TEST_REQUIRE lists has to."""
    name = str(request.param)
    problem = problem_of(name)
    if problem:
        required = {each.strip() for each in os.environ.get("STATELINK_TEST_REQUIRE", "").split(",")}
        if name == "tcp" or name in required:
            pytest.fail(f"backend {name} is required and cannot run here: {problem}", pytrace=False)
        pytest.skip(problem)
    return name


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first, and mark with `soak` the rows that `soak_over` leaves to it."""
    items.sort(key=lambda item: item.path not in LONG)
    for item in items:
        backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
        if any(backend in mark.args for mark in item.iter_markers("soak_over")):
            item.add_marker(pytest.mark.soak)


@pytest.fixture(scope="session")
def etcd_program() -> None:
    """A server of etcd can be started here. It has to be, if STATELINK_TEST_REQUIRE lists ``etcd``."""
    if PROGRAM is None:
        problem = "no etcd here; tools/etcd-server.sh installs it"
        if "etcd" in os.environ.get("STATELINK_TEST_REQUIRE", "").split(","):
            pytest.fail(problem, pytrace=False)
        pytest.skip(problem)


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints what a run counted, in one line.

    A test marked `soak` prints it at once, also where pytest captures output: ``make soak | grep ^soak:`` finds it.
    """
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    if capture is None or request.node.get_closest_marker("soak") is None:
        return lambda line: print(f"soak: {line}")

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\nsoak: {line}", flush=True)

    return say


@pytest.fixture(scope="session")
def root() -> None:
    """Processes can be started in namespaces of their own here."""
    if os.geteuid():
        pytest.skip("making namespaces needs root")
    made = subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"namespaces cannot be made here: {made.stderr.strip()}")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Packages on this process's own path, and the only ones beside the core that count."""
    made = Site(tmp_path / "site")
    monkeypatch.syspath_prepend(str(made.folder))
    monkeypatch.delenv("STATELINK_STRICT_PLUGINS", raising=False)
    names = ("good", "broken", "old", "new", "odd", "twin", "same", "other", "mem", "exits", "typo")
    commands = ("vendor-greet", "vendor-wave", "vendor-demo", "vendor-bad")
    monkeypatch.setenv("STATELINK_PLUGINS", ",".join((*(f"statelink-{name}" for name in names), *commands)))
    before = set(sys.modules)
    yield made
    for name in set(sys.modules) - before:
        if name.startswith(("statelink_", "vendor_")):
            del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture(scope="session")
def bare_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """See `bare`."""
    return bare(tmp_path_factory.mktemp("bare") / "lib")


@pytest.fixture
def no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration in the environment but what a test puts there."""
    for name in os.environ:
        if name.startswith("STATELINK_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """A link that was closed has no threads."""
    before = set(threading.enumerate())
    yield
    # A link that a fixture of the module or session holds may start threads when they are needed.
    held = any(thread.name == "statelink-control" for thread in before)
    until = time.monotonic() + 2.0
    while True:
        left = [
            thread.name
            for thread in threading.enumerate()
            if thread not in before and thread.name.startswith("statelink-")
        ]
        if held and "statelink-control" not in left:
            return
        if not left or time.monotonic() > until:
            break
        time.sleep(0.01)
    assert not left, f"threads were left behind: {left}"
