"""Fleets of Dynamo: the tokens are those of one worker that does both parts, and nothing is left behind."""

from __future__ import annotations

import pytest
from support.fleets import ROUTERS, Fleet
from tiny_llama import prompt_of

pytestmark = pytest.mark.smoke

LENGTHS = (2, 9, 32, 33, 100, 333, 600)


@pytest.mark.parametrize("router", ROUTERS)
def test_the_tokens_are_those_of_one_worker(fleet: Fleet, router: str) -> None:
    fleet.up("prefill", "decode")
    before = fleet["decode"].totals().get("succeeded", 0)
    for length in LENGTHS:
        prompt = prompt_of(length + 1000 * ROUTERS.index(router), length)
        answer = fleet.frontends[router].complete(prompt)
        assert answer.status == 200, answer
        assert len(answer.tokens) == 16
        assert answer.tokens == fleet.alone.complete(prompt).tokens
    fleet.settled()
    assert fleet["decode"].totals() == {"succeeded": before + len(LENGTHS)}
