"""Requests that never reach decode: vLLM's own scheduler and block pool on prefill, with a clock that tests turn on."""

from __future__ import annotations

import logging
import math
import random
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from support.engines import PREFILL
from support.simulated_engine import Side, SimulatedEngine, tokens_of
from support.simulated_link import Network, SimulatedRoom
from support.simulated_pair import STREAMS, pair_of

from statelink import Status
from statelink_vllm.connector import Keep, Leases, Source

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("quiet")]

BLOCK, LENGTH = 4, 36
BLOCKS = LENGTH // BLOCK
"""Blocks of a prompt of so many tokens."""
LATE, DEADLINE = 9.0, 120.0
STEP = 0.15
"""Simulated seconds of a step."""
MINUTES = 10


class Clock:
    """Stands in for `time.monotonic`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


class Prefill:
    """A prefill engine, and what decode and the links' deadlines do with its rooms.

    Args:
        configuration: The folder with the configuration of any model.
        clock: The clock.
        blocks: Blocks of its pool.
        more: Further attributes of `Side`.
    """

    def __init__(self, configuration: Path, clock: Clock, blocks: int, **more: Any) -> None:
        self.clock, self.network = clock, Network()
        self.engine = SimulatedEngine(
            "one", configuration, Side(("full",), BLOCK, 1 + blocks, role="kv_producer", **more), self.network
        )
        self.opened: dict[int, float] = {}
        self.count = 0
        self.random = random.Random(7)

    def add(self, length: int = LENGTH, params: Any = PREFILL) -> str:
        """A client's request, with a prompt of its own."""
        name = f"r{self.count}"
        self.count += 1
        self.engine.add(name, [self.random.randrange(89) for _ in range(length)], 1, params)
        return name

    def step(self, seconds: float = STEP) -> None:
        self.engine.step()
        self.clock.now += seconds
        for room in self.rooms():
            if room.given_up or self.clock.now > self.opened.setdefault(room.room, self.clock.now) + DEADLINE:
                finish(room, room.given_up or "its deadline has passed")

    def rooms(self) -> list[SimulatedRoom]:
        """Rooms that have not ended, the oldest first."""
        return [room for room in self.network.rooms["send"] if room.status not in (Status.SUCCEEDED, Status.FAILED)]

    def run(self, seconds: float) -> None:
        """Short requests that are not sent keep the engine at work."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            if not self.engine.busy:
                self.add(1, None)
            self.step()

    def hold(self, count: int) -> list[int]:
        """Compute so many prompts. Returns the rooms under which their state is held. Takes no time."""
        before = {room.room for room in self.rooms()}
        for _ in range(count):
            self.add()
        for _ in range(4 * count + 1):
            self.step(0.0)
        held = list(dict.fromkeys(room.room for room in self.rooms() if room.room not in before))
        assert len(held) == count
        return held


def finish(room: SimulatedRoom, why: str = "") -> None:
    room.end(why)
    room.quiesced = True


def prompts_of(configuration: Path, clock: Clock, lost: float) -> int:
    """How many prompts a busy prefill computes in ten minutes, if decode never hears of a part of them.

    Decode says a word of the others half a second after their answers. It receives most of them two seconds later, and
    some when it has blocks for them, after half a minute.
    """
    prefill, chance = Prefill(configuration, clock, 30 * BLOCKS), random.Random(11)
    words: dict[int, tuple[float, float]] = {}
    """For each room, when decode says a word of it, and when it has received it."""
    until = clock.now + 60 * MINUTES
    while clock.now < until:
        while len(prefill.engine.scheduler.waiting) < 4:
            prefill.add()
        prefill.step()
        prefill.network.rooms["send"] = prefill.rooms()
        for room in prefill.rooms():
            if room.room not in words:
                word = clock.now + (math.inf if chance.random() < lost else 0.5)
                words[room.room] = word, word + (30.0 if chance.random() < 0.05 else 2.0)
            word, end = words[room.room]
            if clock.now >= word:
                prefill.network.kept.add(room.room)
            if clock.now >= end:
                finish(room)
    return len(prefill.engine.ended)


def test_a_tenth_that_never_reaches_decode_costs_prefill_nothing(configuration: Path, clock: Clock) -> None:
    everybody = prompts_of(configuration, clock, 0.0)
    assert everybody > 1000
    assert prompts_of(configuration, clock, 0.1) >= 0.99 * everybody


def lost_and_waiting(
    configuration: Path, clock: Clock, lost: int, waiting: int, **more: Any
) -> tuple[Prefill, list[int], list[int]]:
    """A prefill that holds the state of requests that are lost, and of as many as fit that wait on decode."""
    prefill = Prefill(configuration, clock, (lost + waiting) * BLOCKS + 2, **more)
    rooms = prefill.hold(lost)
    waits = prefill.hold(waiting)
    prefill.network.kept |= {*waits}
    return prefill, rooms, waits


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("claimed", "gone"), [((), [0, 1]), ((0,), [1, 2]), ((0, 2), [1, 3]), ((0, 1, 2, 3), [])])
def test_the_oldest_are_given_up_for_requests_that_wait_and_none_that_decode_has_claimed(
    configuration: Path, clock: Clock, ranks: int, claimed: tuple[int, ...], gone: list[int]
) -> None:
    """One for each of two requests that wait. All ranks give up the same."""
    prefill, lost, _ = lost_and_waiting(configuration, clock, 4, 13, ranks=ranks)
    prefill.network.kept |= {lost[number] for number in claimed}
    names = [prefill.add(), prefill.add()]
    prefill.run(LATE)
    assert [name in prefill.engine.ended for name in names] == [bool(gone)] * 2
    ended = [room for room in prefill.network.rooms["send"] if room.status is Status.FAILED]
    assert [room.room for room in ended] == [lost[number] for number in gone for _ in range(ranks)]
    assert {room.given_up for room in ended} <= {f"another request lacked {BLOCKS - 2} blocks"}


def test_none_is_given_up_while_there_is_room(configuration: Path, clock: Clock) -> None:
    """Neither late ones, nor any that are not late yet when another request needs blocks."""
    prefill, lost, _ = lost_and_waiting(configuration, clock, 4, 13)
    prefill.run(60.0)
    fresh = Prefill(configuration, clock, BLOCKS + 2)
    (room,) = fresh.hold(1)
    name = fresh.add()
    fresh.run(3.0)
    assert [room.room for room in prefill.rooms()[:4]] == lost
    assert [each.room for each in fresh.rooms()] == [room]
    fresh.run(LATE)
    assert name in fresh.engine.ended


def test_late_requests_hold_a_quarter_of_the_blocks_at_most(configuration: Path, clock: Clock) -> None:
    """However many others wait on decode."""
    prefill, lost, waits = lost_and_waiting(configuration, clock, 6, 10)
    prefill.run(LATE)
    assert [room.room for room in prefill.rooms()] == [*lost[2:], *waits]
    why = [room.given_up for room in prefill.network.rooms["send"] if room.given_up]
    most = (16 * BLOCKS + 3) // 4
    assert why == [f"such requests held {count * BLOCKS} blocks, and may hold {most}" for count in (6, 5)]


def test_the_log_counts_them_and_says_where_to_look(
    configuration: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, _, _ = lost_and_waiting(configuration, clock, 6, 10)
    log = logging.getLogger("vllm.statelink")
    with caplog.at_level(logging.WARNING, log.name), mock.patch.object(log, "handle") as handle:
        prefill.run(20.0)
        for _ in range(2):
            prefill.add()
        prefill.run(20.0)
    lines = [call.args[0].getMessage() for call in handle.call_args_list if "given up" in call.args[0].getMessage()]
    said = "requests of which no decode had said a word were given up: "
    assert [line.removeprefix(said)[:2] for line in lines] == ["1,", "2,"]
    assert all("because such requests held" in line for line in lines)
    assert all("Look for requests that decode's server refuses" in line for line in lines)


@pytest.mark.parametrize("deadline", [4.0, 120.0])
def test_decode_says_a_word_of_what_waits_before_it_is_late(clock: Clock, deadline: float) -> None:
    leases = Leases(deadline)
    leases.add("r", Source(7, "prefill"))
    for _ in range(3):
        clock.now += 2.0
        assert leases.take() == {"r": Keep(7, "prefill", deadline)}


# Answers that a router passes on with the wrong request.


class Mixed:
    """A pair, and two requests that prefill has computed."""

    def __init__(self, configuration: Path, clock: Clock, spare: int) -> None:
        self.clock = clock
        self.pair = pair_of(configuration, ("full",), blocks=(BLOCK, BLOCK), spare=(60, spare))
        self.prefill, self.decode = self.pair.engines
        for number, prompt in enumerate(STREAMS):
            self.prefill.add(f"r{number}", prompt[:LENGTH], 1, PREFILL)
        self.steps()

    def steps(self, seconds: float = 0.0) -> None:
        self.clock.now += seconds
        for _ in range(20):
            self.prefill.step()
            self.decode.step()

    def route(self, number: int, answer: int) -> None:
        self.decode.add(f"r{number}", STREAMS[number][:LENGTH], 4, self.prefill.ended[f"r{answer}"].params)

    def declined(self) -> list[int]:
        """The requests whose rooms decode has declined."""
        rooms = {int(self.prefill.ended[f"r{number}"].params["room"]): number for number in (0, 1)}
        return sorted(rooms[room] for room, _ in self.pair.network.declined)

    def end(self) -> None:
        self.pair.settle()
        for number, prompt in enumerate(STREAMS):
            ended = self.decode.ended.get(f"r{number}")
            assert ended is None or ended.why == "abort" or ended.tokens == tokens_of(prompt[:LENGTH], 4)


def test_prefill_hears_of_answers_that_were_exchanged(configuration: Path, clock: Clock) -> None:
    mixed = Mixed(configuration, clock, 60)
    mixed.route(0, answer=1)
    mixed.route(1, answer=0)
    mixed.steps()
    assert mixed.declined() == []
    mixed.steps(LATE)
    assert mixed.declined() == [0, 1]
    mixed.end()


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("spare", [60, 0], ids=["receives", "waits"])
def test_the_right_request_gets_its_state_although_another_had_the_answer(
    configuration: Path, clock: Clock, spare: int, at_once: bool
) -> None:
    """It comes with the wrong one, or a moment later, and may wait for the blocks of the wrong one."""
    mixed = Mixed(configuration, clock, spare)
    mixed.route(0, answer=1)
    if not at_once:
        mixed.steps(1.0)
    mixed.route(1, answer=1)
    mixed.decode.step()
    mixed.steps(LATE)
    assert mixed.declined() == []
    mixed.end()
    assert len(mixed.pair.network.rooms["receive"]) == 1


def test_a_client_that_leaves_with_the_answer_to_another_request(configuration: Path, clock: Clock) -> None:
    mixed = Mixed(configuration, clock, 60)
    mixed.route(0, answer=1)
    mixed.decode.abort("r0")
    mixed.steps()
    mixed.route(1, answer=1)
    mixed.steps(LATE)
    assert mixed.declined() == []
    finish(next(room for room in mixed.pair.network.rooms["send"]), "nobody has its answer")
    mixed.end()
