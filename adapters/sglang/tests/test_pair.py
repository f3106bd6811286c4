"""Two real SGLang servers, one for prefill and one for decode, over tcp: pages of 16 tokens, chunks of 32.

The tests of this file share the servers, and run in the order in which they stand here: the last ones end servers.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from engine_processes import free_port, running
from support.models import generate, log_probabilities, prompt_of
from support.servers import Pair, Posted, Server

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def pair(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    with running(
        Pair(
            folder,
            llama,
            {"backend": "tcp", "verify": "digest"},
            common=["--page-size", "16", "--chunked-prefill-size", "32"],
            decode=["--disaggregation-decode-enable-radix-cache"],
        )
    ) as pair:
        yield pair


def _says(answer: Any, text: str) -> None:
    assert text in answer.text.replace("\\n", "\n"), answer


@pytest.mark.smoke
@pytest.mark.parametrize("length", [1, 16, 40, 100])
def test_the_tokens_are_those_of_transformers(pair: Pair, llama: Path, length: int) -> None:
    prompt = prompt_of(length, length)
    first, second = pair.generate(prompt)
    expected = generate(llama, prompt, 8)
    assert first.tokens == expected[:1]
    assert second.tokens == expected


@pytest.mark.smoke
def test_a_prefix_that_decode_holds_is_not_moved_again(pair: Pair, llama: Path) -> None:
    prompt = prompt_of(1, 100)
    pair.generate(prompt)
    longer = [*prompt, *prompt_of(2, 30)]
    _, second = pair.generate(longer)
    assert second.tokens == generate(llama, longer, 8)
    assert second.body["meta_info"]["cached_tokens"] >= 96


def _differ(pair: Pair, first: dict[str, Any], second: dict[str, Any]) -> None:
    """Give the two servers different requests under one room: both answer with an error that says so."""
    room = {"bootstrap_room": random.SystemRandom().randrange(1, 1 << 63)}
    posted = Posted(pair.prefill, {**first, **room}), Posted(pair.decode, {**second, **room})
    for each in posted:
        assert each.answer().status == 500, each.answer()
        _says(each.answer(), "the two sides hold different requests")


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["prompt", "salt"])
def test_different_requests_under_one_room_fail_and_leave_no_trace(pair: Pair, llama: Path, kind: str) -> None:
    prompt, other = prompt_of(31, 60), prompt_of(32, 60)
    right = pair.body(prompt)
    wrong = {"prompt": pair.body(other), "salt": pair.body(prompt, cache_salt="another")}[kind]
    for _ in range(2):
        _differ(pair, wrong, right)
        _differ(pair, right, wrong)
    for asked in (prompt, other, [*prompt, *prompt_of(33, 30)], [*other, *prompt_of(33, 30)]):
        assert pair.generate(asked)[1].tokens == generate(llama, asked, 8)


def test_a_router_that_swaps_two_rooms_gets_two_errors(pair: Pair, llama: Path) -> None:
    bodies = [pair.body(prompt_of(seed, 50)) for seed in (34, 35)]
    rooms = [{"bootstrap_room": each["bootstrap_room"]} for each in bodies]
    posted = [Posted(pair.prefill, each) for each in bodies]
    posted += [Posted(pair.decode, {**each, **room}) for each, room in zip(bodies, reversed(rooms), strict=True)]
    for each in posted:
        assert each.answer().status == 500, each.answer()
        _says(each.answer(), "the two sides hold different requests")
    for seed in (34, 35):
        assert pair.generate(prompt_of(seed, 50))[1].tokens == generate(llama, prompt_of(seed, 50), 8)


def test_the_same_salt_on_both_servers_goes_through(pair: Pair, llama: Path) -> None:
    prompt = prompt_of(36, 70)
    assert pair.generate(prompt, cache_salt="tenant 7")[1].tokens == generate(llama, prompt, 8)


def test_64_requests_at_once_get_their_own_tokens(pair: Pair, llama: Path) -> None:
    prompts = [prompt_of(seed, 20 + seed % 41) for seed in range(64)]
    bodies = [pair.body(prompt, 4) for prompt in prompts]
    posted = [(Posted(pair.prefill, body), Posted(pair.decode, body)) for body in bodies]
    answers = [second.answer() for _, second in posted]
    assert [answer.status for answer in answers] == [200] * len(prompts)
    wrong = [
        number
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        if answer.tokens != generate(llama, prompt, 4)
    ]
    assert wrong == []


@pytest.mark.smoke
@pytest.mark.parametrize("samples", [2, 5])
def test_every_sample_of_a_request_has_its_tokens(pair: Pair, llama: Path, samples: int) -> None:
    prompt = prompt_of(37 + samples, 70)
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, "n": samples}
    for _ in range(2):
        first, second = pair.generate(prompt, sampling_params=params)
        assert (first.status, second.status) == (200, 200), (first, second)
        assert [each["output_ids"] for each in second.body] == [generate(llama, prompt, 8)] * samples


def test_samples_of_a_batch_have_the_tokens_of_their_prompts(pair: Pair, llama: Path) -> None:
    prompts = [prompt_of(seed, 20 + seed) for seed in (41, 42)]
    params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True, "n": 2}
    batch = {"input_ids": prompts, "sampling_params": params, "return_logprob": True}
    _, second = pair.generate(prompts[0], **batch)
    assert second.status == 200, second
    assert [each["output_ids"] for each in second.body] == [generate(llama, each, 6) for each in prompts for _ in "ab"]
    assert all(len(each["meta_info"]["output_token_logprobs"]) == 6 for each in second.body)


def test_given_tokens_have_log_probabilities_but_none_at_the_first_token(pair: Pair, llama: Path) -> None:
    """SGLang's metadata row has no place for them. In their place, 0.5.23 says None, and older ones nothing."""
    prompt, given = prompt_of(43, 50), [5, 9]
    tokens = generate(llama, prompt, 6)
    _, second = pair.generate(prompt, 6, return_logprob=True, token_ids_logprob=given)
    known = second.body["meta_info"]
    said = [each[0] for each in known["output_token_logprobs"]]
    assert said == pytest.approx(log_probabilities(llama, prompt, tokens), abs=1e-3)
    told = known["output_token_ids_logprobs"]
    assert told[:-5] in ([], [None])
    for number, each in zip(range(1, 6), told[-5:], strict=True):
        before = [*prompt, *tokens[:number]]
        assert [token for _, token, _ in each] == given
        right = [log_probabilities(llama, before, [token])[0] for token in given]
        assert [value for value, *_ in each] == pytest.approx(right, abs=1e-3)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_abort_ends_a_request_that_waits_for_the_other_side(pair: Pair, llama: Path, role: str) -> None:
    server: Server = getattr(pair, role)
    posted = Posted(server, pair.body(prompt_of(3, 50), rid=f"aborted-on-{role}"))
    # The request has to be in the queue before it can be aborted: an abort of an unknown request does nothing.
    for _ in range(100):
        server.ask("/abort_request", {"rid": f"aborted-on-{role}"})
        if posted.answered(0.3):
            break
    assert posted.answer().status in (200, 400, 500, 503)
    _says(posted.answer(), "bort")
    assert pair.generate(prompt_of(4, 50))[1].tokens == generate(llama, prompt_of(4, 50), 8)


