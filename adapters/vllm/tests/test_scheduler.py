"""vLLM's own scheduler, and requests with odd ``kv_transfer_params``, of lists of prompts and with several answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.engines import PREFILL
from support.simulated_engine import SimulatedEngine, tokens_of
from support.simulated_pair import STREAMS, SimulatedPair, pair_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.smoke

PROMPT = STREAMS[0][:20]


def pair_for(configuration: Path, *kinds: str) -> SimulatedPair:
    return pair_of(configuration, kinds or ("full",), blocks=(4, 4), spare=(30, 30))


def answers(engine: SimulatedEngine, *names: str) -> list[Any]:
    """What a router gets, when the engine has computed these requests."""
    for _ in range(40):
        engine.step()
    return [engine.ended[name].params for name in names]


@pytest.mark.parametrize("said", ["text", "", 7, 0, True, False, ["x"], []])
def test_what_is_no_object_is_a_request_without_wishes(configuration: Path, said: Any) -> None:
    engine = pair_for(configuration).engines[0]
    engine.add("r", PROMPT, 4, said)
    (answer,) = answers(engine, "r")
    assert engine.ended["r"].tokens == tokens_of(PROMPT, 4)
    assert "no object" in answer["refused"]
    engine.check_settled()


def test_workers_get_none_of_it(configuration: Path) -> None:
    """Somebody else may hold what the client wrote, such as another answer to the same prompt. It stays as it is."""
    engine = pair_for(configuration).engines[0]
    said = {**PREFILL, "often": [[[[]]]]}
    engine.add("r", PROMPT, 1, said)
    (new,) = engine.scheduler.schedule().scheduled_new_reqs
    assert not new.sampling_params.extra_args
    assert said == {**PREFILL, "often": [[[[]]]]}


def test_the_first_of_several_answers_sends_and_all_say_the_same(configuration: Path) -> None:
    pair = pair_for(configuration)
    names = [f"{number}_cmpl-a-0-0123abcd" for number in range(3)]
    for name in names:
        pair.engines[0].add(name, PROMPT, 1, PREFILL)
    first, *others = answers(pair.engines[0], *names)
    assert [each["room"] for each in others] == [first["room"]] * 2
    assert [str(room.room) for room in pair.network.rooms["send"]] == [first["room"]]
    said = dict(first)
    for name in names:
        pair.engines[1].add(name, PROMPT, 4, first)
    pair.settle()
    assert first == said
    assert [pair.engines[1].ended[name].tokens for name in names] == [tokens_of(PROMPT, 4)] * 3
    assert len(pair.network.rooms["receive"]) == 1


def test_the_first_of_a_list_of_prompts_is_sent(configuration: Path) -> None:
    pair = pair_for(configuration)
    names = [f"cmpl-a-{number}-0123abcd" for number in range(3)]
    prompts = [STREAMS[number % 2][: 20 - number] for number in range(3)]
    for name, prompt in zip(names, prompts, strict=True):
        pair.engines[0].add(name, prompt, 1, PREFILL)
    first, *others = answers(pair.engines[0], *names)
    assert all("not the first of a list" in each["refused"] for each in others)
    assert [str(room.room) for room in pair.network.rooms["send"]] == [first["room"]]
    for name, prompt in zip(names, prompts, strict=True):
        pair.engines[1].add(name, prompt, 4, first)
    pair.settle()
    found = [pair.engines[1].ended[name].tokens for name in names]
    assert found == [tokens_of(prompt, 4) for prompt in prompts]


@pytest.mark.parametrize("kind", ["full", "recurrent"])
@pytest.mark.parametrize("once", [False, True])
def test_of_a_request_that_a_router_sends_again_only_the_last_state_is_held(
    configuration: Path, kind: str, once: bool
) -> None:
    """The first answer was lost, also if prefill's server gave it at once. Nobody asks for its state, and
    another client's request is no repetition of it.
    """
    pair = pair_for(configuration, "full", kind) if kind != "full" else pair_for(configuration)
    first, again, other, another = "cmpl-a-0-0123abcd", "cmpl-a-0-89abcdef", "cmpl-b-0-01234567", "cmpl-a-0-76543210"
    prefill, decode = pair.engines
    asked = {name: {**PREFILL, "transfer_id": name, "once": True} for name in (first, again, other, another) if once}
    prefill.add(first, PROMPT, 1, asked.get(first, PREFILL))
    answers(prefill, first)
    for name, prompt in ((again, PROMPT), (other, PROMPT), (another, STREAMS[1][: len(PROMPT)])):
        prefill.add(name, prompt, 1, asked.get(name, PREFILL))
    given = answers(prefill, again, other, another)
    held = [room for room in pair.network.rooms["send"] if not room.given_up]
    assert {str(room.room) for room in held} == {each["room"] for each in given}
    assert len(held) == len(given)
    prompts = (PROMPT, PROMPT, STREAMS[1][: len(PROMPT)])
    for name, prompt, params in zip((again, other, another), prompts, given, strict=True):
        decode.add(name, prompt, 4, params)
    pair.settle()
    for name, prompt in zip((again, other, another), prompts, strict=True):
        assert decode.ended[name].tokens == tokens_of(prompt, 4)
    assert len(pair.network.rooms["receive"]) == 3


@pytest.mark.parametrize("spare", [30, 0], ids=["asked for", "asked to keep"])
def test_a_state_that_decode_has_claimed_is_not_given_up(configuration: Path, spare: int) -> None:
    """A client uses one id for two requests of one prompt, and both are served."""
    pair = pair_of(configuration, ("full",), blocks=(4, 4), spare=(30, spare))
    prefill, decode = pair.engines
    if not spare:  # a request of another client has the blocks
        decode.add("other", STREAMS[1][:36], 4, None)
        decode.step()
    names = "cmpl-a-0-0123abcd", "cmpl-a-0-89abcdef"
    prefill.add(names[0], PROMPT, 1, PREFILL)
    decode.add(names[0], PROMPT, 4, *answers(prefill, names[0]))
    decode.step()
    assert bool(pair.network.rooms["receive"]) is not bool(pair.network.kept)
    prefill.add(names[1], PROMPT, 1, PREFILL)
    (given,) = answers(prefill, names[1])
    assert not any(room.given_up for room in pair.network.rooms["send"])
    decode.add(names[1], PROMPT, 4, given)
    pair.settle()
    assert [decode.ended[name].tokens for name in names] == [tokens_of(PROMPT, 4)] * 2


def test_the_last_attempt_counts_although_it_ends_first(configuration: Path) -> None:
    pair = pair_for(configuration)
    prefill, decode = pair.engines
    names = "cmpl-a-0-0123abcd", "cmpl-a-0-89abcdef"
    prefill.add(names[0], PROMPT, 6, PREFILL)  # it goes on while the other one is computed
    prefill.step()
    prefill.add(names[1], PROMPT, 1, PREFILL)
    given = answers(prefill, *names)
    held = [str(room.room) for room in pair.network.rooms["send"] if not room.given_up]
    assert held == [given[1]["room"]]
    decode.add(names[1], PROMPT, 4, given[1])
    pair.settle()


def test_prefill_says_why_a_prompt_has_no_state_for_decode(configuration: Path) -> None:
    engine = pair_for(configuration, "recurrent", "full").engines[0]
    engine.add("r", PROMPT[:1], 1, PREFILL)
    (answer,) = answers(engine, "r")
    assert "no state that decode can use" in answer["refused"]
    assert not answer["do_remote_prefill"]
    engine.check_settled()
