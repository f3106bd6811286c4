"""Two real SGLang servers over each native backend: one request of several chunks, and requests that are rejected."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from engine_processes import running
from support.models import generate
from support.requests import assert_alive, deadly, post_all
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
                made[backend] = Pair(tmp_path_factory.mktemp(backend), llama, config, common=common, ordinary=True)
        yield made
    finally:
        for pair in made.values():
            pair.prefill.kill()
            pair.decode.kill()


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(backend: str, pairs: dict[str, Pair]) -> Iterator[Pair]:
    if backend not in pairs:
        if os.environ.get("CI") == "true":
            pytest.fail(_problem(backend), pytrace=False)
        pytest.skip(_problem(backend))
    with running(pairs.pop(backend)) as made:
        yield made


def test_the_tokens_are_those_of_transformers(backend: str, pair: Pair, llama: Path) -> None:
    prompt = list(range(5, 105))
    assert pair.generate(prompt)[1].tokens == generate(llama, prompt, 8)
    for server in (pair.prefill, pair.decode):
        assert f"Statelink backend '{backend}' moves" in server.logged()


def test_a_request_that_a_server_would_not_survive_is_rejected(pair: Pair, llama: Path) -> None:
    """A small part of what test_requests.py posts."""
    for request, _, status, text in post_all(pair, deadly()):
        assert status == 400, (request, text)
    assert_alive(pair, functools.partial(generate, llama))
