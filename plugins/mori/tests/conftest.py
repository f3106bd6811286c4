"""The library to test with: whatever ``mori`` is importable, or the simulator where none is."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SIMULATOR = Path(__file__).parents[1] / "simulator"


@pytest.fixture(scope="module", autouse=True)
def simulator() -> Iterator[bool]:
    """Whether it is the simulator; it is importable as long as the tests of one module run."""
    if importlib.util.find_spec("mori") is not None:
        yield False
        return
    sys.path.append(str(SIMULATOR))
    importlib.invalidate_caches()
    try:
        yield True
    finally:
        sys.path.remove(str(SIMULATOR))
        for name in [name for name in sys.modules if name.partition(".")[0] == "mori"]:
            del sys.modules[name]


@pytest.fixture
def simulated(simulator: bool) -> None:
    """For tests that change the machine, which only the simulator allows."""
    if not simulator:
        pytest.skip("this needs the simulator, and the real MoRI is installed")
