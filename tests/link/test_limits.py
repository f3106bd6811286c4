"""What a link takes on is bounded; beyond that it refuses, says so, and loses nothing that it took."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zmq
from tests.helpers.links import link_of
from tests.helpers.peers import until

import statelink
from statelink import Status, state
from statelink.errors import ConfigError, RoomError
from statelink.testing import free_addresses
from statelink.wire import MAX_INDICES, ItemList, Request, decode, encode

if TYPE_CHECKING:
    from tests.link.conftest import TwoEngines

TCP = pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")


@TCP
def test_a_room_too_many(two_engines: TwoEngines) -> None:
    made = two_engines.pair(decode_config={"max_rooms": 3})
    held = [made.decode.receive(room, made.prefill.address, 200) for room in (1, 2, 3)]
    with pytest.raises(RoomError, match=r"room 4 is one too many .*: 3 rooms are open or hold memory") as error:
        made.decode.receive(4, made.prefill.address, 200)
    assert error.value.code == "room.many"
    held[0].abort()
    held[0].failed()
    until(lambda: made.decode.snapshot()["rooms"]["failed"] == 0)
    made.run()
    for room in held[1:]:
        room.abort()


@TCP
def test_a_push_too_many(two_engines: TwoEngines) -> None:
    made = two_engines.pair(max_pushes=2)
    case = made.case()
    sending = made.send(case)
    pools = made.prefill.memory.pools
    for span in ((0, 48), (48, 96)):
        sending.push(case.span(*span, pools), span=span)
    assert made.prefill.snapshot()["load"]["pushes"] == 2
    with pytest.raises(RoomError, match="2 pushes wait or are under way") as error:
        sending.push(case.span(96, 200, pools), span=(96, 200))
    assert error.value.code == "room.pushes"
    receiving = made.receive(case)
    until(lambda: made.prefill.snapshot()["load"]["pushes"] == 0)
    sending.push(case.span(96, 200, pools), span=(96, 200))
    made.ended(case, receiving, sending)
    failing = made.case()
    sending = made.send(failing)
    sending.push(failing.span(0, 48, pools), span=(0, 48))
    sending.abort()
    sending.failed()
    assert made.prefill.snapshot()["load"]["pushes"] == 0


@TCP
def test_too_many_bytes_of_early_requests(two_engines: TwoEngines) -> None:
    made = two_engines.pair(max_pending_request_bytes=6500)
    cases = [made.case() for _ in range(3)]
    rooms = [made.receive(case) for case in cases]
    assert "too many requests wait for prefill" in rooms[0].failed()
    load = made.prefill.snapshot()["load"]
    assert 0 < load["pending_request_bytes"] <= 6500
    sending = made.send(cases[2])
    made.push(sending, cases[2])
    rooms[2].succeeded()
    sending.succeeded()
    rooms[1].abort()
    rooms[1].failed()


def test_a_request_of_too_many_indices_is_refused_at_the_call() -> None:
    """What can be accepted can be sent, and read on the other side."""
    count = MAX_INDICES + 1
    pools = np.zeros((2, count, 1, 1, 1), np.uint8)
    inventory = state.describe("decode", [state.kv_pages({0: (pools[0], pools[1])}, heads=1)])
    with statelink.open({"role": "decode", "backend": "tcp"}, inventory) as link:
        room = link.receive(1, free_addresses(1)[0], count)
        with pytest.raises(RoomError, match=r"names 4194305 indices .* at most 4194304") as error:
            room.accept({"kv": np.arange(count)})
        assert error.value.code == "room.items"
        room.accept({"kv": np.arange(count - 1)}, prefix=1)
        room.abort()
    frames = encode(
        Request(
            sender="d",
            to="p",
            room=1,
            generation=1,
            tokens=1,
            prefix=0,
            items={"kv": ItemList(0, bytes(8 * MAX_INDICES))},
        )
    )
    message = decode(frames)
    assert isinstance(message, Request)
    assert len(message.items["kv"].ids) == 8 * MAX_INDICES


@pytest.mark.parametrize("name", ["max_rooms", "max_pushes", "max_pending_request_bytes"])
def test_a_limit_is_above_zero(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be above zero"):
        statelink.LinkConfig.read({"role": "decode", "backend": "tcp", name: 0})


def test_who_never_asks_for_changes_keeps_no_rooms() -> None:
    """The latest 4096 that changed, and no more; from the first question on, all of them."""
    count = 4096 + 7
    with link_of("decode") as link:
        address = free_addresses(1)[0]
        rooms = [link.receive(room, address, 2) for room in range(1, count + 1)]
        for room in rooms:
            room.abort()
        for room in rooms:
            assert room.wait(20) is Status.FAILED
        until(lambda: link.snapshot()["load"]["changes_dropped"] == 7)
        assert link.changes(1.0) == rooms[7:]
        more = [link.receive(room, address, 2) for room in range(count + 1, 2 * count)]
        for room in more:
            room.abort()
        for room in more:
            assert room.wait(20) is Status.FAILED
        assert link.changes(1.0) == more, "who asks gets them all"


def test_who_does_not_answer_is_asked_less_and_less() -> None:
    """Sixty beats, and at most one introduction a second after the first few."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    mute = context.socket(zmq.ROUTER)
    mute.linger = 0
    port = mute.bind_to_random_port("tcp://127.0.0.1")
    heard: list[bytes] = []
    try:
        with link_of("decode", heartbeat=0.05, liveness=2.0) as link:
            room = link.receive(1, f"tcp://127.0.0.1:{port}", 2)
            end = time.monotonic() + 3.0
            while time.monotonic() < end:
                if mute.poll(50):
                    heard.append(mute.recv_multipart()[1])
            room.abort()
    finally:
        mute.close()
        context.term()
    assert set(heard) == {b"hello"}
    assert 2 <= len(heard) <= 12
