"""What tests share: the backends to run on, the counts of long runs, and a look at the threads left behind."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.helpers.availability import problem_of

BACKENDS = ("tcp", "nixl", "mooncake")


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
