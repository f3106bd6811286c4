"""Conversations over real engines: what prefill computes of each turn, and the tokens of one undisturbed engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from engine_processes import running
from support.engines import PREFILL, Ended, Pair, prompt_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.smoke, pytest.mark.servers]

TCP = {"backend": "tcp", "verify": "digest"}
BOTH = {"kv_role": "kv_both"}
MORE = (40, 33, 0)
"""New tokens of a client behind each answer."""


@pytest.fixture(scope="module", params=["llama", "windowed", "hybrid"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model: Path = request.getfixturevalue(request.param)
    with running(
        Pair(tmp_path_factory.mktemp(request.param), model, TCP, prefill=BOTH, decode=BOTH, enable_prefix_caching=False)
    ) as pair:
        yield pair


def turn(pair: Pair, name: str, prompt: list[int], count: int, back: dict[str, object] | None) -> tuple[Ended, Ended]:
    """One turn: prefill goes on from what decode said in the turn before, and decode from prefill."""
    asked = {**back, "do_remote_prefill": True, "do_remote_decode": True} if back else dict(PREFILL)
    first = pair.prefill.run(name, prompt, 1, asked)
    said = {**(first.params or {}), "do_remote_decode": True, "hold": 60}
    return first, pair.decode.run(name, prompt, count, said)


@pytest.mark.shows("conversations: each turn goes on from decode's state, with the tokens of one server")
def test_prefill_computes_only_what_is_new_in_each_turn(pair: Pair) -> None:
    history, back = prompt_of(1, 100), None
    for number, (count, more) in enumerate(zip((21, 1, 16), MORE, strict=True)):
        first, second = turn(pair, f"turn{number}", history, count, back)
        assert second.tokens == pair.alone(history, count)
        if back:
            found = (first.params or {})["remote_prefill_cached_tokens"]  # vLLM's own count
            assert len(history) - found == 1 + MORE[number - 1]
        back = second.params
        history = [*history, *second.tokens, *prompt_of(10 + number, more)]
        assert back is not None
    assert pair.prefill.settle() == pair.prefill.free
