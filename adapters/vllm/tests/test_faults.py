"""Prefill that hangs: no client of decode waits for ever, and every block is free again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from engine_processes import running
from support.engines import PREFILL, Pair, prompt_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

QUICK = {"backend": "tcp", "heartbeat": 0.5, "liveness": 3.0, "deadline": 25.0}


@pytest.fixture(scope="module")
def pair(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with running(Pair(tmp_path_factory.mktemp("pair"), llama, QUICK, policy="recompute")) as pair:
        yield pair


@pytest.mark.shows("prefill hangs while decode waits for state")
def test_a_request_of_a_prefill_that_hangs_is_computed_on_decode(pair: Pair) -> None:
    pair.hand(prompt_of(1, 70))  # both have met
    prompt = prompt_of(2, 300)
    alone = pair.alone(prompt)
    first = pair.prefill.run("lost", prompt, 1, dict(PREFILL))
    pair.prefill.stop()
    try:
        assert pair.decode.run("lost", prompt, 8, first.params).tokens == alone
        assert "prefill was lost" in pair.decode.logged()
        # Over tcp, decode itself proves that nothing writes any more. What holds blocks without a proof: test_sides.py.
        assert pair.decode.settle() == pair.decode.free
    finally:
        pair.prefill.go_on()
    pair.settled()
    again = prompt_of(5, 90)
    assert pair.hand(again)[1].tokens == pair.alone(again)


@pytest.mark.shows("prefill keeps the state of a request that waits for blocks on decode")
def test_a_request_that_waits_for_blocks_for_longer_than_prefills_deadline(
    llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    small = {"max_model_len": 320, "num_gpu_blocks_override": 12}
    config = {**QUICK, "deadline": 12.0}
    more = {"more": {"deadline": 8.0}}
    folder = tmp_path_factory.mktemp("queue")
    with running(Pair(folder, llama, config, prefill=more, own=({}, small))) as pair:
        pair.hand(prompt_of(1, 70))  # both have met
        prompt, other = prompt_of(2, 300), prompt_of(3, 200)
        alone = pair.alone(other)
        first = pair.prefill.run("first", prompt, 1, dict(PREFILL))
        # Prefill has no such room. So decode holds its blocks for its own deadline, and then computes the prompt.
        pair.decode.add("first", prompt, 1, {**(first.params or {}), "room": "12345"})
        until = time.monotonic() + 30
        while pair.decode.ask()["free"] > 2:
            assert time.monotonic() < until
        second = pair.prefill.run("second", other, 1, dict(PREFILL))
        assert pair.decode.run("second", other, 8, second.params).tokens == alone
        assert pair.decode.result("first").why == "length"
        assert "request second" not in pair.decode.logged()  # its state was there
        assert pair.moved()[0] == 2
        pair.settled()


@pytest.mark.shows("requests that never reach decode, and answers that come with the wrong request")
def test_blocks_that_prefill_holds_for_nobody_come_back_long_before_the_deadline(
    llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    small = {"max_model_len": 320, "num_gpu_blocks_override": 12}
    with running(
        Pair(tmp_path_factory.mktemp("nobody"), llama, {**QUICK, "deadline": 3600.0}, own=(small, {}))
    ) as pair:
        pair.hand(prompt_of(1, 70))  # both have met
        lost, other = prompt_of(2, 300), prompt_of(3, 300)
        alone = pair.alone(lost)
        first = pair.prefill.run("lost", lost, 1, dict(PREFILL))
        assert pair.hand(other)[1].tokens == pair.alone(other)
        assert "of which no decode had said a word were given up: 1" in pair.prefill.logged()
        assert pair.decode.run("lost", lost, 8, first.params).tokens == alone  # it comes after all
        assert "room.unclaimed" in pair.decode.logged()
        answers = [pair.prefill.run(f"mixed{seed}", prompt_of(seed, 90), 1, dict(PREFILL)).params for seed in (4, 5)]
        for seed, answer in zip((5, 4), answers, strict=True):
            assert pair.decode.run(f"mixed{seed}", prompt_of(seed, 90), 8, answer).tokens == pair.alone(
                prompt_of(seed, 90)
            )
        pair.settled()


def test_a_request_that_prefill_never_had_is_computed_on_decode(pair: Pair) -> None:
    prompt = prompt_of(6, 90)
    first = pair.prefill.run("known", prompt, 1, dict(PREFILL))
    assert first.params is not None
    unknown = {**first.params, "room": "12345"}
    assert pair.decode.run("unknown", prompt, 8, unknown).tokens == pair.alone(prompt)
    assert "request unknown" in pair.decode.logged()
    pair.decode.run("known", prompt, 8, first.params)
    pair.settled()
