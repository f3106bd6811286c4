"""Prefill on one engine and decode on the other, over tcp: the tokens are those of one engine alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.servers import PAGE, Routed, Servers, routed, started
from tiny_llama import LAYERS, prompt_of

import router

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.smoke

WAYS = ("sglang-to-vllm", "vllm-to-sglang")
"""In this order: vLLM serves both, and would find in its own cache what it has served alone."""
PAGE_BYTES = LAYERS * 2 * 2 * PAGE * 32 * 4
"""Layers, key and value, heads, tokens, numbers of 4 bytes."""


@pytest.fixture(scope="module")
def servers(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with started(tmp_path_factory.mktemp("servers"), llama) as made:
        yield made


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Routed]:
    with routed(servers, request.param) as made:
        yield made


@pytest.mark.parametrize("length", [2, 7, 16, 32, 33, 100, 333])
def test_the_tokens_are_those_of_one_engine(servers: Servers, way: Routed, length: int) -> None:
    prompt = prompt_of(length, length)
    moved = servers.vllm.moved()
    assert way.generate(prompt) == servers.vllm.alone(prompt)
    servers.vllm.wait_moved((moved[0] + 1, moved[1] + -(-length // PAGE) * PAGE_BYTES))


def test_the_state_of_another_prompt_is_refused(servers: Servers, way: Routed, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails, and neither engine keeps anything of it in a cache."""
    one, other = prompt_of(2001, 100), prompt_of(2002, 100)
    to_sglang, to_vllm = router.generate, router.complete
    if way.name == "sglang-to-vllm":
        monkeypatch.setattr(router, "generate", lambda where, prompt, *more: to_sglang(where, other, *more))
    else:
        monkeypatch.setattr(router, "complete", lambda where, model, prompt, *more: to_vllm(where, model, other, *more))
    why = "the two sides hold different requests"
    # vLLM's answer does not say why it failed a request. Its log does.
    with pytest.raises(router.RouteError, match="answered 500" if way.name == "sglang-to-vllm" else why):
        way.generate(one)
    servers.vllm.wait_logged(why)
    monkeypatch.undo()
    for prompt in (one, other, [*one, *prompt_of(2004, 40)]):
        assert way.generate(prompt) == servers.vllm.alone(prompt)


def test_a_request_without_its_first_token_fails_by_name(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "FIRST_TOKEN", "another_word")
    with routed(servers, "vllm-to-sglang") as way:
        with pytest.raises(router.RouteError, match="502") as caught:
            way.generate(prompt_of(2003, 50))
        assert "custom_params have no 'statelink_first_token'" in str(caught.value).replace("\\", "")


def test_a_prefix_that_decode_holds_is_not_moved_again(servers: Servers, way: Routed) -> None:
    prompt = prompt_of(3001, 100)
    way.generate(prompt)
    longer = [*prompt, *prompt_of(3002, 60)]
    assert way.generate(longer) == servers.vllm.alone(longer)


def test_16_requests_at_once_get_their_own_tokens(servers: Servers, way: Routed) -> None:
    prompts = [prompt_of(1000 + seed, 20 + 7 * seed) for seed in range(16)]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda prompt: way.generate(prompt, 4), prompts))
    assert answers == [servers.vllm.alone(prompt, 4) for prompt in prompts]
