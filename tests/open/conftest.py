from __future__ import annotations

import os

import pytest
from tests.registry.conftest import bare_path, site

__all__ = ["bare_path", "clean", "site"]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration in the environment but what a test puts there."""
    for name in os.environ:
        if name.startswith("STATELINK_"):
            monkeypatch.delenv(name)
