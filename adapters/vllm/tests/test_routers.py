"""vLLM's own router in front of real servers, in both of its modes; with prefill that answers at once, and without.

Prefill ``prefill-0`` answers at once, and ``prefill-1`` does not. Decode is the same. All have keys, want one from
clients, and find each other in a directory. The routers are started as docs/vllm.md shows.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from engine_processes import running
from support.engines import PREFILL, prompt_of, transfer
from support.fleets import Fleet, internal, one
from support.models import add_tokenizer, make_llama
from support.routers import CHAT, COMPLETIONS, Router, Sidecar, bootstrap_server
from support.servers import Server

from statelink import Keys
from statelink.rendezvous import RendezvousServer

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import ServerPair

pytestmark = pytest.mark.servers

PROMPTS = "vllm:prompt_tokens_total"
KEY = "sesame"
AT_ONCE = ("--middleware", "statelink_vllm.AnswerAtOnce")
HITS = "vllm:external_prefix_cache_hits"
"""vLLM counts here the tokens whose state came from another server."""
WAYS = ("nixl", "nixl at once", "mooncake", "mooncake at once")
LENGTHS = (1, 31, 40, 64, 65, 130, 300, 500, 700, 900)


@dataclass
class Servers:
    """Two prefill servers and a decode server, and routers in front of one of each, by their ways."""

    prefill: Server
    plain: Server
    decode: Server
    routers: dict[str, Router]
    start: Callable[..., Server]

    def source(self, way: str) -> Server:
        """The prefill server behind a router."""
        return self.prefill if way.endswith("at once") else self.plain

    def settled(self) -> None:
        """Check that every block is free again."""
        for server in (self.prefill, self.plain, self.decode):
            server.wait_usage(False)

    def forget(self) -> None:
        """Empty the prefix caches."""
        self.settled()
        for server in (self.prefill, self.plain, self.decode):
            assert server.ask("/reset_prefix_cache", b"").status == 200

    def early(self, path: str = COMPLETIONS, **more: Any) -> bool:
        """Whether prefill answers a request at once. Decode gets its state, so that prefill does not wait for one."""
        body = {**self.prefill.body(fresh(40), 1, dict(PREFILL)), **more}
        answer = self.prefill.ask(path, body)
        assert answer.status == 200, answer
        events = answer.body.splitlines() if isinstance(answer.body, str) else []
        said = [json.loads(each[6:]) for each in events if each.startswith("data: {")] or [answer.body]
        (params,) = (each["kv_transfer_params"] for each in said if each.get("kv_transfer_params"))
        assert self.decode.ask(path, {**body, "kv_transfer_params": params}).status == 200
        return "transfer_id" in params


def fresh(length: int) -> list[int]:
    """A prompt that no other test has."""
    made: list[int] = prompt_of(random.randrange(1 << 40), length)
    return made


@pytest.fixture(scope="module")
def servers(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder, model = tmp_path_factory.mktemp("routers"), add_tokenizer(make_llama(models / "routed"))
    made = [zmq.curve_keypair() for _ in range(4)]
    allow = tuple(public.decode() for public, _ in made)
    own = [{"secret": secret.decode(), "allow": [*allow]} for _, secret in made]
    environment = {"VLLM_API_KEY": KEY, "VLLM_SERVER_DEV_MODE": "1"}
    with contextlib.ExitStack() as stack:
        directory = RendezvousServer(keys=Keys(secret=made[3][1].decode(), allow=allow))
        address = stack.enter_context(directory).address

        def start(name: str, number: int, role: str, engine: str, *options: str, port: int = 0) -> Server:
            config = {"backend": "tcp", "verify": "digest", "rendezvous": address, "keys": own[number]}
            given = transfer(config, kv_role=role, engine_id=engine)
            texts = ("--no-skip-tokenizer-init", *options)
            server = Server(name, folder, model, given, *texts, environment=environment, ordinary=True, port=port)
            stack.callback(server.kill)
            return server

        started = Servers(
            start("prefill", 0, "kv_producer", "prefill-0", *AT_ONCE),
            start("plain", 1, "kv_producer", "prefill-1"),
            start("decode", 2, "kv_consumer", "decode-0"),
            {},
            start,
        )
        for server in (started.prefill, started.plain, started.decode):
            server.wait_ready()
        for way in WAYS:
            source, mode, port = started.source(way), way.split()[0], None
            if mode == "mooncake":
                own_folder = folder / source.name
                own_folder.mkdir()
                name = "prefill-0" if source is started.prefill else "prefill-1"
                port = stack.enter_context(bootstrap_server(own_folder, name))
            router = Router(mode, folder, [source], started.decode, bootstrap=port, key=KEY)
            stack.callback(router.kill)
            started.routers[way] = router
        for router in started.routers.values():
            router.wait_ready()
        assert [started.early() for _ in range(2)] == [False, True]
        yield started


def hits(server: Server) -> float:
    return float(sum(server.metric(f"{HITS}_total")))


@pytest.mark.smoke
@pytest.mark.shows("vLLM's own router, one after the other (nixl)")
def test_the_router_hands_prefills_answer_to_decode(pair: ServerPair, tmp_path: Path) -> None:
    router = Router("nixl", tmp_path, [pair.prefill], pair.decode)
    try:
        router.wait_ready()
        prompt, before = fresh(300), hits(pair.decode)
        answer = router.ask(COMPLETIONS, pair.decode.body(prompt, 8))
        assert answer.tokens == pair.prefill.complete(prompt, 8).tokens
        pair.decode.wait_counted(f"{HITS}_total", before + len(prompt))
    finally:
        router.kill()
    pair.settled()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.shows("vLLM's own router, {way}: the tokens of one server, and all state by transfer")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_the_tokens_are_those_of_one_server(servers: Servers, way: str) -> None:
    prompts, before = [fresh(length) for length in LENGTHS], hits(servers.decode)
    router, seen = servers.routers[way], servers.source(way).logged().count("POST /v1/completions")
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda each: router.ask(COMPLETIONS, servers.decode.body(each, 8)), prompts))
    assert [answer.status for answer in answers] == [200] * len(prompts), answers
    assert servers.source(way).logged().count("POST /v1/completions") == seen + len(prompts)
    alone = [servers.plain.complete(prompt, 8).tokens for prompt in prompts]
    assert [answer.tokens for answer in answers] == alone
    servers.decode.wait_counted(f"{HITS}_total", before + sum(LENGTHS))
    assert hits(servers.decode) == before + sum(LENGTHS)
    servers.settled()


SAID = [{"role": "user", "content": " ".join(f"w{number}" for number in range(3, 90))}]
SEVERAL: dict[str, Any] = {"n": 2, "temperature": 1, "top_k": 1}  # vLLM wants several answers to be sampled
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
SHAPES: list[tuple[str, str, dict[str, Any]]] = [
    ("plain", COMPLETIONS, {}),
    ("stream", COMPLETIONS, STREAM),
    ("several answers", COMPLETIONS, SEVERAL),
    ("list", COMPLETIONS, {"prompt": [prompt_of(seed, 80) for seed in range(3)]}),
    ("text", COMPLETIONS, {"prompt": "w1 w2 w3 w4 w5"}),
    ("logprobs", COMPLETIONS, {"logprobs": 2}),
    ("echo and logprobs", COMPLETIONS, {"logprobs": 1, "echo": True}),
    ("logprobs of the prompt", COMPLETIONS, {"prompt_logprobs": 1}),
    ("conversation", CHAT, {}),
    ("streamed conversation", CHAT, STREAM),
    ("several answers in a conversation", CHAT, SEVERAL),
    ("logprobs of a conversation", CHAT, {"logprobs": True, "top_logprobs": 2}),
]


def said(servers: Servers, router: Router, path: str, more: dict[str, Any]) -> Any:
    """What a client is told: the choices of an answer, and how many tokens it is charged for."""
    body = {**servers.decode.body(prompt_of(4242, 150), 6), **more}
    if path == CHAT:
        body.pop("prompt")
        body["messages"] = SAID
    answer = router.ask(path, body)
    assert answer.status == 200, answer
    if "stream" not in more:
        usage = answer.body["usage"]
        return answer.body["choices"], usage["prompt_tokens"], usage["completion_tokens"]
    events = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith("data: {")]
    tokens = [token for each in events for choice in each["choices"] for token in choice.get("token_ids") or ()]
    return tokens, events[-1]["usage"]["prompt_tokens"], events[-1]["usage"]["completion_tokens"]


@pytest.mark.parametrize(("path", "more"), [each[1:] for each in SHAPES], ids=[each[0] for each in SHAPES])
@pytest.mark.shows("vLLM's own router: what clients are told, with prefill that answers at once and without")
def test_clients_are_told_the_same(servers: Servers, path: str, more: dict[str, Any]) -> None:
    told = []
    for way in WAYS:
        servers.forget()
        told.append(said(servers, servers.routers[way], path, more))
    assert told == told[:1] * len(WAYS)
    servers.settled()


@contextlib.contextmanager
def paused(server: Server, mode: str) -> Iterator[None]:
    """vLLM computes nothing meanwhile: it keeps requests, or refuses them."""
    assert server.ask(f"/pause?mode={mode}", b"").status == 200
    try:
        yield
    finally:
        assert server.ask("/resume", b"").status == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("way", ["nixl at once", "mooncake at once"])
@pytest.mark.shows("prefill answers at once: decode has memory before prefill computes")
def test_decode_asks_before_prefill_computes(servers: Servers, way: str, path: str) -> None:
    servers.forget()
    body = servers.decode.body(fresh(300), 8)
    if path == CHAT:
        body.pop("prompt")
        body["messages"] = SAID
    with ThreadPoolExecutor(1) as thread:
        with paused(servers.prefill, "keep"):
            answer = thread.submit(servers.routers[way].ask, path, body)
            servers.decode.wait_usage(True)
            assert servers.prefill.usage() == 0
        assert answer.result().tokens == servers.plain.ask(path, body).tokens
    servers.settled()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_answer_is_one_of_vllm(servers: Servers, path: str) -> None:
    """But for what nobody has computed yet. A router may state to the client how many tokens the prompt has."""
    body = {**servers.prefill.body(fresh(77), 1, dict(PREFILL)), **SEVERAL}
    if path == CHAT:
        body.pop("prompt")
        body["messages"] = SAID
    answers = [server.ask(path, body).body for server in (servers.prefill, servers.plain)]
    assert answers[0]["usage"].items() <= answers[1]["usage"].items()
    for key in ("object", "model"):
        assert answers[0][key] == answers[1][key]
    assert [each["index"] for each in answers[0]["choices"]] == [0, 1]
    for answer in answers:
        params = answer["kv_transfer_params"]
        assert servers.decode.ask(path, {**body, "kv_transfer_params": params}).status == 200


def test_what_cannot_be_answered_at_once_is_not(servers: Servers) -> None:
    assert servers.early()
    assert servers.early(COMPLETIONS, **SEVERAL, echo=True)
    ordinary: list[dict[str, Any]] = [
        {"logprobs": 1},
        {"prompt_logprobs": 1},
        {"max_tokens": 2},
        {"stream": True},
        {"kv_transfer_params": {**PREFILL, "transfer_id": ""}},  # which is none: the state is not sent
        {"prompt": [fresh(40), fresh(40)]},
        {"kv_transfer_params": {**PREFILL, "do_remote_prefill": True, "room": "7", "remote_engine_id": "other"}},
    ]
    for more in ordinary:
        assert not servers.early(**more), more
    servers.settled()


def test_a_request_that_is_refused_is_not_answered_at_once(servers: Servers) -> None:
    """By the key, by vLLM's reading of it, and because it is too long."""
    good = servers.prefill.body(fresh(40), 1, dict(PREFILL))
    for status, more, headers in (
        (401, {}, {"Authorization": "Bearer other"}),
        (400, {"temperature": "hot"}, {}),
        (400, {"prompt": fresh(2000)}, {}),
        (404, {"model": "another"}, {}),
    ):
        answer = servers.prefill.ask(COMPLETIONS, {**good, **more}, headers=headers)
        assert answer.status == status, (more, answer)
    for way in WAYS:
        answer = servers.routers[way].ask(COMPLETIONS, servers.decode.body(fresh(2000), 8))
        assert answer.status >= 400, (way, answer)
    servers.settled()


