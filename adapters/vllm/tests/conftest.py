"""Fixtures for tests with vLLM. Without vLLM, nothing here is collected."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import engine_report
import pytest

if TYPE_CHECKING:
    from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    engine_report.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    engine_report.configure(config, "vLLM")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tiny models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def llama(models: Path) -> Path:
    """Full attention."""
    from support.models import make_llama

    made: Path = make_llama(models / "llama")
    return made


@pytest.fixture(scope="session")
def windowed(models: Path) -> Path:
    """Sliding windows beside full attention."""
    from support.models import make_windowed

    made: Path = make_windowed(models / "windowed")
    return made


@pytest.fixture(scope="session")
def hybrid(models: Path) -> Path:
    """Recurrent layers beside full attention."""
    from support.models import make_hybrid

    made: Path = make_hybrid(models / "hybrid")
    return made