def test_aborts_at_any_moment_leave_both_servers_whole(pair: Pair, llama: Path) -> None:
    """SGLang ends a server that is idle and lacks a page, a slot or a metadata row."""
    draw = random.Random(11)
    posted = []
    for number in range(60):
        rid = f"storm-{number}"
        body = pair.body(prompt_of(1000 + number, draw.randrange(10, 400)), draw.randrange(1, 20), rid=rid)
        posted.append((Posted(pair.prefill, body), Posted(pair.decode, body)))
        if number % 4 != 3:
            victim = draw.choice(["prefill", "decode"])
            delay = draw.choice([0.0, 0.05, 0.3, 1.0])
            threading.Timer(delay, getattr(pair, victim).ask, ["/abort_request", {"rid": rid}]).start()
        time.sleep(draw.choice([0.0, 0.0, 0.1]))
    for first, second in posted:
        for each in (first, second):
            assert each.answer(120).status in (200, 400, 500, 503)
    for seed in range(8):
        prompt = prompt_of(2000 + seed, 60)
        assert pair.generate(prompt)[1].tokens == generate(llama, prompt, 8)
    assert pair.prefill.running
    assert pair.decode.running


def test_a_request_that_was_retracted_for_new_weights_is_computed_anew(pair: Pair, llama: Path) -> None:
    prompt, count = prompt_of(13, 40), 200
    expected = generate(llama, prompt, count)
    before = pair.prefill.logged().count("POST /generate")
    body = pair.body(prompt, count)
    Posted(pair.prefill, body)
    answer = Posted(pair.decode, body)
    for _ in range(1000):  # pausing takes effect only while the request runs
        pair.decode.tell("/pause_generation", mode="retract")
        pair.decode.tell("/continue_generation")
        if answer.answered(0.2) or pair.prefill.logged().count("POST /generate") > before + 1:
            break
    assert answer.answer().tokens == expected
    assert pair.prefill.logged().count("POST /generate") > before + 1