@pytest.mark.parametrize("how", ["abort", "pause"])
@pytest.mark.shows("prefill answers at once: a request that fails afterwards fails at once on decode, {how}")
def test_a_request_that_fails_behind_its_answer_fails_on_decode_at_once(servers: Servers, how: str) -> None:
    """It ends long before ``deadline``, 120 s. Its policy lets decode compute the prompt."""
    body, logged = servers.decode.body(fresh(300), 8), len(servers.decode.logged())
    router = servers.routers["nixl at once"]
    with ThreadPoolExecutor(1) as thread, paused(servers.prefill, "keep" if how == "abort" else "wait"):
        answer = thread.submit(router.ask, COMPLETIONS, body)
        if how == "abort":
            servers.decode.wait_usage(True)
            assert servers.prefill.ask("/abort_requests", {}).status == 200
        began = time.monotonic()
        tokens = answer.result().tokens
        assert time.monotonic() - began < 60
    assert tokens == servers.plain.ask(COMPLETIONS, body).tokens
    assert "prefill did not compute the prompt" in servers.decode.logged()[logged:]
    servers.settled()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.shows("vLLM's own router, {way}: clients that leave")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_clients_that_leave_hold_nothing(servers: Servers, way: str) -> None:
    router = servers.routers[way]
    for count, server in ((300, servers.decode), (300, servers.source(way)), (1, servers.source(way))):
        connection = http.client.HTTPConnection("127.0.0.1", router.port)
        body = {**servers.decode.body(fresh(900), count), "stream": True}
        computed = sum(server.metric(PROMPTS))
        connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
        if server is servers.decode:
            server.wait_usage(True)
        else:  # it holds blocks for moments only
            server.wait_counted(PROMPTS, computed + 1)
        connection.close()
        servers.settled()


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.shows("llm-d: the requests of its sidecar (nixlv2), with prefill that answers at once")
def test_the_sidecar_of_llmd(servers: Servers, lost: int) -> None:
    """Also if prefill's answers are lost: only the state of the last attempt is held."""
    body, before = servers.decode.body(fresh(300), 8), hits(servers.decode)
    logged = len(servers.prefill.logged())
    answer = Sidecar(servers, lost=lost).post(body)
    assert answer.tokens == servers.plain.ask(COMPLETIONS, body).tokens
    servers.decode.wait_counted(f"{HITS}_total", before + 300)
    servers.settled()
    assert "no decode had said a word" not in servers.prefill.logged()[logged:]


