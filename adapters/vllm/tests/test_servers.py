"""Two real vLLM servers over tcp, behind a router that hands prefill's answer to decode."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from engine_processes import running
from support.engines import prompt_of
from support.servers import ServerPair

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.smoke, pytest.mark.servers]


@pytest.fixture(scope="module")
def pair(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPair]:
    folder = tmp_path_factory.mktemp("servers")
    with running(ServerPair(folder, llama, {"backend": "tcp", "verify": "digest"})) as pair:
        yield pair


@pytest.mark.parametrize("length", [1, 7, 96, 100, 333])
def test_the_tokens_are_those_of_one_server(pair: ServerPair, length: int) -> None:
    prompt = prompt_of(length, length)
    answer = pair.route(prompt)
    assert answer.status == 200, answer
    assert answer.tokens == pair.prefill.complete(prompt, 8).tokens
    assert "could not be received" not in pair.decode.logged()


def test_64_requests_at_once_get_their_own_tokens(pair: ServerPair) -> None:
    # Of these prompts, the two most likely tokens are never so close that the batch's size decides between them.
    prompts = [prompt_of(3000 + seed, 20 + seed % 61) for seed in range(64)]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda prompt: pair.route(prompt, 4), prompts))
    assert [answer.status for answer in answers] == [200] * len(prompts)
    with ThreadPoolExecutor(8) as threads:
        alone = list(threads.map(lambda prompt: pair.prefill.complete(prompt, 4).tokens, prompts))
    assert [answer.tokens for answer in answers] == alone
    assert "could not be received" not in pair.decode.logged()
