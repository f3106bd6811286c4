"""Requests of any content, as clients may post them to SGLang's servers, and whether the servers survive them."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from engine_processes import ANSWER_SECONDS

if TYPE_CHECKING:
    from .servers import Pair, Server

GENERATE, COMPLETIONS = "/generate", "/v1/completions"
FAKE_HOST = "2.2.2.2"
"""The host for which SGLang moves no state. Its own checks of its health name it."""
WIDTH = 128
"""Top logprobs that a metadata row holds."""
PROMPT = list(range(5, 45))


class ClientRequest(NamedTuple):
    """One request to both servers.

    Attributes:
        path: Of the URL.
        fields: What differs from an ordinary request. A field that is `ABSENT` is left out.
        to: The servers.
    """

    path: str
    fields: dict[str, Any]
    to: tuple[str, ...] = ("prefill", "decode")


ABSENT: Any = object()

HOSTS: list[Any] = [None, "", " ", "a\nb\x00c", "x" * 100_000, "例え.invalid", "::", "[", "127.0.0.1/x?", ABSENT]
PORTS: list[Any] = [0, -1, 70_000, 1 << 40, -(1 << 63), None]
ROOMS: list[Any] = [None, 0, -1, -(1 << 63), 1 << 63, (1 << 64) - 1, 1 << 64, 1 << 200, ABSENT]
KINDS: list[Any] = [
    *(None, True, False, 3.5, 3.0, 1e300, float("nan"), "77", "abc", "", "\ud800", {"a": 1}),
    *([], [7], [7, 7], ["127.0.0.1"], [None], [[1]], [7] * 100_000),
]
"""Values of every JSON type, each of which is of the wrong type somewhere."""
RANKS: list[Any] = [-1, 1, 4096, 1 << 62, 1 << 70]


def hostile() -> list[ClientRequest]:
    """The requests that are always tried: each value in its own place."""
    places: dict[str, list[Any]] = {
        "bootstrap_host": [*HOSTS, *KINDS],
        "bootstrap_port": [*PORTS, *KINDS],
        "bootstrap_room": [*ROOMS, *KINDS],
        "disagg_prefill_dp_rank": [*RANKS, *KINDS],
        "routed_dp_rank": [*RANKS, *KINDS],
        "data_parallel_rank": RANKS,
        "bootstrap_pair_key": KINDS,
        "decode_tp_size": KINDS,
    }
    one = [
        ClientRequest(path, {name: value})
        for path in (GENERATE, COMPLETIONS)
        for name in places
        for value in places[name]
    ]
    return [*deadly(), *one, *_others()]


def deadly() -> list[ClientRequest]:
    """Requests that end a server, or fail with a riddle, if its queue takes them. Each is answered at once."""
    logprobs = {"return_logprob": True, "top_logprobs_num": WIDTH + 1}
    return [
        ClientRequest(GENERATE, {"bootstrap_host": None}, ("decode",)),
        ClientRequest(GENERATE, {"bootstrap_host": ["127.0.0.1"]}, ("decode",)),
        ClientRequest(GENERATE, {"bootstrap_room": 1 << 63}),
        ClientRequest(GENERATE, {"bootstrap_host": FAKE_HOST, "bootstrap_room": 1 << 63}),
        ClientRequest(GENERATE, {"bootstrap_host": FAKE_HOST, "bootstrap_room": -1}),
        ClientRequest(GENERATE, logprobs),
        ClientRequest(GENERATE, {"bootstrap_host": FAKE_HOST, **logprobs}),
        ClientRequest(COMPLETIONS, {"bootstrap_host": None}, ("decode",)),
        ClientRequest(COMPLETIONS, {"bootstrap_room": (1 << 64) - 1}),
    ]


def _others() -> Iterator[ClientRequest]:
    yield ClientRequest(GENERATE, {"sampling_params": {"n": 2, "max_new_tokens": 2}})
    batch = {"input_ids": [PROMPT, PROMPT[1:]]}
    yield ClientRequest(GENERATE, batch)
    for name, values in (("bootstrap_room", [[1 << 63, 5], [5, 5], [None, 6]]), ("bootstrap_host", [[None, ""]])):
        for value in values:
            yield ClientRequest(GENERATE, {**batch, name: value})
    yield ClientRequest(
        GENERATE, {"sampling_params": {"max_new_tokens": 2, "custom_params": {"statelink_first_token": []}}}
    )
    yield ClientRequest(GENERATE, {"return_logprob": True, "top_logprobs_num": WIDTH})
    yield ClientRequest(GENERATE, {"input_ids": PROMPT[:1]}, ("prefill",))
    for role in ("prefill", "decode"):
        yield ClientRequest(GENERATE, {}, (role,))


def drawn(draw: random.Random, count: int) -> Iterator[ClientRequest]:
    """Requests with several wrong fields at once."""
    pools: dict[str, list[Any]] = {
        "bootstrap_host": [*HOSTS, *KINDS, FAKE_HOST, "127.0.0.1"],
        "bootstrap_port": [*PORTS, *KINDS],
        "bootstrap_room": [*ROOMS, *KINDS],
        "disagg_prefill_dp_rank": [*RANKS, *KINDS, 0],
        "routed_dp_rank": [*RANKS, *KINDS, 0],
        "top_logprobs_num": [0, WIDTH, WIDTH + 1, 1000],
        "return_logprob": [True],
        "stream": [True],
    }
    for _ in range(count):
        names = draw.sample(list(pools), draw.randrange(1, 5))
        to = draw.choice([("prefill", "decode")] * 3 + [("prefill",), ("decode",)])
        yield ClientRequest(
            draw.choice([GENERATE, GENERATE, COMPLETIONS]), {n: draw.choice(pools[n]) for n in names}, to
        )


def post_all(
    pair: Pair, requests: Iterable[ClientRequest], at_once: int = 64
) -> list[tuple[ClientRequest, str, int, str]]:
    """Post requests, some of them at once. What each server answered: the request, the server, status and text."""
    with ThreadPoolExecutor(2 * at_once) as pool:
        found = [
            (each, role, pool.submit(post, getattr(pair, role), each.path, body))
            for each in requests
            for body in [_body(pair, each)]
            for role in each.to
        ]
        return [(each, role, *answer.result()) for each, role, answer in found]


def _body(pair: Pair, request: ClientRequest) -> dict[str, Any]:
    body = pair.body(PROMPT, 2)
    if request.path == COMPLETIONS:
        body["prompt"] = body.pop("input_ids")
        body.update(body.pop("sampling_params"), model="any", max_tokens=2)
    return {name: value for name, value in {**body, **request.fields}.items() if value is not ABSENT}


def post(server: Server, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """The status and the text of an answer, also one that comes as a stream.

    Raises:
        OSError: The server does not answer.
    """
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_SECONDS)
    try:
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def assert_alive(pair: Pair, expected: Callable[[list[int], int], list[int]]) -> None:
    """Both servers answer at ``/health``, and move an ordinary request."""
    for server in (pair.prefill, pair.decode):
        assert server.running, server.logged()[-6000:]
        assert server.ask("/health").status == 200
    prompt = random.choices(range(4, 512), k=70)
    prefill, decode = pair.generate(prompt, 5)
    assert prefill.status == decode.status == 200, (prefill, decode)
    assert decode.tokens == expected(prompt, 5)