@pytest.mark.shows("vLLM's own router: a prefill server that is down, and is started again")
def test_a_prefill_server_that_is_down_and_started_again(servers: Servers, tmp_path: Path) -> None:
    """While it is down, the router fails some requests, and sends the others to the other server."""
    options = [
        *("--retry-max-retries", "3", "--health-check-interval-secs", "1", "--health-failure-threshold", "1"),
        *("--health-success-threshold", "1", "--cb-timeout-duration-secs", "1"),
    ]
    router = Router("nixl", tmp_path, [servers.prefill, servers.plain], servers.decode, *options, key=KEY)

    def ask(count: int) -> list[int]:
        """The statuses of requests. Those that are answered have the right tokens."""
        prompts = [fresh(100) for _ in range(count)]
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda each: router.ask(COMPLETIONS, servers.decode.body(each, 4)), prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            if answer.status == 200:
                assert answer.tokens == servers.plain.complete(prompt, 4).tokens
        return [answer.status for answer in answers]

    try:
        router.wait_ready()
        assert ask(8) == [200] * 8
        servers.prefill.kill()
        assert set(ask(12)) <= {200, 500, 502, 503}
        until = time.monotonic() + 60
        while ask(4) != [200] * 4:
            assert time.monotonic() < until, router.logged()[-4000:]
        before = servers.decode.logged()
        servers.prefill = servers.start("prefill", 0, "kv_producer", "prefill-0", *AT_ONCE, port=servers.prefill.port)
        servers.prefill.wait_ready()
        asked, until = servers.prefill.logged().count("POST /v1/completions"), time.monotonic() + 60
        while servers.prefill.logged().count("POST /v1/completions") < asked + 4:
            assert ask(4) == [200] * 4
            assert time.monotonic() < until, router.logged()[-4000:]
        assert servers.early()
        assert "could not be received" not in servers.decode.logged()[len(before) :]
    finally:
        router.kill()
    servers.settled()


