"""Requests that fail on one pipeline stage alone, and aborts between stages: real servers with two stages each.

Both servers have the same layers in each stage. So a stage of decode gets its pages from one stage of prefill, and both
get the request's row from the last one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import pytest
from support.faults import Faults
from support.models import generate, make_llama, prompt_of
from support.servers import Pair, Posted
from support.stages import STAGES, agree, answers_are_right, link, pair_of, storm

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

CONFIG = {"backend": "faulty-tcp", "liveness": 200.0}
"""Nothing is given up because time has passed."""


class Served(NamedTuple):
    """Two servers, their model, and the faults of their backends."""

    pair: Pair
    model: Path
    faults: Faults

    def post(self, seed: int, rid: str) -> tuple[list[int], Posted]:
        """Post a request to both servers. Returns the tokens that decode has to answer, and its answer to come."""
        prompt = prompt_of(seed, 60)
        body = self.pair.body(prompt, 6, rid=rid)
        Posted(self.pair.prefill, body)
        return generate(self.model, prompt, 6), Posted(self.pair.decode, body)

    def post_half(self, stage: int, rid: str) -> Posted:
        """Post a request whose state comes on all stages of decode but one. Returns decode's answer to come."""
        self.faults.plan(self.pair.prefill, stage, "submit", "hang", peer=stage)
        _, answer = self.post(7, rid)
        self.faults.wait_struck(self.pair.prefill, stage, "hang")
        until = time.monotonic() + 60
        while any((shown := link(self.pair.decode, 1 - stage))["rooms"].values()):  # until it has succeeded
            assert time.monotonic() < until, shown
        return answer


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model, faults = make_llama(folder / "deep", layers=5), Faults(folder / "faults")
    with pair_of(folder, model, STAGES, STAGES, config=CONFIG, environment=faults.environment) as pair:
        answers_are_right(pair, model)
        yield Served(pair, model, faults)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_request_that_has_come_on_one_stage_and_fails_on_the_other(served: Served, stage: int) -> None:
    pair, model, faults = served
    answer = served.post_half(stage, "half")
    faults.heal(pair.prefill, stage)  # the transfer fails
    assert answer.answer().status == 500
    assert "it hung, and ended" in pair.decode.logged()
    agree(pair, model)


@pytest.mark.parametrize("stage", [0, 1])
def test_an_abort_when_the_state_has_come_on_one_stage(served: Served, stage: int) -> None:
    """The other stage cannot give its memory back yet. So both keep it, and compute other requests meanwhile."""
    pair, model, faults = served
    answer = served.post_half(stage, "aborted")
    faults.plan(pair.decode, stage, "revoke", "hang", peer=stage)
    pair.decode.ask("/abort_request", {"rid": "aborted"})
    assert answer.answer().status == 500
    faults.wait_struck(pair.decode, stage, "hang")
    expected, other = served.post(8, "other")
    assert other.answer().tokens == expected
    assert pair.decode.ask("/flush_cache", {}).status != 200
    faults.heal(pair.decode, stage)
    faults.heal(pair.prefill, stage)
    agree(pair, model)


@pytest.mark.parametrize("stage", [0, 1])
def test_decode_that_cannot_take_the_state_on_one_stage(served: Served, stage: int) -> None:
    pair, model, faults = served
    faults.plan(pair.decode, stage, "grant", "refuse", peer=stage)
    posted = [served.post(20 + number, f"request-{number}") for number in range(5)]
    answers = [(expected, answer.answer()) for expected, answer in posted]
    faults.wait_struck(pair.decode, stage, "refuse")
    assert sorted(answer.status for _, answer in answers) == [200] * 4 + [500]
    assert all(answer.tokens == expected for expected, answer in answers if answer.status == 200)
    agree(pair, model)


def test_aborts_at_any_moment(served: Served) -> None:
    storm(served.pair, served.model)
    agree(served.pair, served.model)
