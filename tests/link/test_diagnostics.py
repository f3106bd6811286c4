"""What rooms say of themselves: before their end, and of what they wait for."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.helpers.peers import until
from tests.link.test_hook_defects import Defective, opened

from statelink import Status
from statelink.backend import ReceiveHook
from statelink.errors import RoomError
from statelink.registry import load_backend


def test_a_room_that_has_not_ended_does_not_check_out() -> None:
    """Whoever goes on after a wait that was too short is told so."""
    with opened("prefill") as prefill, opened("decode", peers={"p": [prefill.address]}) as decode:
        receiving = decode.receive(7, "p", 8, {"kv": [1, 0], "aux": [0]}, deadline=60)
        sending = prefill.send(7, 8, deadline=60)
        while sending.poll() is not Status.WAITING:
            prefill.changes(0.1)
        receiving.wait(0.01)
        for room, waits in ((receiving, "kv, aux from rank 0"), (sending, "the engine's first push, with kv, aux")):
            with pytest.raises(RoomError, match=f"waits for {waits}") as error:
                room.check()
            assert error.value.code == "room.open"
        sending.push({"kv": [0, 1], "aux": [1]})
        assert (receiving.wait(15), sending.wait(15)) == (Status.SUCCEEDED, Status.SUCCEEDED)
        receiving.check()
        sending.check()


def test_an_event_that_raises_without_a_word_is_named() -> None:
    class Event:
        def query(self) -> bool:
            raise NotImplementedError

    with opened("prefill") as prefill, opened("decode", peers={"p": [prefill.address]}) as decode:
        receiving = decode.receive(7, "p", 8, {"kv": [1, 0], "aux": [0]}, ready=Event(), deadline=60)
        assert receiving.wait(15) is Status.FAILED
        assert receiving.reason is not None
        assert receiving.reason.cause == "its query() raised NotImplementedError"


class Counting:
    """An event that counts who asks for it."""

    def __init__(self) -> None:
        self.asked = 0
        self.over = False

    def query(self) -> bool:
        self.asked += 1
        return self.over


def test_an_event_of_many_rooms_is_asked_once_at_a_time() -> None:
    """As often as that of one room, while both wait."""
    shared, alone, rooms = Counting(), Counting(), range(1, 33)
    with opened("prefill") as prefill, opened("decode", peers={"p": [prefill.address]}) as decode:
        receiving = [decode.receive(room, "p", 8, {"kv": [1, 0], "aux": [0]}, deadline=60) for room in (*rooms, 40)]
        sending = [prefill.send(room, 8, deadline=60) for room in (*rooms, 40)]
        for each in sending:
            each.push({"kv": [0, 1], "aux": [1]}, ready=alone if each is sending[-1] else shared)
        until(lambda: shared.asked and alone.asked, what="the events")
        before = shared.asked, alone.asked
        until(lambda: alone.asked > before[1] + 50, what="fifty questions")
        assert shared.asked - before[0] < 2 * (alone.asked - before[1])
        sending[0].abort("its client left")
        assert sending[0].wait(15) is Status.FAILED
        shared.over = alone.over = True
        assert {each.wait(15) for each in (*receiving[1:], *sending[1:])} == {Status.SUCCEEDED}


def test_an_event_that_is_recorded_again_is_asked_again() -> None:
    """An engine may use one event object for every chunk."""
    event = Counting()
    with opened("prefill") as prefill, opened("decode", peers={"p": [prefill.address]}) as decode:
        receiving = decode.receive(7, "p", 8, {"kv": [1, 0], "aux": [0]}, deadline=60)
        sending = prefill.send(7, 8, deadline=60)
        event.over = True
        sending.push({"kv": [0]}, span=(0, 4), ready=event)
        until(lambda: sending.settled == 1, what="the first chunk")
        event.over, before = False, event.asked
        sending.push({"kv": [1], "aux": [1]}, ready=event)
        until(lambda: event.asked > before + 3, what="more questions")
        assert (sending.settled, receiving.status) == (1, Status.TRANSFERRING)
        event.over = True
        assert (receiving.wait(15), sending.wait(15)) == (Status.SUCCEEDED, Status.SUCCEEDED)


def test_a_hook_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()

    class Slow(Defective):
        def receiver(self) -> ReceiveHook:
            class Receive(ReceiveHook):
                def prepare(self, context: Any) -> bytes:
                    return b""

                def finish(self, context: Any) -> None:
                    let_go.wait(30)

            return Receive()

    monkeypatch.setattr(load_backend("tcp"), "strategies", {"kv": Slow(""), "*": Defective("")})
    with opened("prefill") as prefill, opened("decode", peers={"p": [prefill.address]}) as decode:
        receiving = decode.receive(7, "p", 8, {"kv": [1, 0], "aux": [0]}, deadline=2.0)
        prefill.send(7, 8, deadline=60).push({"kv": [0, 1], "aux": [1]})
        status = receiving.wait(15)
        let_go.set()
        assert status is Status.FAILED
        assert receiving.reason is not None
        assert (
            receiving.reason.cause == "it still waits for the receive hook of component 'kv' for what came from rank 0"
        )
        assert receiving.reason.diagnostics["missing"] == "the receive hook of component 'kv' for what came from rank 0"
