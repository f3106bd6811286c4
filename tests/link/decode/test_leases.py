"""A decode that has no memory yet asks prefill to keep the request's state: prefill's room then lives longer."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from tests.helpers.links import link_of
from tests.helpers.peers import until

from statelink import Status
from statelink.errors import ConfigError, RoomError
from statelink.testing import free_addresses

TERM = 0.6
"""Seconds that prefill's engine gives a room."""


def test_prefill_keeps_a_room_that_decode_asks_to_keep() -> None:
    """Also if the two have not met before."""
    with link_of("prefill") as prefill, link_of("decode") as decode:
        sending, other = prefill.send(7, 4, deadline=4), prefill.send(8, 4, deadline=5)
        time.sleep(2)
        decode.keep(7, prefill.address, 30)
        assert other.wait(20) is Status.FAILED  # the first deadline of room 7 is over, too
        assert sending.status is not Status.FAILED
        receiving = decode.receive(7, prefill.address, 4, {"kv": [1]})
        sending.push({"kv": [0]})
        assert receiving.wait(20) is sending.wait(20) is Status.SUCCEEDED


def test_prefill_ends_a_room_soon_after_decode_has_gone() -> None:
    """Whatever decode asked for: prefill's engine says how long one call counts."""
    with link_of("prefill", deadline=TERM) as prefill, link_of("decode") as decode:
        sending = prefill.send(7, 4)
        decode.keep(7, prefill.address, 1e9)
        until(lambda: prefill.snapshot()["peers"])
        decode.close()
        assert sending.wait(20) is Status.FAILED
        assert sending.reason is not None
        assert sending.reason.code == "room.deadline"


def test_a_lease_makes_no_deadline_earlier() -> None:
    with link_of("prefill", deadline=30) as prefill, link_of("decode") as decode:
        sending = prefill.send(7, 4)
        decode.keep(7, prefill.address, 0.01)
        before = decode.receive(6, prefill.address, 4, {"kv": [1]})
        prefill.send(6, 4).push({"kv": [0]})
        assert before.wait(20) is Status.SUCCEEDED
        time.sleep(0.1)
        assert sending.status is not Status.FAILED


def test_an_instance_that_never_comes_is_forgotten_after_a_while() -> None:
    (address,) = free_addresses(1)
    with link_of("decode", heartbeat=0.05) as decode:
        for room in range(1, 20):
            decode.keep(room, address, 0.3)
        until(lambda: address in decode.snapshot()["peers"])
        until(lambda: not decode.snapshot()["peers"])


def test_rooms_that_are_not_this_ones_are_left_alone() -> None:
    """Those that belong to another instance, and those that are not open."""
    with link_of("prefill", deadline=TERM) as prefill, link_of("decode") as decode, link_of("decode", "other") as other:
        receiving = other.receive(7, prefill.address, 4, {"kv": [0]})
        until(lambda: prefill.snapshot()["load"]["pending_requests"] == 1)
        sending = prefill.send(7, 4)
        began = time.monotonic()
        while sending.status is not Status.FAILED:
            assert time.monotonic() < began + 20
            for room in (7, 8):
                decode.keep(room, prefill.address, 30)
            time.sleep(TERM / 20)
        assert receiving.wait(20) is Status.FAILED


def test_what_cannot_be_kept() -> None:
    with link_of("prefill") as prefill, link_of("decode") as decode:
        decode.receive(7, prefill.address, 4)
        with pytest.raises(RoomError, match=r"room 7 cannot be kept .*\n.*extend it") as caught:
            decode.keep(7, prefill.address, 5)
        assert caught.value.code == "room.in_use"
        with pytest.raises(RoomError):
            decode.keep(0, prefill.address, 5)
        with pytest.raises(ConfigError):
            decode.keep(8, "", 5)
        with pytest.raises(ConfigError, match=r"only decode may call keep\(\)"):
            prefill.keep(8, decode.address, 5)
        wrong: list[Any] = [0, -1, math.nan, math.inf, "5", None, True]
        for seconds in wrong:
            with pytest.raises(RoomError, match="seconds above zero are expected") as caught:
                decode.keep(8, prefill.address, seconds)
            assert caught.value.code == "room.number"
