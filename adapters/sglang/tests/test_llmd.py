"""What llm-d's sidecar sends in its mode ``sglang``: one body to prefill and to decode, at once.

The sidecar is a program of Go that is not here. `Sidecar` sends its requests. A client that leaves ends decode's
request alone: nobody but decode can tell prefill.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from engine_processes import running
from support.models import generate, prompt_of
from support.servers import Pair, Posted

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import Server

pytestmark = pytest.mark.servers

SECONDS = 60.0
"""Less than any limit of SGLang's on a request that waits: those are 300 s."""
COUNT = 400
"""Tokens that decode generates for a client that leaves."""


@pytest.fixture(scope="module")
def pair(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    common = ["--page-size", "16", "--chunked-prefill-size", "32"]
    with running(Pair(tmp_path_factory.mktemp("llmd"), llama, {"backend": "tcp"}, common=common)) as made:
        yield made


class Sidecar:
    """Beside decode: it posts the client's request to both servers."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def body(self, prompt: list[int], count: int) -> dict[str, Any]:
        """A client's request, with what the sidecar adds to it."""
        return {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self._pair.bootstrap_port,
            "bootstrap_room": time.time_ns() + random.randrange(1000),
        }

    def post(self, prompt: list[int], count: int) -> list[int]:
        """What decode answers. Prefill's answer is read, and thrown away."""
        body = self.body(prompt, count)
        Posted(self._pair.prefill, body)
        answer = self._pair.decode.ask("/generate", body)
        assert answer.status == 200, answer
        tokens: list[int] = answer.tokens
        return tokens

    def post_and_leave(self, prompt: list[int], seconds: float) -> Posted:
        """A client that leaves after some seconds. Decode's connection is closed, and prefill's request goes on."""
        body = self.body(prompt, COUNT)
        first = Posted(self._pair.prefill, body)
        connection = http.client.HTTPConnection("127.0.0.1", self._pair.decode.port)
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        time.sleep(seconds)
        connection.close()
        return first


def wait_idle(server: Server) -> None:
    """Return once the server holds nothing for any request: it then empties its cache."""
    until = time.monotonic() + SECONDS
    while server.ask("/flush_cache", {}).status != 200:
        assert time.monotonic() < until, f"{server.name} still holds something:\n{server.logged()[-3000:]}"
        time.sleep(0.2)


@pytest.mark.shows("llm-d: the requests of its sidecar to SGLang, to both servers at once")
def test_the_tokens_are_those_of_one_server(pair: Pair, llama: Path) -> None:
    for seed in range(3):
        prompt = prompt_of(seed, 50 + 60 * seed)
        assert Sidecar(pair).post(prompt, 6) == generate(llama, prompt, 6)


@pytest.mark.parametrize("seconds", [0.0, 0.1, 1.0])
def test_a_client_that_leaves_holds_nothing(pair: Pair, seconds: float) -> None:
    """It leaves before decode has asked prefill, while state moves, or while decode generates."""
    sidecar = Sidecar(pair)
    with ThreadPoolExecutor(5) as threads:
        left = [threads.submit(sidecar.post_and_leave, prompt_of(100 + at, 300), seconds) for at in range(5)]
        legs = [each.result() for each in left]
    for leg in legs:
        assert leg.answered(SECONDS), "prefill waits for a decode that has left"
    for server in (pair.decode, pair.prefill):
        wait_idle(server)


@pytest.mark.shows("llm-d: a client that leaves before SGLang's decode has memory for its request holds nothing")
def test_a_client_that_leaves_before_decode_has_memory_holds_nothing(pair: Pair, llama: Path) -> None:
    """Decode has asked prefill for nothing. Only Statelink tells prefill that nobody will ask.

    Other requests have decode's 2,048 tokens until prefill gets them, too.
    """
    sidecar = Sidecar(pair)
    bodies = [sidecar.body(prompt_of(200 + at, 500), 6) for at in range(4)]
    before = [Posted(pair.decode, body) for body in bodies]
    leg = sidecar.post_and_leave(prompt_of(210, 500), 1.0)
    assert leg.answered(SECONDS), "prefill waits for a decode that has left"
    assert not any(each.answered(0.0) for each in before), "decode had memory for the request"
    legs = [Posted(pair.prefill, body) for body in bodies]
    for body, each in zip(bodies, before, strict=True):
        answer = each.answer()
        assert answer.status == 200, answer
        assert answer.tokens == generate(llama, body["input_ids"], 6)
    for each in legs:
        assert each.answer().status == 200
    for server in (pair.decode, pair.prefill):
        wait_idle(server)
