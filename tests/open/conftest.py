from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration in the environment but what a test puts there."""
    for name in os.environ:
        if name.startswith("STATELINK_"):
            monkeypatch.delenv(name)
