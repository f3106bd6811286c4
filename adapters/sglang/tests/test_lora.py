"""Real SGLang servers with LoRA adapters: tokens of the model that each adapter makes, from transformers.

Both servers have an adapter under one name. Its id, its file and its place in their memory may differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import pytest
from engine_processes import running
from support.lora import make_adapter
from support.models import generate, prompt_of
from support.servers import Pair, Posted

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

COMMON = [
    *("--page-size", "16", "--chunked-prefill-size", "32"),
    *("--enable-lora", "--lora-backend", "torch_native", "--max-loras-per-batch", "2"),
]
"""Adapters that a server computes with at once: two, of which none is one. So requests wait for each other."""
NAMES = (None, "first", "second")


class Served(NamedTuple):
    """A pair of servers, and the whole model that stands for each name of an adapter."""

    pair: Pair
    models: dict[str | None, Path]


@pytest.fixture(scope="module")
def served(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Prefill has three adapters. Decode has the second, and is given the first later, so its ids are others."""
    folder = tmp_path_factory.mktemp("lora")
    made = {name: make_adapter(folder / name, llama, seed) for seed, name in enumerate(("first", "second", "third"))}
    paths = {name: f"{name}={adapter.folder}" for name, adapter in made.items()}
    with running(
        Pair(
            folder,
            llama,
            {"backend": "tcp", "verify": "digest"},
            common=COMMON,
            prefill=["--lora-paths", *paths.values()],
            decode=["--disaggregation-decode-enable-radix-cache", "--lora-paths", paths["second"]],
        )
    ) as pair:
        pair.decode.tell("/load_lora_adapter", lora_name="first", lora_path=str(made["first"].folder))
        yield Served(pair, {None: llama, **{name: adapter.merged for name, adapter in made.items()}})


def test_each_adapter_has_its_own_tokens_and_its_own_cached_prefixes(served: Served) -> None:
    prompt = prompt_of(1, 100)
    longer = [*prompt, *prompt_of(2, 30)]
    for name in NAMES:
        first, second = served.pair.generate(prompt, lora_path=name)
        expected = generate(served.models[name], prompt, 8)
        assert (first.tokens, second.tokens) == (expected[:1], expected), name
        assert second.body["meta_info"]["cached_tokens"] == 0, name
    for name in NAMES:
        _, second = served.pair.generate(longer, lora_path=name)
        assert second.tokens == generate(served.models[name], longer, 8), name
        assert second.body["meta_info"]["cached_tokens"] >= 96, name


def test_requests_of_all_adapters_at_once_get_their_own_tokens(served: Served) -> None:
    asked = [(NAMES[seed % 3], prompt_of(10 + seed, 20 + 7 * seed)) for seed in range(12)]
    bodies = [served.pair.body(prompt, 20, lora_path=name) for name, prompt in asked]
    posted = [(Posted(served.pair.prefill, body), Posted(served.pair.decode, body)) for body in bodies]
    for (name, prompt), (_, second) in zip(asked, posted, strict=True):
        assert second.answer().tokens == generate(served.models[name], prompt, 20), name


@pytest.mark.parametrize(("prefill", "decode"), [("first", "second"), ("first", None), (None, "second")])
def test_another_adapter_on_the_other_server_fails_the_request(
    served: Served, prefill: str | None, decode: str | None
) -> None:
    prompt = prompt_of(30, 50)
    body = served.pair.body(prompt)
    posted = [
        Posted(server, {**body, "lora_path": name})
        for server, name in ((served.pair.prefill, prefill), (served.pair.decode, decode))
    ]
    for each in posted:
        assert each.answer().status == 500, each.answer()
        assert "the two sides hold different requests" in each.answer().text, each.answer()
    for name in NAMES:
        assert served.pair.generate(prompt, lora_path=name)[1].tokens == generate(served.models[name], prompt, 8)


def test_an_adapter_that_decode_does_not_have_fails_the_request(served: Served) -> None:
    answer = served.pair.decode.ask("/generate", served.pair.body(prompt_of(31, 50), lora_path="third"))
    assert answer.status == 400, answer
    assert "Got LoRA adapter that has never been loaded: third" in answer.text, answer


def test_a_request_that_is_computed_anew_without_its_adapter_fails(served: Served) -> None:
    """SGLang's request to prefill has no adapter, so prefill would compute with the base model's weights."""
    decode = served.pair.decode
    body = served.pair.body(prompt_of(32, 40), 300, lora_path="second")
    Posted(served.pair.prefill, body)
    waits = Posted(decode, body)
    for _ in range(1000):  # pausing takes effect only while the request runs
        decode.tell("/pause_generation", mode="retract")
        decode.tell("/continue_generation")
        if waits.answered(0.2):
            break
    assert waits.answer().status == 500, waits.answer()
    assert "the two sides hold different requests" in waits.answer().text, waits.answer()
    prompt = prompt_of(33, 40)
    assert served.pair.generate(prompt, lora_path="second")[1].tokens == generate(served.models["second"], prompt, 8)
