"""Real servers, and requests of other kinds: LoRA adapters, embeddings as prompts, images, and pooling."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from engine_environments import completion
from engine_processes import running
from support.engines import PREFILL, prompt_of, transfer
from support.families import add_adapter, make_llava
from support.models import add_tokenizer, embedding, make_llama
from support.servers import Server, ServerPair

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import Answer

pytestmark = pytest.mark.servers

CONFIG = {"backend": "tcp", "verify": "digest"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ADAPTERS = ("sql", "poetry")


class Asked:
    """Requests of one kind to a pair of servers."""

    def __init__(self, pair: ServerPair, path: str) -> None:
        self.pair, self._path = pair, path

    def alone(self, body: dict[str, Any]) -> list[int]:
        """The tokens of one server."""
        return self._tokens(self.pair.prefill.ask(self._path, body))

    def prefill(self, body: dict[str, Any]) -> dict[str, Any]:
        """What prefill answers to a router."""
        answer = self.pair.prefill.ask(self._path, {**body, "max_tokens": 1, "kv_transfer_params": dict(PREFILL)})
        assert answer.status == 200, answer
        params: dict[str, Any] = answer.body["kv_transfer_params"]
        return params

    def decode(self, body: dict[str, Any], params: dict[str, Any]) -> list[int]:
        """The tokens of decode, which got such an answer."""
        return self._tokens(self.pair.decode.ask(self._path, {**body, "kv_transfer_params": params}))

    def received(self) -> float:
        """How many requests' state came to decode."""
        counted: list[float] = self.pair.decode.metric("vllm:statelink_transfer_bytes_count")
        return sum(counted)

    def check(self, *bodies: dict[str, Any]) -> None:
        """Each gets the tokens of one server, which differ; an answer of prefill for another is refused."""
        before = self.received()
        alone = [self.alone(body) for body in bodies]
        assert len(set(map(tuple, alone))) == len(bodies)
        for body, tokens in zip(bodies, alone, strict=True):
            assert self.decode(body, self.prefill(body)) == tokens
        self.pair.decode.wait_counted("vllm:statelink_transfer_bytes_count", before + len(bodies))
        said = [self.prefill(body) for body in bodies]
        for body, tokens, of_another in zip(bodies, alone, [*said[1:], said[0]], strict=True):
            assert self.decode(body, of_another) == tokens
        self.pair.decode.wait_logged("prefill's answer is for another request")
        assert self.received() == before + len(bodies)
        for body, tokens, its_own in zip(bodies, alone, said, strict=True):  # prefill holds it until then
            assert self.decode(body, its_own) == tokens
        self.pair.settled()

    @staticmethod
    def _tokens(answer: Answer) -> list[int]:
        assert answer.status == 200, answer
        tokens: list[int] = answer.tokens
        return tokens


@pytest.fixture(scope="module")
def talking(models: Path) -> Path:
    made: Path = add_tokenizer(make_llama(models / "of-prompts"))
    return made


@pytest.fixture(scope="module")
def completions(talking: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """Two servers that take adapters, which they name alike and number otherwise, and embeddings."""
    folder = tmp_path_factory.mktemp("completions")
    modules = [f"{name}={add_adapter(talking, folder / name, seed)}" for seed, name in enumerate(ADAPTERS)]
    common = ["--enable-lora", "--max-loras", "2", "--enable-prompt-embeds", "--no-skip-tokenizer-init"]
    sides = ([*common, "--lora-modules", *modules], [*common, "--lora-modules", *reversed(modules)])
    with running(ServerPair(folder, talking, CONFIG, prefill=sides[0], decode=sides[1])) as pair:
        yield Asked(pair, COMPLETIONS)


@pytest.mark.shows("two servers: LoRA adapters")
def test_each_adapter_gives_its_own_tokens(completions: Asked) -> None:
    prompt = prompt_of(1, 100)
    completions.check(*(completion(name, prompt, 8) for name in (completions.pair.prefill.model, *ADAPTERS)))


def embedded(model: Path, prompt: list[int]) -> str:
    """The model's own embeddings of these tokens, as a client sends them."""
    import torch
    from safetensors.torch import load_file

    rows = load_file(model / "model.safetensors")["model.embed_tokens.weight"][prompt]
    written = io.BytesIO()
    torch.save(rows.clone(), written)
    return base64.b64encode(written.getvalue()).decode()


@pytest.mark.shows("two servers: embeddings as prompts")
def test_embeddings_give_the_tokens_of_their_prompt(completions: Asked, talking: Path) -> None:
    bodies = []
    for seed in (2, 3):
        prompt = prompt_of(seed, 100)
        plain = completion(completions.pair.prefill.model, prompt, 8)
        bodies.append({**plain, "prompt": None, "prompt_embeds": embedded(talking, prompt)})
        assert completions.alone(bodies[-1]) == completions.alone(plain)
    completions.check(*bodies)


@pytest.fixture(scope="module")
def chats(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    model = make_llava(models / "llava")
    options = ["--no-skip-tokenizer-init"]
    folder = tmp_path_factory.mktemp("chats")
    with running(ServerPair(folder, model, CONFIG, prefill=options, decode=options)) as pair:
        yield Asked(pair, CHAT)


def picture(colour: tuple[int, int, int]) -> dict[str, Any]:
    """A part of a conversation: an image of one colour."""
    from PIL import Image

    written = io.BytesIO()
    Image.new("RGB", (28, 28), colour).save(written, "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"},
    }


@pytest.mark.shows("two servers: images")
def test_each_image_gives_its_own_tokens(chats: Asked) -> None:
    said = {"type": "text", "text": " ".join(f"t{each}" for each in prompt_of(4, 60))}
    plain = completion(chats.pair.prefill.model, [], 8)
    del plain["prompt"]
    red, blue = picture((250, 10, 10)), picture((10, 10, 250))
    chats.check(
        *(
            {**plain, "messages": [{"role": "user", "content": [*seen, said]}]}
            for seen in ([red], [blue], [red, blue], [])
        )
    )


@pytest.mark.shows("one server: a pooling model")
def test_a_pooling_model_answers_and_hands_nothing_over(talking: Path, tmp_path: Path) -> None:
    options = ["--runner", "pooling", "--convert", "embed", "--no-skip-tokenizer-init"]
    server = Server("pooling", tmp_path, talking, transfer(CONFIG, kv_role="kv_both"), *options)
    try:
        server.wait_ready()
        for length in (5, 100):
            prompt = prompt_of(length, length)
            answer = server.ask("/v1/embeddings", {"model": server.model, "input": [prompt]})
            assert answer.status == 200, answer
            assert answer.body["data"][0]["embedding"] == pytest.approx(embedding(talking, prompt), abs=1e-4)
        server.wait_usage(False)
    finally:
        server.kill()
