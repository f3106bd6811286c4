"""Fixtures for tests with servers of both engines. `make engine-cross` names the interpreters of their environments."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

if "STATELINK_SGLANG_PYTHON" not in os.environ or "STATELINK_VLLM_PYTHON" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with full attention."""
    from tiny_llama import make_llama

    made: Path = make_llama(tmp_path_factory.mktemp("models") / "llama")
    return made
