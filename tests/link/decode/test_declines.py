"""A decode that gives a request up before it asks for it: prefill's room ends at once, whichever side is first."""

from __future__ import annotations

import numpy as np
import pytest
from tests.helpers.links import link_of
from tests.helpers.peers import until

import statelink
from statelink import Status, state
from statelink.errors import ConfigError, RoomError
from statelink.testing import free_addresses


@pytest.mark.parametrize("first", ["send", "decline"])
@pytest.mark.parametrize("met", [False, True], ids=["strangers", "acquaintances"])
def test_prefills_room_ends_with_what_decodes_engine_said(first: str, met: bool) -> None:
    with link_of("prefill") as prefill, link_of("decode") as decode:
        if met:
            receiving = decode.receive(1, prefill.address, 4, {"kv": [0]})
            prefill.send(1, 4).push({"kv": [0]})
            assert receiving.wait(20, quiesced=True) is Status.SUCCEEDED
        sending = prefill.send(7, 4) if first == "send" else None
        decode.decline(7, prefill.address, "its client left")
        if sending is None:
            other = decode.receive(8, prefill.address, 4, {"kv": [1]})  # its request comes after that
            prefill.send(8, 4).push({"kv": [0]})
            assert other.wait(20) is Status.SUCCEEDED
            sending = prefill.send(7, 4)
        assert sending.wait(20, quiesced=True) is Status.FAILED
        assert sending.reason is not None
        assert (sending.reason.code, sending.reason.cause) == ("room.declined", "its client left")
        # Both sides know of that use: the next one is another.
        again = decode.receive(7, prefill.address, 4, {"kv": [2]})
        sending = prefill.send(7, 4)
        sending.push({"kv": [0]})
        assert again.wait(20) is sending.wait(20) is Status.SUCCEEDED


def test_a_room_that_was_aborted_before_the_sides_met() -> None:
    """Prefill hears of it when they meet, and not at its deadline."""
    (address,) = free_addresses(1)
    with link_of("decode") as decode:
        receiving = decode.receive(7, address, 4)
        receiving.abort("its client left")
        assert receiving.wait(20, quiesced=True) is Status.FAILED
        with link_of("prefill", listen=address) as prefill:
            sending = prefill.send(7, 4, to="decode")
            assert sending.wait(20) is Status.FAILED
            assert sending.reason is not None
            assert (sending.reason.code, sending.reason.cause) == ("room.aborted", "its client left")


ENDS = pytest.mark.parametrize("first", ["send", "abort"])


@ENDS
def test_a_sole_room_that_decode_gave_up(first: str) -> None:
    """Prefill's room ends with it, whenever it is opened, and also if it is for no instance by name."""
    with link_of("prefill") as prefill, link_of("decode") as decode:
        before = decode.receive(6, prefill.address, 4, {"kv": [1]})  # so that the request for the next is sent
        prefill.send(6, 4).push({"kv": [0]})
        assert before.wait(20) is Status.SUCCEEDED
        receiving = decode.receive(7, prefill.address, 4, {"kv": [0]}, sole=True)
        sending = None
        if first == "send":
            sending = opened = prefill.send(7, 4)
            until(lambda: opened.status is Status.WAITING)
        receiving.abort("its client left")
        assert receiving.wait(20, quiesced=True) is Status.FAILED
        sending = sending or prefill.send(7, 4)
        assert sending.wait(20, quiesced=True) is Status.FAILED
        assert sending.reason is not None
        assert (sending.reason.code, sending.reason.cause) == ("room.aborted", "its client left")
        # Both sides know of that use: the next one is another.
        again = decode.receive(7, prefill.address, 4, {"kv": [2]}, sole=True)
        sending = prefill.send(7, 4)
        sending.push({"kv": [0]})
        assert again.wait(20) is sending.wait(20) is Status.SUCCEEDED


def test_a_room_that_others_may_ask_for_outlives_one_that_gave_it_up() -> None:
    with link_of("prefill") as prefill, link_of("decode", "one") as one, link_of("decode", "other") as other:
        sending = prefill.send(7, 4)
        receiving = one.receive(7, prefill.address, 4)
        until(lambda: receiving.status is Status.WAITING)
        receiving.abort("its client left")
        assert receiving.wait(20, quiesced=True) is Status.FAILED
        receiving = other.receive(7, prefill.address, 4, {"kv": [0]})
        sending.push({"kv": [0]})
        assert receiving.wait(20) is sending.wait(20) is Status.SUCCEEDED


@ENDS
def test_a_sole_room_between_two_sides_that_refuse_each_other(first: str) -> None:
    """Prefill hears why at once, and not at its deadline that decode never asked."""
    pages = np.zeros((2, 8, 16, 4, 8), np.uint8)
    other = state.describe("decode", [state.kv_pages({0: (pages[0], pages[1])}, heads=4)])
    with link_of("prefill") as prefill, statelink.open({"role": "decode", "backend": "tcp"}, other) as decode:
        sending = prefill.send(7, 4) if first == "send" else None
        receiving = decode.receive(7, prefill.address, 4, sole=True)
        assert receiving.wait(20, quiesced=True) is Status.FAILED
        sending = sending or prefill.send(7, 4)
        assert sending.wait(20, quiesced=True) is Status.FAILED
        assert receiving.reason is not None
        assert sending.reason is not None
        assert sending.reason.what == receiving.reason.what
        assert sending.reason.code == "mismatch"


def test_what_cannot_be_declined() -> None:
    with link_of("prefill") as prefill, link_of("decode") as decode:
        decode.receive(7, prefill.address, 4)
        with pytest.raises(RoomError, match=r"room 7 cannot be declined .*\n.*abort it") as caught:
            decode.decline(7, prefill.address)
        assert caught.value.code == "room.in_use"
        with pytest.raises(RoomError):
            decode.decline(0, prefill.address)
        with pytest.raises(ConfigError):
            decode.decline(8, "")
        with pytest.raises(ConfigError, match=r"only decode may call decline\(\)"):
            prefill.decline(8, decode.address)
