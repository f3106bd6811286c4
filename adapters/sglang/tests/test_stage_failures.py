"""Requests that fail on one pipeline stage alone, and aborts between stages: real servers with two stages each.

Both servers have the same layers in each stage. So a stage of prefill sends to one stage of decode, and the other two
know nothing of a failure until decode's stages tell each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import pytest
from support.faults import Faults
from support.models import generate, make_llama
from support.servers import Pair, Posted
from support.stages import STAGES, agree, answers_are_right, pair_of, prompt_of, storm

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers


class Served(NamedTuple):
    """Two servers, their model, and the faults of their backends."""

    pair: Pair
    model: Path
    faults: Faults

    def post(self, seed: int, rid: str = "") -> tuple[list[int], Posted]:
        """Post a request to both servers. Returns the tokens that decode has to answer, and its answer to come."""
        prompt = prompt_of(seed, 60)
        body = self.pair.body(prompt, 6, **({"rid": rid} if rid else {}))
        Posted(self.pair.prefill, body)
        return generate(self.model, prompt, 6), Posted(self.pair.decode, body)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model, faults = make_llama(folder / "deep", layers=5), Faults(folder / "faults")
    with pair_of(folder, model, STAGES, STAGES, backend="faulty-tcp", environment=faults.environment) as pair:
        answers_are_right(pair, model)
        yield Served(pair, model, faults)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("role", "call"), [("prefill", "submit"), ("decode", "grant")])
def test_a_request_that_fails_on_one_stage_fails_on_both(served: Served, stage: int, role: str, call: str) -> None:
    server = getattr(served.pair, role)
    served.faults.plan(server, stage, call, "refuse")
    posted = [served.post(100 + number) for number in range(5)]
    answers = [(expected, answer.answer()) for expected, answer in posted]
    served.faults.wait_struck(server, stage, "refuse")
    assert sorted(answer.status for _, answer in answers) == [200] * 4 + [500]
    for expected, answer in answers:
        if answer.status == 200:
            assert answer.tokens == expected
    assert "the transport refused" in served.pair.decode.logged()
    agree(served.pair, served.model)


def test_memory_that_one_stage_cannot_give_back_yet_is_kept_by_both(served: Served) -> None:
    """The request is aborted when its state has come on one stage, and the transfer to the other one hangs."""
    pair, _, faults = served
    faults.plan(pair.prefill, 1, "submit", "hang")
    faults.plan(pair.decode, 1, "revoke", "block")
    _, aborted = served.post(200, rid="aborted")
    faults.wait_struck(pair.prefill, 1, "hang")
    pair.decode.ask("/abort_request", {"rid": "aborted"})
    assert aborted.answer().status != 200
    faults.wait_struck(pair.decode, 1, "block")
    expected, answer = served.post(201)  # others go on
    assert answer.answer().tokens == expected
    assert pair.decode.ask("/flush_cache", {}).status != 200
    faults.heal(pair.decode, 1)
    faults.heal(pair.prefill, 1)
    agree(pair, served.model)


def test_aborts_at_any_moment(served: Served) -> None:
    storm(served.pair, served.model)
    agree(served.pair, served.model)
