"""What llm-d's sidecar sends: to prefill, and with prefill's answer to decode (``nixlv2``); or to both at once.

The sidecar is a program of Go that is not here. The requests here are its own, field by field.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import time
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from engine_processes import running
from support.engines import prompt_of
from support.routers import CHAT, COMPLETIONS, LIMITS, Sidecar, bootstrap_server
from support.servers import PREFILL_NAME, ServerPair

from statelink.rendezvous import RendezvousServer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from support.servers import Server

pytestmark = pytest.mark.servers


def request(pair: ServerPair, seed: int, length: int = 300, **more: Any) -> dict[str, Any]:
    """A client's request."""
    return {**pair.decode.body(prompt_of(seed, length), 8), **more}


def received(server: Server) -> float:
    """How many requests got their state."""
    counted: list[float] = server.metric("vllm:statelink_transfer_bytes_count")
    return sum(counted)


@pytest.mark.shows("llm-d: the requests of its sidecar, one after the other (nixlv2)")
@pytest.mark.parametrize("limits", [{}, {"min_tokens": 3}])
def test_the_tokens_are_those_of_one_server(pair: ServerPair, limits: dict[str, Any]) -> None:
    body, before = request(pair, random.randrange(1 << 30), **limits), received(pair.decode)
    answer = Sidecar(pair).post(body)
    assert answer.status == 200, answer
    assert answer.tokens == pair.prefill.ask(COMPLETIONS, body).tokens
    pair.decode.wait_counted("vllm:statelink_transfer_bytes_count", before + 1)
    pair.settled()


def test_a_conversation(pair: ServerPair) -> None:
    said = " ".join(f"w{number}" for number in random.sample(range(200), 60))
    body = {
        "model": pair.decode.model,
        "messages": [{"role": "user", "content": said}],
        "temperature": 0,
        "max_completion_tokens": 8,
        "return_token_ids": True,
    }
    before = received(pair.decode)
    answer = Sidecar(pair, CHAT).post(body)
    assert answer.status == 200, answer
    assert answer.tokens == pair.prefill.ask(CHAT, body).tokens
    pair.decode.wait_counted("vllm:statelink_transfer_bytes_count", before + 1)
    pair.settled()


def test_a_stream(pair: ServerPair) -> None:
    """Prefill's request is none, and decode's has the client's ``stream_options``."""
    body = request(pair, random.randrange(1 << 30), stream=True, stream_options={"include_usage": True})
    answer = Sidecar(pair).post(body)
    assert answer.status == 200, answer
    events = [
        json.loads(line.removeprefix("data: ")) for line in answer.body.splitlines() if line.startswith("data: {")
    ]
    assert events[-1]["usage"]["completion_tokens"] == 8
    tokens = [token for each in events for choice in each["choices"] for token in choice["token_ids"] or ()]
    plain = {key: value for key, value in body.items() if not key.startswith("stream")}
    assert tokens == pair.prefill.ask(COMPLETIONS, plain).tokens
    pair.settled()


@pytest.mark.shows("llm-d: an answer of prefill that is lost, and asked for again, holds nothing")
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_answer_that_is_lost_holds_nothing(pair: ServerPair, path: str) -> None:
    """Prefill's ``deadline`` is 120 s, which is more than `settled` waits."""
    body = request(pair, random.randrange(1 << 30))
    if path == CHAT:
        said = " ".join(f"w{number}" for number in random.sample(range(200), 60))
        body = {"model": pair.decode.model, "messages": [{"role": "user", "content": said}], "temperature": 0}
        body |= {"max_completion_tokens": 8, "return_token_ids": True}
    before = received(pair.decode)
    answer = Sidecar(pair, path, lost=2).post(body)
    assert answer.status == 200, answer
    assert answer.tokens == pair.prefill.ask(path, body).tokens
    pair.decode.wait_counted("vllm:statelink_transfer_bytes_count", before + 1)
    pair.settled()


@contextlib.contextmanager
def leaving(server: Server, body: Mapping[str, Any], headers: Mapping[str, str]) -> Iterator[None]:
    """A client that posts, and goes away at the end of the block."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    try:
        connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json", **headers})
        yield
    finally:
        connection.close()


def test_a_client_that_leaves_holds_nothing(pair: ServerPair) -> None:
    """Prefill has answered. The sidecar ends decode's request, and tells prefill nothing."""
    for seed in range(4):
        sidecar = Sidecar(pair)
        body = request(pair, 8000 + seed, 600, max_tokens=300)
        sidecar.headers = {"x-request-id": str(uuid.uuid1())}
        params = sidecar.prefill(body)
        with leaving(pair.decode, {**body, "kv_transfer_params": params}, sidecar.headers):
            pair.decode.wait_usage(True)
        pair.settled()


@pytest.fixture(scope="module")
def named(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPair]:
    """Two servers that find each other by name in a directory."""
    folder = tmp_path_factory.mktemp("named")
    with RendezvousServer() as directory:
        config = {"backend": "tcp", "rendezvous": directory.address}
        with running(ServerPair(folder, llama, config)) as made:
            yield made


@pytest.fixture
def bootstrap(tmp_path: Path) -> Iterator[str]:
    """The web server of docs/llm-d.md, which answers ``GET /query``."""
    with bootstrap_server(tmp_path, PREFILL_NAME) as port:
        yield f"http://127.0.0.1:{port}"


def query(address: str) -> dict[str, dict[str, str]]:
    """What the sidecar asks prefill's host once."""
    until = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(f"{address}/query", timeout=5) as answer:
                found: dict[str, dict[str, str]] = json.loads(answer.read())
                return found
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.05)


@pytest.mark.shows("llm-d: the requests of its sidecar to both servers at once (mooncake)")
def test_the_mode_for_mooncake_sends_to_both_at_once(named: ServerPair, bootstrap: str) -> None:
    ((rank, entry),) = query(bootstrap).items()
    for seed in range(3):
        body, before = request(named, 9000 + seed), received(named.decode)
        transfer = f"xfer-{uuid.uuid4()}"
        asked = {**body, "stream": False, **dict.fromkeys(LIMITS, 1)}
        asked["kv_transfer_params"] = {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "transfer_id": transfer,
        }
        wanted = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer,
            "remote_bootstrap_addr": bootstrap,
            "remote_engine_id": entry["engine_id"],
        }
        with ThreadPoolExecutor(1) as thread:
            first = thread.submit(named.prefill.ask, COMPLETIONS, asked, headers={"X-data-parallel-rank": rank})
            answer = named.decode.ask(COMPLETIONS, {**body, "kv_transfer_params": wanted})
            assert first.result().status == 200
        assert answer.tokens == named.prefill.ask(COMPLETIONS, body).tokens
        named.decode.wait_counted("vllm:statelink_transfer_bytes_count", before + 1)
    named.settled()
