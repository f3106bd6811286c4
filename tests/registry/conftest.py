from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from .sites import Site, bare

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Packages on this process's own path, and the only ones beside the core that count."""
    made = Site(tmp_path / "site")
    monkeypatch.syspath_prepend(str(made.folder))
    monkeypatch.delenv("STATELINK_STRICT_PLUGINS", raising=False)
    names = ("good", "broken", "old", "new", "odd", "twin", "same", "other", "mem", "exits", "typo")
    monkeypatch.setenv("STATELINK_PLUGINS", ",".join(f"statelink-{name}" for name in names))
    before = set(sys.modules)
    yield made
    for name in set(sys.modules) - before:
        if name.startswith(("statelink_", "vendor_")):
            del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture(scope="session")
def bare_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """See `sites.bare`."""
    return bare(tmp_path_factory.mktemp("bare") / "lib")
