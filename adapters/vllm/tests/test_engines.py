"""Real engines over tcp, each with its scheduler and worker in one process: prefill, decode, and one engine alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from engine_processes import running
from support.engines import PREFILL, Pair, prompt_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.smoke, pytest.mark.servers]

BLOCK = 3 * 2 * 32 * 2 * 32 * 4
"""Bytes of a block: layers, heads, tokens, key and value, numbers of 4 bytes."""

TCP = {"backend": "tcp", "verify": "digest"}


@pytest.fixture(scope="module")
def pair(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with running(Pair(tmp_path_factory.mktemp("pair"), llama, TCP)) as pair:
        yield pair


@pytest.mark.parametrize("length", [1, 7, 32, 33, 96, 100, 333])
@pytest.mark.shows("engines: the tokens of one, dense model, over tcp")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_the_tokens_are_those_of_one_engine(pair: Pair, length: int) -> None:
    prompt = prompt_of(length, length)
    requests, nbytes = pair.moved()
    first, second = pair.hand(prompt)
    assert second.tokens == pair.alone(prompt)
    assert first.tokens == second.tokens[:1]
    assert pair.moved() == (requests + 1, nbytes + -(-length // 32) * BLOCK)
    pair.settled()


def test_the_state_of_another_prompt_gives_other_tokens(pair: Pair) -> None:
    """What shows that the tokens of the other tests come from the state that was moved."""
    one, other = prompt_of(1, 100), prompt_of(2, 100)
    with pair.prefill.blind(), pair.decode.blind():
        first = pair.prefill.run("swapped", one, 1, dict(PREFILL))
        assert pair.decode.run("swapped", other, 8, first.params).tokens != pair.alone(other)


@pytest.mark.parametrize("without", ["nothing", "the answer's content"])
@pytest.mark.shows("engines: the state of another prompt is refused, and leaves nothing in a cache")
def test_the_state_of_another_prompt_is_refused_and_leaves_nothing_in_a_cache(pair: Pair, without: str) -> None:
    """Decode refuses before it asks, if prefill's answer says which request it is for; otherwise the link does."""
    one, other = (prompt_of(200 + number + len(without), 100) for number in range(2))
    requests = pair.moved()[0]
    for name, here, there in ((f"a {without}", one, other), (f"b {without}", other, one)):
        params = dict(pair.prefill.run(name, here, 1, dict(PREFILL)).params or {})
        if without != "nothing":
            del params["content"]
        assert pair.decode.run(name, there, 8, params).tokens == pair.alone(there)
        assert pair.moved()[0] == requests
        if without == "nothing":  # the request that the answer was for still gets its state
            assert pair.decode.run(f"{name}, rightly", here, 8, params).tokens == pair.alone(here)
            requests += 1
            assert pair.moved()[0] == requests
    for prompt in (one, other):
        for asked in (prompt, [*prompt, *prompt_of(300, 50)]):
            assert pair.hand(asked)[1].tokens == pair.alone(asked)
    pair.settled()


@pytest.mark.shows("a prefix that decode holds is not moved again")
def test_a_prefix_that_decode_holds_is_not_moved_again(pair: Pair) -> None:
    prompt = prompt_of(3, 100)
    pair.hand(prompt)
    longer = [*prompt, *prompt_of(4, 60)]
    requests, nbytes = pair.moved()
    _, second = pair.hand(longer)
    assert second.tokens == pair.alone(longer)
    assert pair.moved() == (requests + 1, nbytes + 2 * BLOCK), "not two of five blocks have come"
    pair.settled()


def test_a_prompt_that_decode_has_needs_nothing_of_prefill(pair: Pair) -> None:
    prompt = prompt_of(5, 65)  # decode holds both of its whole blocks, and computes the last token itself
    pair.hand(prompt)
    before = pair.moved()
    for length in (64, 65):
        _, second = pair.hand(prompt[:length])
        assert second.tokens == pair.alone(prompt[:length])
    assert pair.moved()[1] <= before[1] + 2 * BLOCK
    pair.settled()


@pytest.mark.parametrize("said", [{}, {"room": "seven"}, {"peer": ["tcp://10.0.0.9:1"]}, {"peer": None}])
def test_what_a_router_says_wrongly_is_computed_on_decode(pair: Pair, said: dict[str, object]) -> None:
    prompt = prompt_of(7, 50)
    params = {"do_remote_prefill": True, "room": "7", "peer": ["tcp://127.0.0.1:9"], **said} if said else PREFILL
    assert pair.decode.run(f"wrong{len(str(said))}", prompt, 8, dict(params)).tokens == pair.alone(prompt)
    assert pair.decode.settle() == pair.decode.free


@pytest.mark.shows("aborts in every state")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_an_abort_while_decode_waits_gives_the_blocks_back(pair: Pair) -> None:
    prompt = prompt_of(8, 90)
    params = {"do_remote_prefill": True, "room": "77", "peer": pair.hand(prompt_of(9, 40))[0].params["peer"]}
    pair.decode.add("aborted", prompt, 8, params)
    held = pair.decode.ask()
    assert held["busy"]
    pair.decode.abort("aborted")
    assert pair.decode.settle() == pair.decode.free
    pair.settled()


@pytest.mark.shows("aborts in every state")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_an_abort_on_decode_before_it_had_blocks_ends_prefills_hold(pair: Pair) -> None:
    prompt = prompt_of(10, 90)
    first = pair.prefill.run("early", prompt, 1, dict(PREFILL))
    assert pair.prefill.ask()["free"] < pair.prefill.free
    running = [f"running{n}" for n in range(8)]  # as many as run at once: the next one waits
    for name in running:
        pair.decode.add(name, prompt_of(11, 10), 400)
    pair.decode.add("early", prompt, 8, first.params)
    pair.decode.abort("early")
    assert pair.prefill.settle() == pair.prefill.free
    assert "gave the request up before it had memory" in pair.prefill.logged()
    for name in running:
        pair.decode.abort(name)
    pair.settled()


@pytest.mark.shows("aborts in every state")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_an_abort_on_prefill_sends_nothing(pair: Pair) -> None:
    pair.prefill.add("gone", prompt_of(12, 900), 1, dict(PREFILL))
    pair.prefill.abort("gone")
    assert pair.prefill.settle() == pair.prefill.free
