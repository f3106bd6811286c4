"""Real servers with data parallelism: each rank is an engine with a link of its own, and has a name of its own."""

from __future__ import annotations

import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from engine_processes import running
from support.engines import PREFILL, prompt_of
from support.families import deepseek_v3
from support.fleets import EXPERTS, Fleet, external, hybrid, internal, one
from support.models import regret

from statelink.rendezvous import RendezvousServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.servers import Answer

pytestmark = pytest.mark.servers

CONFIG: dict[str, Any] = {"backend": "tcp", "verify": "digest", "liveness": 30.0}
"""vLLM's ranks spin while they wait for each other. With more of them than cores, a process may be silent for long."""
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
    made: Path = deepseek_v3(models / "experts")
    return made


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


@pytest.fixture(scope="module")
def directory_fleet(experts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two ranks that share experts behind one port, on each side. They find each other in a directory."""
    both = internal(EXPERTS, SERVERS, "1"), internal(EXPERTS, SERVERS, "1")
    with RendezvousServer() as directory:
        # A client may leave between prefill and decode. Prefill then holds the state until its deadline.
        config = {**CONFIG, "rendezvous": directory.address, "deadline": 40.0}
        with running(Fleet(tmp_path_factory.mktemp("fleet"), experts, config, *both)) as fleet:
            yield fleet


@pytest.mark.shows("data parallelism, a model with experts, internal to internal, in a directory")
def test_a_serial_router_knows_no_names(directory_fleet: Fleet, experts: Path) -> None:
    """It hands on what prefill answers, which has the name of the rank."""
    for prompt, tokens in hand_some(directory_fleet):
        assert regret(experts, prompt, tokens) < 1e-3


@pytest.mark.shows("data parallelism, several answers to a prompt, which vLLM spreads over ranks")
def test_several_answers_send_nothing_behind_a_serial_router(directory_fleet: Fleet) -> None:
    """Any of them may be the last to end, and vLLM answers with what that one says."""
    prompt, source, target = (
        prompt_of(420, 70),
        *(side.ranks[0] for side in (directory_fleet.prefill, directory_fleet.decode)),
    )
    for _ in range(3):
        body = {**source.server.body(prompt, 1, dict(PREFILL)), "n": 2, "temperature": 1.0}
        params = source.server.ask("/v1/completions", body).body["kv_transfer_params"]
        assert "another rank" in params["refused"]
        answer = target.complete(prompt, 6, params)
        assert answer.tokens == source.complete(prompt, 6).tokens
    directory_fleet.settled()


@pytest.mark.shows("data parallelism, a router that names a rank of prefill")
def test_a_router_that_sends_to_both_at_once_names_the_rank(directory_fleet: Fleet) -> None:
    for number, source in enumerate(directory_fleet.prefill.ranks):
        prompt, target = prompt_of(400 + number, 70), directory_fleet.decode.ranks[0]
        answer = directory_fleet.route_to_both(prompt, 6, source, target, f"named {number}")
        assert answer.status == 200, answer
        assert answer.tokens == source.complete(prompt, 6).tokens
    directory_fleet.settled()


@pytest.mark.parametrize(
    ("name", "said"),
    [("prefill-0", " are prefill-0_dp0, prefill-0_dp1"), ("prefill-0_dp7", "and prefill-0_dp0, prefill-0_dp1 are")],
)
@pytest.mark.shows("data parallelism, a router that names no rank, or one that is not there")
def test_a_name_that_no_rank_has(directory_fleet: Fleet, name: str, said: str) -> None:
    """Decode says which names there are."""
    sent = {"do_remote_prefill": True, "remote_engine_id": name, "transfer_id": f"to {name}"}
    answer = directory_fleet.decode.ranks[1].complete(prompt_of(410, 70), 6, sent)
    assert answer.status == 500, answer
    logged = directory_fleet.decode.logged()
    assert said in logged


@pytest.mark.shows("data parallelism, 40 requests at once over all ranks, of which some are aborted")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_a_storm_leaves_nothing_behind(directory_fleet: Fleet) -> None:
    """Some clients leave prefill, and some leave decode. Every other one gets its own tokens."""
    fleet, draw = directory_fleet, random.Random(7)
    prompts = [prompt_of(500 + number, 20 + 2 * number) for number in range(40)]
    moments = [draw.uniform(0.0, 1.0) for _ in prompts]

    def ask(number: int) -> Answer | None:
        prompt, leaves = prompts[number], number % 5
        source, target = fleet.prefill.ranks[number % 2], fleet.decode.ranks[number // 2 % 2]
        if leaves == 0:
            with source.client(prompt, 1, dict(PREFILL)):
                time.sleep(moments[number])  # so that requests are aborted in any state
        elif leaves == 1:
            params = source.complete(prompt, 1, dict(PREFILL)).body["kv_transfer_params"]
            with target.client(prompt, 100, params):
                time.sleep(moments[number])
        elif leaves == 2:
            return fleet.route_to_both(prompt, 4, source, target, f"storm {number}")
        else:
            return fleet.route(prompt, 4, source, target)
        return None

    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(ask, range(len(prompts))))
    stayed = [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if answer is not None]
    assert [answer.status for _, answer in stayed] == [200] * 24
    fleet.settled()
    with ThreadPoolExecutor(8) as threads:
        alone = list(threads.map(lambda each: fleet.prefill.ranks[0].complete(each[0], 4).tokens, stayed))
    assert [answer.tokens for _, answer in stayed] == alone
