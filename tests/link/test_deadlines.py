"""How long a room may take: from its opening, as the engine says, and until a later deadline that the engine sets."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from tests.helpers.links import link_of

from statelink import Status
from statelink.errors import RoomError

SOON, LATER = 0.3, 30.0
"""Seconds: a deadline that comes during the test, and one that does not."""


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_room_that_is_extended_goes_on(role: str) -> None:
    """Over its first deadline, and to the end."""
    with link_of("prefill") as prefill, link_of("decode") as decode:
        sending = prefill.send(7, 4, deadline=SOON if role == "prefill" else None)
        receiving = decode.receive(7, prefill.address, 4, deadline=SOON if role == "decode" else None)
        (sending if role == "prefill" else receiving).extend(LATER)
        unlike = decode.receive(8, prefill.address, 4, deadline=2 * SOON)
        assert unlike.wait(20) is Status.FAILED  # the first deadline of the other room has passed by now
        assert Status.FAILED not in (sending.status, receiving.status)
        receiving.accept({"kv": [1]})
        sending.push({"kv": [0]})
        assert receiving.wait(20) is sending.wait(20) is Status.SUCCEEDED


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_deadline_that_begins_with_the_memory(role: str) -> None:
    """Without a limit in the queue, and with one from there on."""
    with link_of("prefill") as prefill, link_of("decode") as decode:
        sending = prefill.send(7, 4, deadline=math.inf)
        receiving = decode.receive(7, prefill.address, 4, deadline=math.inf)
        if role == "prefill":
            sending.push({"kv": [0]})
            sending.extend(SOON)
            room: Any = sending
        else:
            receiving.accept({"kv": [1]})
            receiving.extend(SOON)
            room = receiving
        assert room.wait(20) is Status.FAILED
        assert room.reason.code == "room.deadline"


def test_a_lease_that_is_renewed_often() -> None:
    """Deadlines that are out of date are not kept: the room ends soon after the last renewal."""
    with link_of("prefill") as prefill:
        sending = prefill.send(7, 4, deadline=LATER)
        for _ in range(5000):
            sending.extend(LATER)
        renewed = time.monotonic()
        while time.monotonic() < renewed + 2 * SOON:
            sending.extend(SOON)
            assert sending.status is Status.BOOTSTRAPPING
            time.sleep(SOON / 20)
        assert sending.wait(20) is Status.FAILED
        sending.extend(LATER)  # after the end, this does nothing
        assert sending.status is Status.FAILED


@pytest.mark.parametrize("seconds", [0, -1, math.nan, "5", None, True])
def test_times_that_are_none(seconds: Any) -> None:
    with link_of("prefill") as prefill:
        sending = prefill.send(7, 4)
        with pytest.raises(RoomError, match="seconds above zero are expected") as caught:
            sending.extend(seconds)
        assert caught.value.code == "room.number"
        if seconds is not None:
            with pytest.raises(RoomError, match="seconds above zero are expected"):
                prefill.send(8, 4, deadline=seconds)
