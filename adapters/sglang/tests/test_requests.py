"""A client's request of any content ends at most that request: real servers of both roles live on and answer the next.

What SGLang itself does not survive, before a request comes to a queue, is listed in docs/sglang.md.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from engine_processes import running
from support.models import generate
from support.requests import FAKE_HOST, PROMPT, WIDTH, assert_alive, drawn, hostile, post_all
from support.servers import Pair

from statelink_sglang.backend import around_decode_add, around_prefill_add

if TYPE_CHECKING:
    from pathlib import Path

ROOM = 1 << 62


class _Request(SimpleNamespace):
    """As much of SGLang's ``Req`` as is looked at."""

    said = ""
    to_finish = finished_reason = None

    def set_finish_with_abort(self, error_msg: str) -> None:
        self.said = error_msg


def _request(logprobs: int = 0, **more: Any) -> _Request:
    given: dict[str, Any] = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": 8998,
        "bootstrap_room": ROOM,
        "logprob": SimpleNamespace(top_logprobs_num=logprobs),
        "return_logprob": logprobs > 0,
    }
    return _Request(**{**given, **more})


def _add(role: str, request: _Request, **more: Any) -> str:
    """Why a queue is told to reject a request; empty if it is not. The queue gets every request, to answer it."""
    queue: Any = SimpleNamespace(
        metadata_buffers=SimpleNamespace(output_top_logprobs_val=SimpleNamespace(shape=(4, WIDTH)))
    )
    got: list[Any] = []
    if role == "prefill":
        around_prefill_add(lambda queue, req, heads: got.append(req), queue, request, 2)
    else:
        around_decode_add(lambda queue, req, **more: got.append(req), queue, request, **more)
    assert got == [request]
    return request.said


BOTH = [
    *((_request(bootstrap_room=room), "the request has the room") for room in (None, 0, -1, 1 << 63, 3.0, "7", [7])),
    (_request(bootstrap_host=FAKE_HOST, bootstrap_room=1 << 63), "the request has the room"),
    (_request(bootstrap_host=FAKE_HOST, bootstrap_room=-1), "the request has the room"),
    (_request(logprobs=WIDTH + 1), "asks for 129 top logprobs, and the row of a request holds 128"),
]
DECODE = [
    *(
        (_request(bootstrap_host=host), "the bootstrap_host")
        for host in (None, "", "a\nb", "x" * 256, 7, ["127.0.0.1"])
    ),
    *((_request(bootstrap_port=port), "the bootstrap_port") for port in (None, 0, -1, 1 << 16, 80.5, [80])),
]
GOOD = [
    _request(),
    _request(bootstrap_room=1),
    _request(bootstrap_room=(1 << 63) - 1),
    _request(bootstrap_host="::1", logprobs=WIDTH),
    _request(bootstrap_host=FAKE_HOST, bootstrap_room=0),
    _request(logprobs=WIDTH + 1, return_logprob=False),
]


@pytest.mark.smoke
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_queue_rejects_what_the_servers_do_not_survive(role: str) -> None:
    for request, said in BOTH if role == "prefill" else [*BOTH, *DECODE]:
        assert said in _add(role, request), request
    assert len(_add(role, _request(bootstrap_room=[7] * 1000))) < 200


@pytest.mark.smoke
def test_a_queue_takes_all_other_requests() -> None:
    for request in GOOD:
        assert not _add("prefill", request)
        assert not _add("decode", request)
    for request, _ in DECODE:  # prefill does not look for itself
        request.said = ""
        assert not _add("prefill", request)


@pytest.mark.smoke
@pytest.mark.parametrize("again", ["is_retracted", "is_rebootstrap"])
def test_a_request_that_comes_back_to_its_queue_is_not_looked_at_again(again: str) -> None:
    """It has memory and tokens by then, and SGLang would answer it with an empty prompt."""
    assert not _add("decode", _request(bootstrap_room=0), **{again: True})


@pytest.mark.smoke
def test_a_request_that_sglang_rejects_keeps_sglangs_reason() -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    assert not _add("decode", _request(bootstrap_room=None, to_finish=FINISH_ABORT("no such session")))


@pytest.fixture(scope="module")
def pair(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    limits = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "10", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "10"}
    common = ["--page-size", "16", "--chunked-prefill-size", "32"]
    folder = tmp_path_factory.mktemp("requests")
    with running(Pair(folder, llama, {"backend": "tcp"}, common=common, environment=limits)) as made:
        yield made


@pytest.mark.servers
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bootstrap_room": 1 << 63}, "the request has the room 9223372036854775808; a number above zero and below"),
        ({"return_logprob": True, "top_logprobs_num": 200}, "the row of a request holds 128"),
    ],
)
def test_a_request_that_is_rejected_has_the_reason_on_both_sides(pair: Pair, fields: dict[str, Any], said: str) -> None:
    for answer in pair.generate(PROMPT, **fields):
        assert answer.status == HTTPStatus.BAD_REQUEST
        assert said in answer.text


@pytest.mark.servers
@pytest.mark.parametrize("host", [None, "", "x" * 300])
def test_a_request_that_does_not_name_prefill_is_rejected_by_decode(pair: Pair, host: Any) -> None:
    answer = pair.decode.ask("/generate", pair.body(PROMPT, bootstrap_host=host))
    assert answer.status == HTTPStatus.BAD_REQUEST
    assert "the name or address of prefill's host is needed" in answer.text
    assert len(answer.text) < 500


@pytest.mark.servers
def test_each_field_may_have_any_value(pair: Pair, llama: Path) -> None:
    answers = post_all(pair, hostile())
    assert all(status for _, _, status, _ in answers)
    assert_alive(pair, functools.partial(generate, llama))
    for server in (pair.prefill, pair.decode):
        assert "asking the bootstrap server" not in server.logged()  # a defect of the adapter, which it has logged


@pytest.mark.servers
@pytest.mark.parametrize("round", range(3))
def test_a_request_may_have_any_fields(pair: Pair, llama: Path, round: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    post_all(pair, drawn(random.Random(seed), 150))
    assert_alive(pair, functools.partial(generate, llama))
