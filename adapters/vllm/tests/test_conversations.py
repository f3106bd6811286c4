"""State in both directions: conversations of several turns, and histories that are not what the state is of."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import pytest
from pages import objects
from support.engines import PREFILL
from support.simulated_engine import Side, SimulatedEngine, tokens_of
from support.simulated_pair import SimulatedPair

from statelink import Status

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.smoke

KINDS = [("full",), ("window", "full"), ("chunk", "full"), ("recurrent", "full"), ("full", "window", "recurrent")]
PROMPT = [7 * n % 61 for n in range(10)]
HOLD_SECONDS = 120.0
STEPS = 3
"""Steps after which what follows from the end of a request has happened."""
ENDED = (Status.SUCCEEDED, Status.FAILED)
HOLD, BOTH, EXTEND, ASK = objects("conversations.md", r'(?=\{"(?:do_remote|extend))')
"""What the page says that a router passes."""


class Talk:
    """A conversation over a prefill and a decode engine."""

    def __init__(self, model: Path, kinds: tuple[str, ...], **more: Any) -> None:
        self.pair = SimulatedPair(model, [Side(kinds, 4, **{"blocks": 90, **more})] * 3)
        self.prefill, self.decode, self.other = self.pair.engines
        self.count = 0

    def ask(self, engine: SimulatedEngine, prompt: list[int], count: int, params: Any) -> tuple[list[int], Any]:
        """The tokens and the parameters of an engine's answer, while everything arrives that was sent."""
        self.count += 1
        name = f"r{self.count}"
        engine.add(name, prompt, count, params)
        since = 0
        for _ in range(60):
            since += name in engine.ended
            if since > STEPS:
                return engine.ended[name].tokens, engine.ended[name].params or {}
            for each in self.pair.engines:
                each.step()
            events = self.pair.network.events(kind=True)
            while honest := [happen for kind, happen in events if kind not in ("fail", "give up")]:
                honest[0]()
                events = self.pair.network.events(kind=True)
            rooms = self.pair.network.rooms
            failed = {room.room for room in rooms["send"] if room.status is Status.FAILED}
            for room in (*rooms["send"], *rooms["receive"]):
                if room.status not in ENDED and (room.given_up or room.room in failed):
                    room.end(room.given_up or "the other server has given it up")
        raise AssertionError(f"{name} has not ended")

    def turn(self, prompt: list[int], count: int, back: Any = None) -> tuple[list[int], Any]:
        """One turn, with what decode answered in the turn before. Decode holds its state for the next one."""
        _, said = self.ask(self.prefill, prompt, 1, {**(back or {}), **(BOTH if back else PREFILL)})
        tokens, said = self.ask(self.decode, prompt, count, {**said, **HOLD})
        assert tokens == tokens_of(prompt, count)
        return [*prompt, *tokens], said

    def asked(self, prompt: list[int], count: int) -> list[int]:
        """One turn of a router that asks decode for what it has of the prompt. Decode holds nothing between turns."""
        _, said = self.ask(self.decode, prompt, 1, ASK)
        _, said = self.ask(self.prefill, prompt, 1, {**said, "do_remote_decode": True})
        tokens, said = self.ask(self.decode, prompt, count, said)
        assert tokens == tokens_of(prompt, count)
        assert not said
        return [*prompt, *tokens]

    def received(self, engine: SimulatedEngine) -> list[int]:
        """For how many tokens state has come to an engine, request by request."""
        rooms = self.pair.network.rooms["receive"]
        return [room.tokens for room in rooms if room.link.engine is engine and room.status is Status.SUCCEEDED]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_each_turn_goes_on_from_the_state_of_the_turn_before(
    configuration: Path, kinds: tuple[str, ...], ahead: bool
) -> None:
    """The last token that decode generates is computed in the next turn. An answer may have a single token."""
    talk = Talk(configuration, kinds, ahead=ahead)
    history, held = PROMPT, []
    back: Any = None
    for count, more in ((3, [5, 6]), (1, [8]), (6, [9, 9, 9]), (2, [])):
        history, back = talk.turn(history, count, back)
        held.append(len(history) - 1)
        assert back["tokens"] == held[-1]
        history += more
    assert talk.received(talk.prefill) == held[:-1]
    left = int(kinds != ("full",))
    assert talk.received(talk.decode) == [len(PROMPT) - left, 15 - left, 17 - left, 26 - left]
    talk.ask(talk.prefill, history, 1, back | {"do_remote_prefill": True})
    talk.pair.settle()


@pytest.mark.parametrize(
    ("kinds", "kept", "found"),
    [
        (("full",), 15, 14),
        (("full",), 10, 10),  # a template leaves out what was generated
        (("full",), 9, 8),  # it writes the end of a prompt in another way when it is history
        (("full",), 7, 4),
        (("full",), 13, 10),  # it writes the end of what was generated in another way
        (("full",), 3, 0),
        (("recurrent", "full"), 15, 14),
        (("recurrent", "full"), 13, 0),
        (("window", "full"), 15, 14),
        (("window", "full"), 13, 0),
    ],
)
def test_another_history_goes_on_from_its_longest_equal_beginning(
    configuration: Path, kinds: tuple[str, ...], kept: int, found: int
) -> None:
    """Also on a server that has not seen the conversation."""
    talk = Talk(configuration, kinds)
    history, back = talk.turn(PROMPT, 5)
    other = [*history[:kept], *[60, 59, 58, 57, 56]]
    tokens, _ = talk.ask(talk.other, other, 4, {**back, "do_remote_prefill": True})
    assert tokens == tokens_of(other, 4)
    assert talk.received(talk.other) == ([found] if found else [])


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_decode_that_is_asked_sends_what_its_cache_has(configuration: Path, kinds: tuple[str, ...]) -> None:
    """Whole blocks, and the token behind them, which it computes. A history may differ from what decode has."""
    talk = Talk(configuration, kinds)
    history = talk.asked(PROMPT, 8)
    assert not talk.received(talk.prefill)
    history = talk.asked([*history, 5, 6], 3)
    assert not any(room.status not in ENDED for room in talk.pair.network.rooms["send"])
    talk.asked([*history[:14], 60, 59, 58], 2)
    assert talk.received(talk.prefill) == [17, 13]
    talk.pair.settle()


