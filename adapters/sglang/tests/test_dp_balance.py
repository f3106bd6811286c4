"""Real SGLang servers whose prefill has several DP ranks and chooses one as it likes: decode asks which.

The tests share the servers, and run in the order in which they stand here: the last one ends servers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import pytest
from engine_processes import running
from support.models import generate, prompt_of
from support.servers import Answer, Pair, Posted, Server

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

RANKS = ["--dp", "2"]


class Fleet(NamedTuple):
    """One prefill server of two DP ranks, and two decode servers, one of which has two DP ranks, too."""

    pair: Pair
    other: Server

    def ask(self, decode: Server, prompt: list[int], **more: object) -> Answer:
        """What a decode server answers to a request that prefill gets, too."""
        body = self.pair.body(prompt, **more)
        posted = Posted(self.pair.prefill, body)
        answer = Posted(decode, body).answer()
        posted.answer()
        return answer


@pytest.fixture(scope="module")
def fleet(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    balance = ["--load-balance-method", "round_robin"]
    common = ["--page-size", "16", "--chunked-prefill-size", "32"]
    # Sixty requests at once keep five schedulers on two cores busy for up to half of these times.
    environment = {
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "25",
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "25",
    }
    config = {"backend": "tcp", "verify": "digest"}
    with (
        running(
            Pair(folder, llama, config, common=common, prefill=[*RANKS, *balance], environment=environment)
        ) as pair,
        contextlib.ExitStack() as stack,
    ):
        other = pair.start("decode", "other", *RANKS)
        stack.callback(other.kill)
        other.wait_ready()
        yield Fleet(pair, other)


def test_every_request_is_found_at_the_rank_that_has_it(fleet: Fleet, llama: Path) -> None:
    for number in range(8):
        decode = (fleet.pair.decode, fleet.other)[number % 2]
        prompt = prompt_of(number, 60)
        assert fleet.ask(decode, prompt, bootstrap_room=5000 + 7 * number).tokens == generate(llama, prompt, 8)
    log = fleet.pair.prefill.logged()
    assert all(f"(DP rank {rank} of 2)" in log for rank in (0, 1))
    assert all(f"DP{rank}] Prefill batch" in log for rank in (0, 1))


def test_sixty_at_once_for_two_decodes(fleet: Fleet, llama: Path) -> None:
    prompts = [prompt_of(100 + number, 20 + number % 40) for number in range(60)]
    bodies = [fleet.pair.body(prompt, 4) for prompt in prompts]
    decodes = (fleet.pair.decode, fleet.other)
    posted = [(Posted(fleet.pair.prefill, body), Posted(decodes[n % 2], body)) for n, body in enumerate(bodies)]
    answers = [second.answer() for _, second in posted]
    assert [answer.status for answer in answers] == [200] * len(prompts)
    assert [answer.tokens for answer in answers] == [generate(llama, prompt, 4) for prompt in prompts]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_router_may_name_the_rank(fleet: Fleet, llama: Path, rank: int) -> None:
    prompt = prompt_of(200 + rank, 60)
    named = {"routed_dp_rank": rank, "disagg_prefill_dp_rank": rank}
    body = fleet.pair.body(prompt)
    Posted(fleet.pair.prefill, {**body, **named})
    answer = Posted(fleet.pair.decode, {**body, "disagg_prefill_dp_rank": rank}).answer()
    assert answer.tokens == generate(llama, prompt, 8)
    # A router that names it to prefill alone: decode asks.
    body = fleet.pair.body(prompt)
    Posted(fleet.pair.prefill, {**body, "routed_dp_rank": rank})
    assert Posted(fleet.pair.decode, body).answer().tokens == generate(llama, prompt, 8)


def test_samples_of_one_request_may_be_at_different_ranks(fleet: Fleet, llama: Path) -> None:
    prompt = prompt_of(300, 60)
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, "n": 4}
    answer = fleet.ask(fleet.other, prompt, sampling_params=params)
    assert answer.status == 200, answer
    assert [each["output_ids"] for each in answer.body] == [generate(llama, prompt, 8)] * 4


def test_a_request_that_prefill_never_got_fails_with_the_reason(fleet: Fleet, llama: Path) -> None:
    answer = Posted(fleet.pair.decode, fleet.pair.body(prompt_of(400, 60))).answer()
    assert answer.status == 500, answer
    assert "none of the 2 DP ranks of the prefill server at 127.0.0.1:" in answer.text
    assert "SGLANG_DISAGGREGATION_WAITING_TIMEOUT" in answer.text
    assert fleet.ask(fleet.pair.decode, prompt_of(401, 60)).tokens == generate(llama, prompt_of(401, 60), 8)


def test_prefill_is_started_again_while_requests_look_for_it(fleet: Fleet, llama: Path) -> None:
    pair = fleet.pair
    waits = Posted(pair.decode, pair.body(prompt_of(500, 60)))
    assert not waits.answered(2.0)
    pair.prefill.kill()
    answer = waits.answer(90)
    assert answer.status == 500, answer
    assert "does not answer" in answer.text or "was started anew" in answer.text
    pair.prefill = pair.start("prefill")
    pair.prefill.wait_ready()
    for number in range(4):
        decode = (pair.decode, fleet.other)[number % 2]
        assert fleet.ask(decode, prompt_of(600 + number, 60)).tokens == generate(llama, prompt_of(600 + number, 60), 8)