@pytest.mark.shows("prefill answers at once: two ranks of data parallelism behind two API servers")
def test_ranks_of_data_parallelism_behind_several_api_servers(llama: Path, tmp_path: Path) -> None:
    """Each answer names the rank that has the request: with another one, the request fails (``fail``)."""
    config = {"backend": "tcp", "verify": "digest", "liveness": 30.0}
    with running(Fleet(tmp_path, llama, config, internal(*AT_ONCE), one())) as fleet:
        (prefill,), (decode,) = fleet.prefill.servers, fleet.decode.servers
        ways: set[tuple[str, bool]] = set()
        until = time.monotonic() + 120
        while len(ways) < 4:  # each rank, at once and before
            assert time.monotonic() < until, ways
            for rank in (0, 1, None):
                prompt = fresh(90)
                params = prefill.complete(prompt, 1, dict(PREFILL), rank=rank).body["kv_transfer_params"]
                ways.add((params["remote_engine_id"], "transfer_id" in params))
                answer = decode.complete(prompt, 4, params)
                assert answer.status == 200, (params, answer)
                assert answer.tokens == prefill.complete(prompt, 4, rank=0).tokens
        assert {name for name, _ in ways} == {"prefill-0_dp0", "prefill-0_dp1"}
        fleet.settled()
