"""Fixtures for tests with NVIDIA Dynamo. `make engine-dynamo` names the interpreters of its environments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from support.fleets import Fleet

os.environ.setdefault("HF_HUB_OFFLINE", "1")

if "STATELINK_DYNAMO_SGLANG" not in os.environ or "STATELINK_DYNAMO_VLLM" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with full attention."""
    from tiny_llama import make_llama

    made: Path = make_llama(tmp_path_factory.mktemp("models") / "llama")
    return made


@pytest.fixture(scope="session", params=["vllm", "sglang"])
def fleet(request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet of workers of an engine, and one worker alone to compare it with. See `Fleet.up`."""
    from support.fleets import Fleet

    made = Fleet(request.param, tmp_path_factory.mktemp(request.param), llama)
    try:
        yield made
    finally:
        made.kill()
