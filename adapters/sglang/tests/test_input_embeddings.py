"""Real SGLang servers that get embeddings in place of token ids. SGLang takes them in bfloat16, and caches no prefix.

The embeddings of a prompt's tokens must give what the prompt gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from engine_processes import running
from support.models import embeddings, prompt_of
from support.servers import Alone, Pair, Posted

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

COMMON = ["--page-size", "16", "--chunked-prefill-size", "32", "--dtype", "bfloat16", "--disable-radix-cache"]
LENGTHS = (5, 40, 100)


@pytest.fixture(scope="module")
def expected(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    """The tokens of one server, to which the prompts are given as token ids."""
    with Alone(tmp_path_factory.mktemp("alone"), llama, COMMON) as alone:
        return {length: alone.generate(prompt_of(length, length)).tokens for length in LENGTHS}


@pytest.fixture(scope="module")
def pair(llama: Path, expected: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    config = {"backend": "tcp", "verify": "digest"}
    with running(Pair(tmp_path_factory.mktemp("pair"), llama, config, common=COMMON)) as pair:
        yield pair


def _embedded(model: Path, prompt: list[int]) -> dict[str, Any]:
    """The fields of a request that has the embeddings of a prompt, and not its ids."""
    return {"input_ids": None, "input_embeds": embeddings(model, prompt)}


def test_embeddings_give_the_tokens_of_the_ids_that_they_stand_for(
    pair: Pair, llama: Path, expected: dict[int, list[int]]
) -> None:
    for length in LENGTHS:
        prompt = prompt_of(length, length)
        first, second = pair.generate(prompt, **_embedded(llama, prompt))
        assert (first.tokens, second.tokens) == (expected[length][:1], expected[length]), length


def test_requests_with_embeddings_at_once_get_their_own_tokens(
    pair: Pair, llama: Path, expected: dict[int, list[int]]
) -> None:
    bodies = [pair.body([], **_embedded(llama, prompt_of(length, length))) for length in LENGTHS]
    posted = [(Posted(pair.prefill, body), Posted(pair.decode, body)) for body in bodies]
    assert [second.answer().tokens for _, second in posted] == list(expected.values())


def test_other_embeddings_on_the_other_server_fail_the_request(pair: Pair, llama: Path) -> None:
    prompt = prompt_of(40, 40)
    body = pair.body(prompt)
    right, wrong = (_embedded(llama, each) for each in (prompt, prompt[::-1]))
    for to_prefill, to_decode in ((right, wrong), (right, {"input_ids": [1] * 40}), ({"input_ids": prompt}, right)):
        posted = Posted(pair.prefill, {**body, **to_prefill}), Posted(pair.decode, {**body, **to_decode})
        for each in posted:
            assert each.answer().status == 500, each.answer()
            assert "the two sides hold different requests" in each.answer().text, each.answer()
