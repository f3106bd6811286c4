"""Real engines with models of several kinds of layers, each in a block table of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from engine_processes import running
from support.engines import PREFILL, Pair, prompt_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

TCP = {"backend": "tcp", "verify": "digest"}


@pytest.fixture(scope="module")
def windows(windowed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with running(Pair(tmp_path_factory.mktemp("windows"), windowed, TCP, block_size=16)) as pair:
        yield pair


@pytest.fixture(scope="module")
def states(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with running(Pair(tmp_path_factory.mktemp("states"), hybrid, TCP)) as pair:
        yield pair


# A window of 64 tokens in blocks of 16: at 80 + 1 tokens, the oldest token of the window is the last of its block.
@pytest.mark.parametrize("length", [1, 2, 40, 64, 65, 79, 80, 81, 82, 96, 97, 200])
@pytest.mark.shows("engines: the tokens of one, sliding windows, over tcp")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_sliding_windows_end_where_decode_goes_on(windows: Pair, length: int) -> None:
    assert "SlidingWindowSpec" in windows.prefill.groups
    prompt = prompt_of(length, length)
    before = windows.moved()[0]
    _, second = windows.hand(prompt)
    assert second.tokens == windows.alone(prompt)
    assert windows.moved()[0] == before + (length > 1)
    windows.settled()


def test_windows_after_a_prefix_that_decode_holds(windows: Pair) -> None:
    prompt = prompt_of(1, 150)
    windows.hand(prompt)
    longer = [*prompt, *prompt_of(2, 60)]
    _, second = windows.hand(longer)
    assert second.tokens == windows.alone(longer)
    windows.settled()


@pytest.mark.smoke
@pytest.mark.parametrize("length", [1, 2, 7, 33, 64, 65, 96, 100, 333])
@pytest.mark.shows("engines: the tokens of one, recurrent layers, over tcp")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_recurrent_states_have_not_seen_the_last_token(states: Pair, length: int) -> None:
    assert "MambaSpec" in states.prefill.groups
    prompt = prompt_of(length, length)
    before = states.moved()[0]
    _, second = states.hand(prompt)
    assert second.tokens == states.alone(prompt)
    assert states.moved()[0] == before + (length > 1)
    states.settled()


@pytest.mark.smoke
def test_recurrent_states_after_a_prefix_that_decode_holds(states: Pair) -> None:
    prompt = prompt_of(3, 150)
    states.hand(prompt)
    longer = [*prompt, *prompt_of(4, 60)]
    _, second = states.hand(longer)
    assert second.tokens == states.alone(longer)
    states.settled()


@pytest.mark.parametrize("kind", ["windows", pytest.param("states", marks=pytest.mark.smoke)])
def test_the_state_of_another_prompt_gives_other_tokens(kind: str, request: pytest.FixtureRequest) -> None:
    pair: Pair = request.getfixturevalue(kind)
    one, other = prompt_of(5, 100), prompt_of(6, 100)
    with pair.prefill.blind(), pair.decode.blind():
        first = pair.prefill.run("swapped", one, 1, dict(PREFILL))
        assert pair.decode.run("swapped", other, 8, first.params).tokens != pair.alone(other)