def test_memory_that_sglang_releases_and_takes_back(pair: Pair, llama: Path) -> None:
    prompt = prompt_of(14, 100)
    for roles in (["prefill"], ["decode"], ["prefill", "decode"]):
        servers = [getattr(pair, role) for role in roles]
        for path in ("/release_memory_occupation", "/resume_memory_occupation"):
            for server in servers:
                server.tell(path, tags=["kv_cache"])
        assert pair.generate(prompt)[1].tokens == generate(llama, prompt, 8)


@pytest.mark.smoke
def test_a_room_of_zero_fails_the_request_and_not_the_servers(pair: Pair, llama: Path) -> None:
    first, second = pair.generate(prompt_of(5, 20), bootstrap_room=0)
    for answer in (first, second):
        assert answer.status == 400
        _says(answer, "the request has the room 0; a number above zero and below 2^63 is needed")
    assert pair.generate(prompt_of(6, 50))[1].tokens == generate(llama, prompt_of(6, 50), 8)


def test_a_prefill_that_is_not_there_fails_the_request_with_the_reason(pair: Pair) -> None:
    body = pair.body(prompt_of(7, 20), bootstrap_port=free_port())
    _says(Posted(pair.decode, body).answer(), "is not known: [Errno 111] Connection refused")
    assert "is not known: [Errno 111] Connection refused" in pair.decode.logged()


@pytest.mark.smoke
def test_the_log_says_that_statelink_carries_the_bytes(pair: Pair) -> None:
    for server in (pair.prefill, pair.decode):
        assert "Statelink backend 'tcp' moves kv, aux of this" in server.logged()


def test_decode_lives_when_prefill_is_killed_and_started_again(pair: Pair, llama: Path) -> None:
    waits = Posted(pair.decode, pair.body(prompt_of(8, 50)))
    assert not waits.answered(2.0)
    pair.prefill.kill()
    _says(waits.answer(90), "Statelink could not move the state of room")
    pair.prefill = pair.start("prefill")
    pair.prefill.wait_ready()
    prompt = prompt_of(9, 100)
    assert pair.generate(prompt)[1].tokens == generate(llama, prompt, 8)
    assert pair.decode.running


def test_prefill_lives_when_decode_is_killed_and_started_again(pair: Pair, llama: Path) -> None:
    pair.decode.kill()
    pair.decode = pair.start("decode")
    pair.decode.wait_ready()
    prompt = prompt_of(10, 100)
    assert pair.generate(prompt)[1].tokens == generate(llama, prompt, 8)
    assert pair.prefill.running
