"""Fixtures for tests with SGLang. Without SGLang, nothing here is collected."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import engine_report
import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from support.sides import Side

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    engine_report.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    engine_report.configure(config, "SGLang")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with full attention."""
    from support.models import make_llama

    folder = tmp_path_factory.mktemp("models") / "llama"
    make_llama(folder)
    return folder


@pytest.fixture(scope="session")
def sglang_context(llama: Path) -> Any:
    """SGLang's configuration, published as in a scheduler of a prefill server. Pools need it."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import prepare_server_args

    given = prepare_server_args(
        [
            *("--model-path", str(llama), "--device", "cpu", "--attention-backend", "torch_native"),
            *("--page-size", "16", "--disaggregation-mode", "prefill"),
            *("--disaggregation-transfer-backend", "statelink"),
        ]
    )
    given.resolve_once()
    publish(given, role="scheduler")
    return given


@pytest.fixture(scope="module")
def pair(sglang_context: Any) -> Iterator[tuple[Side, Side]]:
    """One rank on each side, with full attention, over SGLang's real pools. No scheduler."""
    from support.sides import sides

    with sides("mha") as (sources, targets):
        yield sources[0], targets[0]
