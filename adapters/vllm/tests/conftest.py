"""Fixtures for tests with vLLM. Without vLLM, nothing here is collected."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import engine_report
import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import ServerPair

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
def configuration(models: Path) -> Path:
    """A model without weights, where vLLM only reads what a model is."""
    from support.models import make_configuration

    made: Path = make_configuration(models / "configuration")
    return made


@pytest.fixture
def quiet() -> Iterator[None]:
    """For a test that makes hundreds of engines, each of which would write several lines."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="session")
def llama(models: Path) -> Path:
    """Full attention."""
    from support.models import make_llama

    made: Path = make_llama(models / "llama")
    return made


@pytest.fixture(scope="session")
def pair(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPair]:
    """Two real servers over tcp, which also take texts and conversations. Every test leaves them idle."""
    from engine_processes import running
    from support.models import add_tokenizer, make_llama
    from support.servers import ServerPair

    model = add_tokenizer(make_llama(models / "talking"))
    texts = ["--no-skip-tokenizer-init"]
    config = {"backend": "tcp", "verify": "digest"}
    servers = ServerPair(tmp_path_factory.mktemp("servers"), model, config, prefill=texts, decode=texts, ordinary=True)
    with running(servers) as pair:
        yield pair


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
