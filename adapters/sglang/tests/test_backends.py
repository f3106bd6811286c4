"""Two real SGLang servers over each native backend: one request of several chunks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from engine_processes import running
from support.models import generate
from support.servers import Pair

from statelink.config import read_options
from statelink.errors import StatelinkError
from statelink.registry import load_backend

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.smoke, pytest.mark.servers]

BACKENDS = ("nixl", "mooncake")


def _problem(backend: str) -> str:
    """Why a backend cannot run here; empty if it can."""
    try:
        chosen = load_backend(backend)
        probe = chosen.probe(read_options(chosen.Options, {}, "options of the tests"))
    except StatelinkError as error:
        return str(error)
    return "" if probe.ok else f"{probe.reason}\nhint: {probe.hint}"


@pytest.fixture(scope="module")
def pairs(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    """A pair for each backend that can run here. All servers start at once."""
    common = ["--page-size", "16", "--chunked-prefill-size", "32"]
    made: dict[str, Pair] = {}
    try:
        for backend in BACKENDS:
            if not _problem(backend):
                config = {"backend": backend, "verify": "digest"}
                made[backend] = Pair(tmp_path_factory.mktemp(backend), llama, config, common=common)
        yield made
    finally:
        for pair in made.values():
            pair.prefill.kill()
            pair.decode.kill()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_tokens_are_those_of_transformers(backend: str, llama: Path, pairs: dict[str, Pair]) -> None:
    if backend not in pairs:
        if os.environ.get("CI") == "true":
            pytest.fail(_problem(backend), pytrace=False)
        pytest.skip(_problem(backend))
    with running(pairs.pop(backend)) as pair:
        prompt = list(range(5, 105))
        assert pair.generate(prompt)[1].tokens == generate(llama, prompt, 8)
        for server in (pair.prefill, pair.decode):
            assert f"Statelink backend '{backend}' moves" in server.logged()
