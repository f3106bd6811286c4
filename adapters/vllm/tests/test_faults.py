"""Prefill that hangs or dies: no client of decode waits for ever, and every block is free again.

The tests of this file share engines, and run in the order in which they stand here: the last one kills prefill.
"""

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


@pytest.fixture(scope="module")
def strict(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A pair whose decode fails requests that it cannot load."""
    with running(Pair(tmp_path_factory.mktemp("strict"), llama, QUICK, policy="fail")) as pair:
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


@pytest.mark.parametrize(("kind", "policy"), [("pair", "recompute"), ("strict", "fail")])
@pytest.mark.shows("prefill is killed while decode waits for state, {policy}")
def test_prefill_that_dies_fails_the_request_or_has_it_computed_anew(
    kind: str, policy: str, request: pytest.FixtureRequest
) -> None:
    both: Pair = request.getfixturevalue(kind)
    prompt = prompt_of(3, 200)
    alone = both.alone(prompt)
    first = both.prefill.run("dead", prompt, 1, dict(PREFILL))
    both.prefill.stop()
    both.decode.add("dead", prompt, 8, first.params)
    until = time.monotonic() + 30
    while both.decode.ask()["known"] == 0:
        assert time.monotonic() < until
    both.prefill.kill()
    second = both.decode.result("dead")
    if policy == "recompute":
        assert second.tokens == alone
    else:
        assert second.why == "error"
    assert both.decode.settle() == both.decode.free
    assert both.decode.run("after", prompt_of(4, 40), 8).why == "length"
