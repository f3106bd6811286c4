"""Two real servers, and clients that write anything into their requests: such a request ends at most itself."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from support.engines import PREFILL, prompt_of
from support.values import ANYTHING, fields

if TYPE_CHECKING:
    from support.servers import Answer, Server, ServerPair

pytestmark = pytest.mark.servers

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
THREE = {"n": 3, "temperature": 1, "top_k": 1}
"""Three answers, each with the likeliest tokens. vLLM gives only one at a temperature of 0."""
RECEIVE = {"do_remote_prefill": True, "do_remote_decode": False}

INFINITE, NAN = float("inf"), float("nan")
ROOMS: list[Any] = [True, False, 1.0, 0, -1, 2.0**64, INFINITE, -INFINITE, NAN, [7], {}, None]
ROOMS += ["seven", "", "0", "1_0", "+7", " 7", "7\0", "9" * 5000, "x" * 100_000]
IDS: list[Any] = [True, 1.5, INFINITE, NAN, "", [], {}, "x" * 10_000]
CONTENTS: list[Any] = [True, 7, 1.5, INFINITE, "", "0", "xy", "0 0", "00" * 100, [], {}, ["00"]]
PEERS: list[Any] = [None, True, 7, "", "tcp://127.0.0.1:9", [], {}, [None], [7], [[]], [{}], [""]]
PEERS += [
    [f"tcp://{each}"]
    for each in (
        *("127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", f"127.0.0.1:{'9' * 5000}", "127.0.0.1:9\0", "x" * 10_000),
        *("127.0.0.1:0;127.0.0.1:9", "127.0.0.1#.example:9", "10.0.0.9:9", "127.0.0.1:9@short"),
    )
]
PEERS += [["tcp://127.0.0.1:9"] * 10, [f"tcp://127.0.0.1:{1 + port}" for port in range(2000)]]
NO_USE: list[dict[str, Any]] = [
    *({}, {"do_remote_decode": "yes"}, {"do_remote_prefill": 1}, {"do_remote_prefill": [], "other": [None, {}]}),
    *({"room": room} for room in ROOMS),
    *({"room": None, "transfer_id": name} for name in IDS),
    *({"content": content} for content in CONTENTS),
    *({"peer": peer} for peer in PEERS),
]
"""What has no meaning, beside what would have one."""

ODD = [
    '{"do_remote_prefill": true, "do_remote_prefill": null, "room": 7, "room": [], "do_remote_decode": 0}',
    '{"do_remote_prefill": true, "room": 1e999, "peer": ["tcp://127.0.0.1:9"]}',
    '{"do_remote_prefill": true, "room": -0, "peer": ["tcp://127.0.0.1:9"], "": {"": {"": null}}}',
    *(f'{{"room": {"[" * depth}{"]" * depth}, "do_remote_prefill": true}}' for depth in (100, 400, 700, 950)),
    *(f'{{"do_remote_decode": {{"a":{"[" * depth}{"]" * depth}}}}}' for depth in (400, 5_000, 100_000)),
]
"""Fields, as they stand in JSON, that parsers take in different ways, or not at all."""

REFUSED_BY_VLLM = [
    *('"text"', "7", "true", "[]", '[{"do_remote_prefill": true}]', '{"do_remote_prefill": true', "\x00", "nul"),
    *(f'{{"room": {10**30}}}', f'{{"room": {"9" * 5000}}}', '{"room": "\\ud800"}'),
]
"""Fields, as they stand in JSON, that do not get as far as the connector."""


def body_of(server: Server, prompt: list[int], params: str, count: int = 4) -> bytes:
    """The body of a request with any text as its ``kv_transfer_params``."""
    body = server.body(prompt, count, {"here": 0})
    return json.dumps(body).replace('{"here": 0}', params).encode()


def addresses_of(pair: ServerPair) -> list[str]:
    """The addresses of prefill's links."""
    prompt = prompt_of(random.randrange(1 << 30), 40)
    params = pair.route_params(prompt)
    assert pair.decode.complete(prompt, 1, params).status == 200
    addresses: list[str] = params["peer"]
    return addresses


def check(pair: ServerPair) -> None:
    """Check that both servers do what they are there for, and that nothing is left of earlier requests.

    Prefill gives blocks back without a decode after its ``deadline`` of 120 s, which is more than `settled` waits.
    """
    for server in (pair.prefill, pair.decode):
        assert server.ask("/health").status == 200
    prompt = prompt_of(random.randrange(1 << 30), 100)
    counted = sum(pair.decode.metric("vllm:statelink_transfer_bytes_count"))
    answer = pair.route(prompt)
    assert answer.status == 200, answer
    assert answer.tokens == pair.prefill.complete(prompt, 8).tokens
    pair.decode.wait_counted("vllm:statelink_transfer_bytes_count", counted + 1)
    pair.settled()


