"""Fleets of Dynamo: the tokens are those of one worker that does both parts, and nothing is left behind."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from support.fleets import ROUTERS
from tiny_llama import prompt_of

if TYPE_CHECKING:
    from support.fleets import Fleet

pytestmark = pytest.mark.smoke

LENGTHS = (2, 9, 32, 33, 100, 333, 600)


@pytest.mark.parametrize("router", ROUTERS)
def test_the_tokens_are_those_of_one_worker(fleet: Fleet, router: str) -> None:
    fleet.up("prefill", "decode")
    before = fleet["decode"].totals()
    for length in LENGTHS:
        prompt = prompt_of(length + 1000 * ROUTERS.index(router), length)
        answer = fleet.frontends[router].complete(prompt)
        assert answer.status == 200, answer
        assert len(answer.tokens) == 16
        assert answer.tokens == fleet.alone.complete(prompt).tokens
    fleet.settled()
    assert fleet["decode"].totals() == {**before, "succeeded": before.get("succeeded", 0) + len(LENGTHS)}


def test_a_client_cannot_say_where_state_is(fleet: Fleet) -> None:
    fleet.up("prefill", "decode")
    answer = fleet.frontends["kv"].complete(prompt_of(3000, 9), kv_transfer_params={"room": "7"})
    assert (answer.status, "`kv_transfer_params`" in answer.body["message"]) == (400, True), answer


def test_dynamos_own_requests_move_nothing_and_hold_nothing(fleet: Fleet) -> None:
    """It sends them to each worker, to see whether it is well."""
    fleet.up("prefill", "decode")
    fleet.settled()
    for worker in (fleet["prefill"], fleet["decode"]):
        before, taken, until = worker.totals(), fleet.taken(worker), time.monotonic() + 60
        while fleet.taken(worker) < taken + 3:
            assert time.monotonic() < until, f"{worker.name} got no request"
            time.sleep(0.2)
        assert worker.totals() == before
        worker.wait_rooms(False)
