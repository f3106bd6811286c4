"""Conversations over real engines: what prefill computes of each turn, and the tokens of one undisturbed engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from engine_processes import running
from support.engines import PREFILL, Ended, Pair, prompt_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

TCP = {"backend": "tcp", "verify": "digest"}
BOTH = {"kv_role": "kv_both"}
MODELS = ["llama", "windowed", "hybrid"]
TURNS = ((21, 40), (1, 33), (16, 0))
"""Of each turn, the tokens that are generated, and those that the client adds behind them."""


def pair_of(request: pytest.FixtureRequest, folder: Path, **more: Any) -> Pair:
    model: Path = request.getfixturevalue(request.param)
    return Pair(folder, model, TCP, prefill=BOTH, decode=BOTH, kv_cache_memory_bytes=24 << 20, **more)


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Without prefix caches."""
    with running(pair_of(request, tmp_path_factory.mktemp("turns"), enable_prefix_caching=False)) as pair:
        yield pair


@pytest.fixture(scope="module", params=MODELS)
def caching(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with running(pair_of(request, tmp_path_factory.mktemp("asked"), enable_prefix_caching=True)) as pair:
        yield pair


def found(ended: Ended) -> int:
    """For how many tokens an engine that sends had state before it computed: vLLM's own count."""
    return int((ended.params or {})["remote_prefill_cached_tokens"])


def turn(pair: Pair, name: str, prompt: list[int], count: int, back: Any, hold: float = 60.0) -> tuple[Ended, Ended]:
    """One turn: prefill goes on from what decode said in the turn before, and decode from prefill."""
    asked = {**back, "do_remote_prefill": True, "do_remote_decode": True} if back else dict(PREFILL)
    first = pair.prefill.run(name, prompt, 1, asked)
    said = {**(first.params or {}), "do_remote_decode": True, "hold": hold}
    return first, pair.decode.run(name, prompt, count, said)


@pytest.mark.smoke
@pytest.mark.shows("conversations: each turn goes on from the state that decode holds, to the last token")
def test_prefill_computes_only_what_is_new_in_each_turn(pair: Pair) -> None:
    history, back, more = prompt_of(1, 100), None, 0
    for number, (count, behind) in enumerate(TURNS):
        first, second = turn(pair, f"turn{number}", history, count, back)
        assert second.tokens == pair.alone(history, count)
        if back:
            assert len(history) - found(first) == 1 + more
        back, more = second.params, behind
        history = [*history, *second.tokens, *prompt_of(10 + number, behind)]
    assert pair.prefill.settle() == pair.prefill.free


@pytest.mark.shows("conversations: nothing is held that nobody comes for")
def test_every_block_is_free_when_a_conversation_does_not_go_on(pair: Pair) -> None:
    """Its time is over, its client leaves in the next turn, or the next turn has another history."""
    for name, hold in (("over", 0.5), ("left", 60.0), ("other", 60.0)):
        prompt = prompt_of(len(name) + int(hold), 90)
        _, second = turn(pair, name, prompt, 9, None, hold)
        params = {**(second.params or {}), "do_remote_prefill": True}
        if name == "left":
            pair.prefill.add(f"{name}2", [*prompt, *second.tokens, 5, 6], 400, params)
            pair.prefill.abort(f"{name}2")
        elif name == "other":
            other = prompt_of(77, 95)
            assert pair.prefill.run(f"{name}2", other, 4, params).tokens == pair.alone(other, 4)
        pair.settled()


@pytest.mark.shows(
    "conversations: decode that is asked sends what its prefix cache has, and holds nothing between turns"
)
def test_prefill_goes_on_from_what_decode_is_asked_for(caching: Pair) -> None:
    pair, history = caching, prompt_of(2, 150)
    recurrent = any("Mamba" in group for group in pair.decode.groups)
    for number, (count, behind) in enumerate(((60, 100), (40, 65), (5, 0))):
        said: Any = {}
        if number:
            said = pair.decode.run(f"asked{number}", history, 1, {**PREFILL, "cached": True}).params
            # vLLM keeps no recurrent state that a token of decode's own has crossed a block with.
            assert said.get("tokens", 0) % 32 == 1 or (recurrent and "has nothing" in said["refused"]), said
        first = pair.prefill.run(f"turn{number}", history, 1, {**said, "do_remote_decode": True})
        second = pair.decode.run(f"turn{number}", history, count, first.params)
        if "tokens" in said:
            assert found(first) == said["tokens"]
        assert second.tokens == pair.prefill.run(f"alone{number}", history, count).tokens
        history = [*history, *second.tokens, *prompt_of(20 + number, behind)]
    pair.settled()