@pytest.mark.smoke
@pytest.mark.shows("two servers: a request of any content ends at most itself")
def test_what_has_no_meaning_is_computed_and_harms_nobody(pair: ServerPair) -> None:
    peer = addresses_of(pair)
    params = [{**RECEIVE, "room": "7", "peer": peer, **said} if said else {} for said in NO_USE]
    prompts = [prompt_of(6000 + number, 20 + number) for number in range(len(params))]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda n: pair.decode.complete(prompts[n], 4, params[n]), range(len(params))))
        alone = list(threads.map(lambda prompt: pair.prefill.complete(prompt, 4), prompts))
    for said, answer, other in zip(NO_USE, answers, alone, strict=True):
        assert answer.status == 200, (said, answer)
        assert answer.tokens == other.tokens, said
    check(pair)


@pytest.mark.smoke
@pytest.mark.shows("two servers: a request of any content ends at most itself")
def test_prefill_says_why_it_does_not_send(pair: ServerPair) -> None:
    values: list[Any] = [1, "true", [], {}, 1.5, INFINITE]
    said: list[tuple[dict[str, Any], str]] = [({"do_remote_decode": each}, "neither true nor false") for each in values]
    said += [({**PREFILL, "transfer_id": each}, "'transfer_id' is ") for each in IDS]
    for params, why in said:
        answer = pair.prefill.complete(prompt_of(51, 40), 1, params)
        assert answer.status == 200, (params, answer)
        assert why in answer.body["kv_transfer_params"]["refused"]
        assert pair.decode.complete(prompt_of(51, 40), 4, answer.body["kv_transfer_params"]).status == 200
    check(pair)


@pytest.mark.smoke
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.shows("two servers: a request of any content ends at most itself")
def test_what_vllm_refuses_harms_nobody(pair: ServerPair, path: str) -> None:
    for server in (pair.prefill, pair.decode):
        for params in REFUSED_BY_VLLM:
            assert server.ask(path, body_of(server, prompt_of(52, 40), params)).status >= 400, params
        for value in ("text", 7, ["text"]):  # where vLLM itself keeps the field
            body = {**server.body(prompt_of(52, 40), 4), "vllm_xargs": {"kv_transfer_params": value}}
            assert server.ask(path, body).status >= 400, value
    check(pair)


@pytest.mark.smoke
@pytest.mark.shows("two servers: a request of any content ends at most itself")
def test_odd_json_harms_nobody(pair: ServerPair) -> None:
    """vLLM takes what is nested hundreds of times as far as its engine. What goes to its workers must not have it."""
    for params in ODD:
        for server in (pair.prefill, pair.decode):
            answer = server.ask(COMPLETIONS, body_of(server, prompt_of(57, 40), params))
            assert answer.status in (200, 400, 500), answer
            assert server.ask("/health").status == 200, params[:100]
    check(pair)


@pytest.mark.smoke
@pytest.mark.shows("two servers: prefill and decode wanted of one server")
def test_a_role_that_does_not_send_says_so(pair: ServerPair) -> None:
    prompt = prompt_of(53, 70)
    answer = pair.decode.complete(prompt, 4, {**pair.route_params(prompt), "do_remote_decode": True})
    assert answer.tokens == pair.prefill.complete(prompt, 4).tokens
    assert "kv_role 'kv_consumer'" in answer.body["kv_transfer_params"]["refused"]
    other = prompt_of(54, 70)
    params = {**pair.route_params(other), "do_remote_decode": True}
    answer = pair.prefill.complete(other, 1, params)
    assert answer.body["kv_transfer_params"]["do_remote_prefill"] is True  # it computes the prompt, and sends it on
    pair.prefill.wait_logged("kv_role 'kv_producer' receives nothing")
    for each in (params, answer.body["kv_transfer_params"]):
        assert pair.decode.complete(other, 4, {**each, "do_remote_decode": False}).status == 200
    check(pair)


