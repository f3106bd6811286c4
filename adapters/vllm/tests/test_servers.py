"""Two real vLLM servers behind a router that hands prefill's answer to decode."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from engine_environments import completion
from engine_processes import running
from support.engines import PREFILL, prompt_of
from support.servers import ServerPair

from statelink import Keys
from statelink.rendezvous import RendezvousServer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers


@pytest.mark.smoke
@pytest.mark.shows("two servers: the tokens of one, dense model, over tcp")
@pytest.mark.parametrize("length", [1, 7, 96, 100, 333])
def test_the_tokens_are_those_of_one_server(pair: ServerPair, length: int) -> None:
    prompt, before = prompt_of(length, length), len(pair.decode.logged())
    answer = pair.route(prompt)
    assert answer.status == 200, answer
    assert answer.tokens == pair.prefill.complete(prompt, 8).tokens
    assert "could not be received" not in pair.decode.logged()[before:]


@pytest.mark.smoke
@pytest.mark.shows("two servers: 64 requests at once")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_64_requests_at_once_get_their_own_tokens(pair: ServerPair) -> None:
    # Of these prompts, the two most likely tokens are never so close that the batch's size decides between them.
    prompts = [prompt_of(3000 + seed, 20 + seed % 61) for seed in range(64)]
    counted = {name: sum(pair.decode.metric(f"vllm:statelink_transfer_{name}_count")) for name in ("seconds", "bytes")}
    logged = len(pair.decode.logged())
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: pair.route(prompt, 4), prompts))
    assert [answer.status for answer in answers] == [200] * len(prompts)
    with ThreadPoolExecutor(8) as threads:
        alone = list(threads.map(lambda prompt: pair.prefill.complete(prompt, 4).tokens, prompts))
    assert [answer.tokens for answer in answers] == alone
    assert "could not be received" not in pair.decode.logged()[logged:]
    pair.settled()
    for name, before in counted.items():
        pair.decode.wait_counted(f"vllm:statelink_transfer_{name}_count", before + len(prompts))


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["prompt", "salt"])
@pytest.mark.shows("two servers: answers of prefill that a router swaps, {kind}")
def test_answers_that_a_router_swaps_are_refused_and_leave_nothing_in_a_cache(pair: ServerPair, kind: str) -> None:
    prompt, other = prompt_of(41, 100), prompt_of(42, 100)
    bodies = [
        completion(pair.prefill.model, prompt, 8),
        {
            "prompt": completion(pair.prefill.model, other, 8),
            "salt": {**completion(pair.prefill.model, prompt, 8), "cache_salt": "another"},
        }[kind],
    ]
    alone = [pair.prefill.ask("/v1/completions", body).tokens for body in bodies]
    said = [
        pair.prefill.ask("/v1/completions", {**body, "max_tokens": 1, "kv_transfer_params": dict(PREFILL)})
        for body in bodies
    ]
    for order in (reversed(said), said):  # the requests that the answers were for still get their state
        for tokens, body, first_answer in zip(alone, bodies, order, strict=True):
            params = first_answer.body["kv_transfer_params"]
            answer = pair.decode.ask("/v1/completions", {**body, "kv_transfer_params": params})
            assert (answer.status, answer.tokens) == (200, tokens), answer
    pair.decode.wait_logged("prefill's answer is for another request")
    for asked in (prompt, other, [*prompt, *prompt_of(43, 40)], [*other, *prompt_of(43, 40)]):
        expected = pair.prefill.complete(asked, 8).tokens
        assert pair.decode.complete(asked, 8).tokens == expected
        assert pair.route(asked).tokens == expected
    pair.settled()


@pytest.mark.shows("two servers: aborts while state is loaded")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_a_client_that_goes_away_while_state_is_loaded_leaves_nothing_behind(pair: ServerPair) -> None:
    prompt = prompt_of(8, 300)
    params = pair.prefill.complete(prompt, 1, dict(PREFILL)).body["kv_transfer_params"]
    pair.prefill.stop()  # so that the state does not come
    try:
        with pair.decode.client(prompt, 8, params):
            pair.decode.wait_usage(True)
        pair.decode.wait_logged("vLLM aborted the request on decode")
    finally:
        pair.prefill.go_on()
    pair.settled()
    other = prompt_of(9, 100)
    assert pair.route(other).tokens == pair.prefill.complete(other, 8).tokens


def keys(own: tuple[bytes, bytes], *allowed: tuple[bytes, bytes]) -> dict[str, Any]:
    """The keys of a server, which speaks with those that have others."""
    return {"secret": own[1].decode(), "allow": [public.decode() for public, _ in allowed]}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.shows("two servers: prefill is killed while state is moved, {policy}")
@pytest.mark.shows("two servers that find each other in a directory, with keys")
def test_servers_of_a_directory_of_which_one_is_killed(llama: Path, tmp_path: Path, policy: str) -> None:
    """Requests wait for state when prefill dies, and others are on their way: every client gets an answer."""
    made = [zmq.curve_keypair() for _ in range(3)]
    own = [keys(each, *made) for each in made]
    config = {"backend": "tcp", "verify": "digest", "heartbeat": 0.5, "liveness": 3.0, "deadline": 25.0}
    with RendezvousServer(keys=Keys(secret=own[2]["secret"], allow=tuple(own[2]["allow"]))) as directory:
        each = [{"rendezvous": directory.address, "keys": keys} for keys in own[:2]]
        servers = ServerPair(tmp_path, llama, config, own=(each[0], each[1]), policy=policy)
        with running(servers) as pair, ThreadPoolExecutor(16) as threads:
            prompts = [prompt_of(5000 + seed, 90 + 7 * seed) for seed in range(13)]
            alone = [pair.prefill.complete(prompt, 4).tokens for prompt in prompts]
            assert pair.route_to_both(prompts[0], 4, "first").tokens == alone[0]
            assert "could not be received" not in pair.decode.logged()
            pair.settled()
            answers = [
                threads.submit(pair.route_to_both, prompt, 4, f"request{number}")
                for number, prompt in enumerate(prompts[1:-1])
            ]
            next(as_completed(answers)).result()
            pair.prefill.stop()
            answers.append(threads.submit(pair.route_to_both, prompts[-1], 4, "last"))
            pair.decode.wait_usage(True)
            pair.prefill.kill()
            lost = 0
            for tokens, asked in zip(alone[1:], answers, strict=True):
                answer = asked.result()
                if answer.status == 200 and answer.body["choices"][0]["finish_reason"] == "length":
                    assert answer.tokens == tokens
                else:
                    lost += 1
            assert (lost > 0) == (policy == "fail")
            assert "could not be received" in pair.decode.logged()
            pair.decode.wait_usage(False)
            assert pair.decode.complete(prompts[2], 4).tokens == alone[2]


@pytest.mark.parametrize(
    ("kind", "backend", "prefill", "decode"),
    [
        ("llama", "nixl", 32, 32),
        ("llama", "mooncake", 32, 32),
        ("windowed", "tcp", 16, 16),
        ("windowed", "tcp", 16, 32),
        ("hybrid", "tcp", 32, 32),
        ("llama", "tcp", 32, 64),
    ],
)
@pytest.mark.two_releases
@pytest.mark.shows("two servers: the tokens of one, {kind}, over {backend}, blocks of {prefill} to blocks of {decode}")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_the_tokens_are_those_of_one_server_for_every(
    kind: str, backend: str, prefill: int, decode: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    config = {"backend": backend, "verify": "digest", "vllm": {"pages": {"CPU_ATTN": "halves"}}}
    sizes = [("--block-size", str(size)) for size in (prefill, decode)]
    servers = ServerPair(tmp_path, request.getfixturevalue(kind), config, prefill=sizes[0], decode=sizes[1])
    with running(servers) as pair:
        for length in (7, 100, 333):
            prompt = prompt_of(length, length)
            answer = pair.route(prompt)
            assert answer.status == 200, answer
            assert answer.tokens == pair.prefill.complete(prompt, 8).tokens
        assert "could not be received" not in pair.decode.logged()
        assert f"Statelink backend '{backend}' moves" in pair.decode.logged()
        pair.settled()
