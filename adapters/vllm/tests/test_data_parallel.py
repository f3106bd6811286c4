"""Real servers with data parallelism: each rank is an engine with a link of its own, and has a name of its own."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from engine_processes import running
from support.engines import prompt_of
from support.families import deepseek_v3
from support.fleets import EXPERTS, Fleet, external, hybrid, internal, one
from support.models import regret

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

CONFIG: dict[str, Any] = {"backend": "tcp", "verify": "digest", "deadline": 20.0}
SERVERS = "--api-server-count"

LAYOUTS = {
    "external to external": (external, external),
    "hybrid to hybrid": (hybrid, hybrid),
    "two ranks to one": (lambda: internal(EXPERTS, SERVERS, "2"), lambda: one(SERVERS, "2")),
    "one to two ranks": (lambda: one(SERVERS, "2"), lambda: internal(EXPERTS, SERVERS, "2")),
}


@pytest.fixture(scope="module")
def experts(models: Path) -> Path:
    """A model with experts."""
    return deepseek_v3(models / "experts")


def hand_some(fleet: Fleet) -> list[tuple[list[int], list[int]]]:
    """A request from each rank of prefill to each of decode, all at once. Returns prompts, and tokens behind them."""
    ways = list(itertools.product(fleet.prefill.ranks, fleet.decode.ranks))
    prompts = [prompt_of(90 + number, 30 + 23 * number) for number in range(len(ways))]
    with ThreadPoolExecutor(len(ways)) as threads:
        answers = list(threads.map(lambda prompt, way: fleet.route(prompt, 6, *way), prompts, ways))
    alone = [fleet.prefill.ranks[0].complete(prompt, 6).tokens for prompt in prompts]
    assert [(answer.status, answer.tokens) for answer in answers] == [(200, tokens) for tokens in alone]
    moved = "vllm:statelink_transfer_bytes_count"
    for server in fleet.decode.servers:
        server.wait_counted(moved, len(ways) * len(server.metric(moved)) / len(fleet.decode.ranks))
    assert fleet.decode.metric(moved) == [len(fleet.prefill.ranks)] * len(fleet.decode.ranks)
    fleet.settled()
    return list(zip(prompts, alone, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.shows("data parallelism, a model with experts, {layout}")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_ranks_that_share_experts(layout: str, experts: Path, tmp_path: Path) -> None:
    prefill, decode = LAYOUTS[layout]
    with running(Fleet(tmp_path, experts, CONFIG, prefill(), decode())) as fleet:
        for prompt, tokens in hand_some(fleet):
            assert regret(experts, prompt, tokens) < 1e-3


@pytest.mark.shows("data parallelism, a model without experts, 2 API servers on each side")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_ranks_that_share_nothing(llama: Path, tmp_path: Path) -> None:
    with running(Fleet(tmp_path, llama, CONFIG, internal(), internal())) as fleet:
        for server in (*fleet.prefill.servers, *fleet.decode.servers):
            assert "Started 2 API server processes" in server.logged()
        hand_some(fleet)