@pytest.mark.smoke
@pytest.mark.shows("two servers: several answers, lists of prompts")
def test_several_answers_to_a_prompt_leave_nothing_behind(pair: ServerPair) -> None:
    """vLLM answers with the parameters of one of them."""
    prompt, before = prompt_of(55, 90), len(pair.decode.logged())
    first = pair.prefill.ask(COMPLETIONS, {**pair.prefill.body(prompt, 1, dict(PREFILL)), **THREE})
    answer = pair.decode.ask(COMPLETIONS, {**pair.decode.body(prompt, 4, first.body["kv_transfer_params"]), **THREE})
    assert tokens_of(answer) == [pair.prefill.complete(prompt, 4).tokens] * 3
    assert "cannot be received" not in pair.decode.logged()[before:]
    check(pair)


@pytest.mark.smoke
@pytest.mark.shows("two servers: several answers, lists of prompts")
def test_a_list_of_prompts_leaves_nothing_behind(pair: ServerPair) -> None:
    """vLLM answers with the parameters of the first, and decode computes the others."""
    prompts, before = [prompt_of(560 + number, 90) for number in range(3)], len(pair.decode.logged())
    first = pair.prefill.ask(COMPLETIONS, {**pair.prefill.body([], 1, dict(PREFILL)), "prompt": prompts})
    body = pair.decode.body([], 4, first.body["kv_transfer_params"])
    answer = pair.decode.ask(COMPLETIONS, {**body, "prompt": prompts})
    assert tokens_of(answer) == [pair.prefill.complete(prompt, 4).tokens for prompt in prompts]
    assert "cannot be received" not in pair.decode.logged()[before:]
    check(pair)


@pytest.mark.smoke
@pytest.mark.shows("two servers: several answers, lists of prompts")
def test_each_prompt_of_a_list_is_moved_where_a_router_sends_it_to_both(pair: ServerPair) -> None:
    """They are of equal length, and prefill has them ready in another order: none may get the state of another."""
    prompts = [prompt_of(570 + number, 90) for number in range(4)]
    pair.prefill.complete(prompts[3], 1)  # so that it is ready before the others
    peer = addresses_of(pair)
    counted = sum(pair.decode.metric("vllm:statelink_transfer_bytes_count"))
    asked = {**pair.prefill.body([], 1, {**PREFILL, "transfer_id": "list"}), "prompt": prompts}
    sent = {**pair.decode.body([], 4, {**RECEIVE, "transfer_id": "list", "peer": peer}), "prompt": prompts}
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(pair.prefill.ask, COMPLETIONS, asked)
        answer = pair.decode.ask(COMPLETIONS, sent)
        assert first.result().status == 200
    assert tokens_of(answer) == [pair.prefill.complete(prompt, 4).tokens for prompt in prompts]
    pair.decode.wait_counted("vllm:statelink_transfer_bytes_count", counted + len(prompts))


@pytest.mark.smoke
@pytest.mark.shows("two servers: an answer of prefill that decode gets twice")
def test_an_answer_that_decode_gets_twice_is_taken_once(pair: ServerPair) -> None:
    prompt, before = prompt_of(58, 90), len(pair.decode.logged())
    params = pair.route_params(prompt)
    pair.prefill.stop()  # so that the first one waits
    try:
        with ThreadPoolExecutor(1) as thread:
            first = thread.submit(pair.decode.complete, prompt, 4, params)
            pair.decode.wait_usage(True)
            second = pair.decode.complete(prompt, 4, params)
            pair.prefill.go_on()
            assert first.result().tokens == second.tokens == pair.prefill.complete(prompt, 4).tokens
    finally:
        pair.prefill.go_on()
    lines = [line for line in pair.decode.logged()[before:].splitlines() if "cannot be received" in line]
    assert lines
    assert all("WARNING" in line and "room.in_use" in line for line in lines)
    check(pair)


@pytest.mark.smoke
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.shows("two servers: a request of any content ends at most itself")
def test_prefill_keeps_the_state_for_the_request_with_its_cache_salt(pair: ServerPair, path: str) -> None:
    """Decode takes the answer for another request's where the salt is missing, and does not end that request."""
    prompt, expected = PROMPTS[2], pair.prefill.complete(PROMPTS[2], 4).tokens
    salted = {**pair.prefill.body(prompt, 1, dict(PREFILL)), **THREE, "cache_salt": "one"}
    if path == CHAT:
        salted["messages"] = [{"role": "user", "content": " ".join(f"t{token}" for token in salted.pop("prompt"))}]
    params = pair.prefill.ask(path, salted).body["kv_transfer_params"]
    before = len(pair.decode.logged())
    assert pair.decode.complete(prompt, 4, params).tokens == expected
    assert "prefill's answer is for another request" in pair.decode.logged()[before:]
    counted = sum(pair.decode.metric("vllm:statelink_transfer_bytes_count"))
    assert pair.decode.ask(COMPLETIONS, {**pair.decode.body(prompt, 4, params), "cache_salt": "one"}).tokens == expected
    pair.decode.wait_counted("vllm:statelink_transfer_bytes_count", counted + 1)
    check(pair)