def held(talk: Talk) -> list[int]:
    """The rooms under which decode holds state, the answers' first ones alone."""
    return [room.room for room in talk.pair.network.rooms["send"] if room.status not in ENDED and not room.given_up]


def test_a_router_extends_what_is_held_and_lets_it_go(configuration: Path) -> None:
    talk = Talk(configuration, ("recurrent", "full"))
    _, back = talk.turn(PROMPT, 5)
    (room,) = [each for each in talk.pair.network.rooms["send"] if each.room == int(back["room"])]
    assert room.deadline == HOLD_SECONDS
    for seconds in (EXTEND["hold"], 7.5, True):
        _, said = talk.ask(talk.decode, [5], 1, {**EXTEND, "extend": back["room"], "hold": seconds})
        assert said["held"] == room.deadline == (HOLD_SECONDS if seconds is True else seconds)
    _, said = talk.ask(talk.decode, [5], 1, EXTEND)
    assert "no state is held" in said["refused"]
    talk.ask(talk.decode, [5], 1, {"extend": back["room"], "hold": 0})
    assert not held(talk)
    talk.pair.settle()


def test_a_request_that_runs_gets_the_blocks_of_held_turns_before_any_is_preempted(configuration: Path) -> None:
    """The oldest goes first, and no more go than it takes."""
    talk = Talk(configuration, ("full",), blocks=24)
    rooms = [int(talk.turn(PROMPT[number:], 3)[1]["room"]) for number in range(3)]
    assert {*rooms} <= {*held(talk)}
    talk.decode.add("other", [59] * 5, 29, None)
    tokens, _ = talk.ask(talk.decode, [60] * 5, 31, None)
    assert tokens == tokens_of([60] * 5, 31)
    assert talk.decode.ended["other"].tokens == tokens_of([59] * 5, 29)
    assert not talk.decode.preempted
    left = held(talk)
    assert rooms[0] not in left
    assert rooms[-1] in left
    talk.pair.settle()


def test_a_request_that_waits_gets_the_blocks_of_held_turns(configuration: Path) -> None:
    talk = Talk(configuration, ("full",), blocks=18)
    for number in range(3):
        talk.turn(PROMPT[number:], 3)
    tokens, _ = talk.ask(talk.decode, [60] * 36, 2, None)
    assert tokens == tokens_of([60] * 36, 2)
    talk.pair.settle()


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_a_router_that_knows_vllms_own_fields_is_served(configuration: Path, kinds: tuple[str, ...]) -> None:
    """It hands what each server answers to the other one, as it is."""
    talk = Talk(configuration, kinds, every=True)
    history, said = PROMPT, dict(PREFILL)
    for count in (3, 1, 4):
        _, said = talk.ask(talk.prefill, history, 1, said)
        tokens, said = talk.ask(talk.decode, history, count, said)
        assert tokens == tokens_of(history, count)
        history = [*history, *tokens, 5, 6]
        assert said["do_remote_decode"] is True
        assert said["do_remote_prefill"] is False
        assert said["remote_num_tokens"] == len(history) - 3
    assert talk.received(talk.prefill) == [12, 15]
    talk.pair.settle()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_many_conversations_at_once_with_few_blocks(
    configuration: Path, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...], ahead: bool
) -> None:
    """Turns are held and asked for, histories change, clients leave, and most of what is held is given up."""
    chance = random.Random(len(kinds) + ahead)
    talk = Talk(configuration, kinds, ahead=ahead, blocks=1 + 16 * len(kinds))
    talks: list[tuple[list[int], Any]] = []
    for number in range(25):
        history, back = talks.pop(0) if len(talks) > 2 else ([number + 7 * n % 61 for n in range(1 + number % 9)], None)
        if chance.random() < 0.2:
            history = [*history[: chance.randrange(1, len(history) + 1)], 60]
        if chance.random() < 0.2:
            talk.decode.add(f"left{number}", history, 4, {**(back or {}), "do_remote_prefill": True})
            talk.decode.step()
            talk.decode.abort(f"left{number}")
        if chance.random() < 0.3:
            history, back = talk.asked(history, 1 + chance.randrange(5)), None
        else:
            history, back = talk.turn(history, 1 + chance.randrange(5), back)
        if len(history) < 28:
            talks.append(([*history, number], back))
    for room in held(talk):
        talk.ask(talk.decode, [5], 1, {**EXTEND, "extend": str(room), "hold": 0})
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 60)  # nobody comes for what was of another history
    talk.pair.settle()
    assert len(talk.received(talk.prefill)) > 2
    assert len(talk.received(talk.decode)) > 15
