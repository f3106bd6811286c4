"""Opening a room on prefill: it lets the control thread sleep, unless something waits for the room.

No heartbeat comes during a test, so that nothing else wakes the thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.links import link_of
from tests.helpers.loops import note_rings, open_with_loop, sleeps
from tests.helpers.peers import until

import statelink
from statelink import Status

if TYPE_CHECKING:
    from statelink.link.runtime import Bell, Loop

CALM: dict[str, Any] = {"heartbeat": 500.0, "liveness": 1000.0, "deadline": 5000.0, "inspect": False}


@pytest.fixture
def opened() -> Iterator[tuple[statelink.Link, Loop]]:
    link, loop = open_with_loop(lambda: link_of("prefill", **CALM))
    with link:
        yield link, loop


@pytest.fixture
def prefill(opened: tuple[statelink.Link, Loop]) -> statelink.Link:
    return opened[0]


@pytest.fixture
def loop(opened: tuple[statelink.Link, Loop]) -> Loop:
    """What the control thread of `prefill` runs."""
    return opened[1]


@pytest.fixture
def decode() -> Iterator[statelink.Link]:
    with link_of("decode", **CALM) as link:
        yield link


@pytest.fixture
def rings(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> list[Bell]:
    """One for each time that a call woke the control thread of `prefill`, and no message."""
    return note_rings(loop, monkeypatch)


def asleep(loop: Loop) -> None:
    """Wait until the control thread waits."""
    sleeps(loop)
    time.sleep(0.01)


def reaches(room: statelink.Sending, status: Status) -> None:
    until(lambda: room.status is status)


def serve(prefill: statelink.Link, decode: statelink.Link, room: int) -> None:
    receiving = decode.receive(room, prefill.address, 16, {"kv": [0]})
    sending = prefill.send(room, 16)
    sending.push({"kv": [1]})
    assert receiving.wait(20) is sending.wait(20) is Status.SUCCEEDED


def test_a_room_of_which_nobody_knows_wakes_nobody(
    prefill: statelink.Link, decode: statelink.Link, loop: Loop, rings: list[Bell]
) -> None:
    asleep(loop)
    rooms = [prefill.send(room, 16) for room in range(1, 20)]
    assert rings == []
    # Decode's requests wake it, and find the rooms.
    receiving = [decode.receive(room, prefill.address, 16, {"kv": [0]}) for room in range(1, 20)]
    until(lambda: all(room.status is Status.WAITING for room in rooms))
    for sending in rooms:
        sending.push({"kv": [1]})
    for each in (*rooms, *receiving):
        assert each.wait(20, quiesced=True) is Status.SUCCEEDED
        assert each.nbytes == each.report.moved["kv"].nbytes == 2 * 16 * 2 * 8


def test_a_request_that_came_first_meets_the_room_at_once(
    prefill: statelink.Link, decode: statelink.Link, loop: Loop
) -> None:
    serve(prefill, decode, 1)
    for room in range(2, 12):
        receiving = decode.receive(room, prefill.address, 16, {"kv": [0]})
        until(lambda: prefill.snapshot()["load"]["pending_requests"])
        asleep(loop)
        sending = prefill.send(room, 16)
        reaches(sending, Status.WAITING)
        sending.push({"kv": [1]})
        assert receiving.wait(20) is sending.wait(20) is Status.SUCCEEDED


def test_a_room_that_decode_gave_up_first_fails_at_once(
    prefill: statelink.Link, decode: statelink.Link, loop: Loop
) -> None:
    serve(prefill, decode, 1)
    decode.decline(7, prefill.address, "its client left")
    until(lambda: prefill.snapshot()["load"]["gone"])
    asleep(loop)
    sending = prefill.send(7, 16)
    assert sending.wait(20) is Status.FAILED
    assert sending.reason is not None
    assert sending.reason.code == "room.declined"


@pytest.mark.parametrize("seconds", [0.05, 1.0])
def test_a_deadline_before_the_next_heartbeat_is_kept(prefill: statelink.Link, loop: Loop, seconds: float) -> None:
    asleep(loop)
    sending = prefill.send(1, 16, deadline=seconds)
    assert sending.wait(20) is Status.FAILED
    assert sending.reason is not None
    assert sending.reason.code == "room.deadline"


def test_a_heartbeat_watches_a_later_deadline() -> None:
    prefill, loop = open_with_loop(lambda: link_of("prefill", heartbeat=0.05, liveness=1.0))
    with prefill:
        asleep(loop)
        sending = prefill.send(1, 16, deadline=0.3)
        assert sending.wait(20) is Status.FAILED


@pytest.mark.parametrize("call", ["push", "abort", "extend"])
def test_what_the_engine_does_next_wakes_it(prefill: statelink.Link, loop: Loop, rings: list[Bell], call: str) -> None:
    asleep(loop)
    sending = prefill.send(1, 16, deadline=math.inf)
    assert rings == []
    if call == "push":
        sending.push({"kv": [0]})
        until(lambda: loop.idle)  # it has taken the push
        sending.abort()
    elif call == "extend":
        sending.extend(0.01)
    else:
        sending.abort()
    assert sending.wait(20, quiesced=True) is Status.FAILED
    assert rings