def tokens_of(answer: Answer) -> list[list[int]]:
    assert answer.status == 200, answer
    return [choice["token_ids"] for choice in answer.body["choices"]]


PROMPTS = [prompt_of(7000 + length, length) for length in (1, 5, 33, 70)]
TEXT = " ".join(f"t{token}" for token in PROMPTS[2])
SHAPES = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(PROMPTS) | st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=3) | st.just(TEXT),
        "max_tokens": st.integers(1, 4),
    },
    optional={
        "n": st.integers(1, 3),
        "echo": st.booleans(),
        "stream": st.booleans(),
        "logprobs": st.just(1),
        "prompt_logprobs": st.just(1),
        "cache_salt": st.sampled_from(["one", "other"]),
        "request_id": st.sampled_from(["1_cmpl-a-1-01234567", "cmpl-a-7", "own"]),
        "vllm_xargs": st.builds(lambda value: {"kv_transfer_params": value}, st.sampled_from(["", "x", 0, 7, ["x"]])),
    },
)


@pytest.mark.shows("two servers: a request of any content ends at most itself")
def test_a_request_of_any_content_ends_at_most_itself(pair: ServerPair) -> None:
    """Whatever is answered with tokens has the right ones, and what prefill answers is good for decode."""
    peer = addresses_of(pair)
    peers = st.just(peer) | st.lists(st.sampled_from([*peer, "tcp://127.0.0.1:9", "tcp://127.0.0.1:0;127.0.0.1:9"]))
    alone = {len(prompt): pair.prefill.complete(prompt, 4).tokens for prompt in PROMPTS}

    @given(fields(peers) | ANYTHING, SHAPES, st.sampled_from([COMPLETIONS, CHAT]), st.booleans())
    @settings(
        max_examples=150, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None
    )
    def ask(params: Any, shape: dict[str, Any], path: str, prefill: bool) -> None:
        assert pair.prefill.running
        assert pair.decode.running
        several = isinstance(shape["prompt"], list) and isinstance(shape["prompt"][0], list)
        if prefill and several and isinstance(params, dict):
            assume(params.get("transfer_id") is None)  # only a router that asks both at once would fetch the others
        server = pair.prefill if prefill else pair.decode
        body = {**server.body([], 1), "temperature": 1, "top_k": 1, **shape, "kv_transfer_params": params}
        if path == CHAT:
            body = {**body, "messages": [{"role": "user", "content": TEXT}], "logprobs": "logprobs" in shape}
            body.pop("prompt"), body.pop("echo", None)
        try:
            answer = server.ask(path, body, timeout=3 if not prefill else 60)
        except OSError:  # it waits for state under an id that prefill does not know, and its client goes away
            assert not prefill
            assert server.ask("/health").status == 200
            return
        assert answer.status < 500 or "vllm_xargs" in shape or "\\ud" in json.dumps(params), answer
        if answer.status == 200:
            handed_on(pair, answer, TEXT if path == CHAT else shape["prompt"], alone, body)

    ask()
    check(pair)


def handed_on(
    pair: ServerPair, answer: Answer, prompt: Any, alone: dict[int, list[int]], asked: dict[str, Any]
) -> None:
    """Check the tokens, and hand what prefill answered to decode, with all that says which request was asked for.

    A cache salt does: decode takes prefill's answer to a request with another salt for another request's. It must not
    end that request, so prefill would hold its blocks until its ``deadline``.
    """
    if isinstance(answer.body, str):  # a stream
        chunks = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith("data: {")]
        found = [each.get("kv_transfer_params") for each in chunks]
    else:
        chunks, found = [], [answer.body.get("kv_transfer_params")]
    first = PROMPTS[2] if isinstance(prompt, str) else prompt[0] if isinstance(prompt[0], list) else prompt
    expected = alone[len(first)]
    if not chunks and not asked.get("echo"):
        tokens = answer.body["choices"][0]["token_ids"]
        assert tokens == expected[: len(tokens)]
    for params in {json.dumps(each): each for each in found if each and each["do_remote_prefill"]}.values():
        salt = {"cache_salt": asked["cache_salt"]} if "cache_salt" in asked else {}
        assert pair.decode.ask(COMPLETIONS, {**pair.decode.body(first, 4, params), **salt}).tokens == expected
