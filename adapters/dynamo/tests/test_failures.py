"""Workers of Dynamo that die or cannot be reached, and clients that leave."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from tiny_llama import prompt_of

if TYPE_CHECKING:
    from support.fleets import Answer, Fleet

vllm = pytest.mark.parametrize("fleet", ["vllm"], indirect=True)
sglang = pytest.mark.parametrize("fleet", ["sglang"], indirect=True)


def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(fleet: Fleet) -> None:
    fleet.up("prefill", "decode")
    frontend = fleet.frontends["kv"]
    for seed in range(4):
        with frontend.streamed(prompt_of(4000 + seed, 200), 300) as stream:
            while len(stream.tokens) < 1 + 5 * seed:
                next(stream.parts)
    fleet.settled()
    prompt = prompt_of(4010, 120)
    assert frontend.complete(prompt).tokens == fleet.alone.complete(prompt).tokens


def test_decode_dies_in_the_middle_and_another_goes_on(fleet: Fleet) -> None:
    fleet.up("prefill", "decode", "decode-2")
    prompt = prompt_of(4100, 300)
    expected = fleet.alone.complete(prompt, 150).tokens
    with fleet.frontends["round-robin"].streamed(prompt, 150) as stream:
        first = next(stream.parts)
        while len(stream.tokens) < 30:
            next(stream.parts)
        dead = fleet.named(first["nvext"]["worker_id"]["decode_worker_id"])
        dead.kill()
        assert len(stream.tokens) < 150
        for _ in stream.parts:
            pass
    assert stream.tokens == expected
    (left,) = (each for each in (fleet["decode"], fleet["decode-2"]) if each is not dead)
    for worker in (fleet["prefill"], left):
        worker.wait_rooms(False)


def without_prefill(fleet: Fleet, decode: str, prompt: Sequence[int]) -> Answer:
    """The answer to a request whose prefill dies when it has answered, and before decode has asked for the state."""
    served = fleet["prefill"].served()
    # The frontend waits five seconds for a worker that stands still, and then turns to another one.
    fleet[decode].stop()
    try:
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(fleet.frontends["round-robin"].complete, prompt)
            until = time.monotonic() + 60
            while fleet["prefill"].served() == served:
                assert time.monotonic() < until, "prefill has not answered"
                time.sleep(0.05)
            fleet["prefill"].kill()
            fleet[decode].go_on()
            return asked.result(120)
    finally:
        fleet[decode].go_on()


@vllm
def test_prefill_dies_before_its_state_is_moved_and_decode_computes_it(fleet: Fleet) -> None:
    """Decode's deadline is longer than the test may take."""
    fleet.up("prefill", "decode")
    prompt = prompt_of(4200, 500)
    before = fleet["decode"].totals()
    answer = without_prefill(fleet, "decode", prompt)
    assert answer.status == 200, answer
    assert answer.tokens == fleet.alone.complete(prompt).tokens
    found = fleet["decode"].totals()
    assert found.pop("peer.unreachable", 0) + found.pop("peer.lost", 0) == 1, found
    assert found == before
    fleet["decode"].wait_rooms(False)


@sglang
def test_prefill_dies_while_it_computes_and_the_request_is_refused(fleet: Fleet) -> None:
    """Dynamo has sent the request to both, ends it on decode, and finds no other prefill worker."""
    fleet.up("prefill", "decode")
    fleet["prefill"].stop_engine()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(fleet.frontends["round-robin"].complete, prompt_of(4400, 300))
        fleet["decode"].wait_rooms(True)
        fleet["prefill"].kill()
        answer = asked.result(120)
    assert answer.status == 503, answer
    fleet["decode"].wait_rooms(False)


def test_without_any_prefill_a_request_is_refused(fleet: Fleet) -> None:
    """Dynamo does not let decode compute the prompt."""
    fleet.up("decode")
    answer = fleet.frontends["round-robin"].complete(prompt_of(4500, 40))
    assert answer.status == 503, answer
    fleet.settled()


@vllm
def test_a_prefill_that_decode_has_never_met_and_that_is_gone_fails_the_request_soon(fleet: Fleet) -> None:
    """With the policy ``fail``, vLLM's default. Decode's deadline is longer than the test may take."""
    fleet.up("prefill", "decode-failing")
    answer = without_prefill(fleet, "decode-failing", prompt_of(4300, 500))
    assert answer.status == 500, answer
    assert fleet["decode-failing"].totals() == {"peer.unreachable": 1}
    fleet["decode-failing"].wait_rooms(False)
