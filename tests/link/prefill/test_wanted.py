"""Rooms that decode asks for, and that prefill's engine opens because decode asks."""

from __future__ import annotations

import pytest
from tests.helpers.links import link_of
from tests.helpers.peers import until

import statelink
from statelink import Status
from statelink.errors import ConfigError


@pytest.mark.parametrize("before", [True, False], ids=["asked before the first call", "asked after it"])
def test_a_room_that_decode_asks_for_is_named_once_and_can_be_served(before: bool) -> None:
    with link_of("prefill") as prefill, link_of("decode") as decode:
        opened = decode.receive(6, prefill.address, 16, {"kv": [1]})
        prefill.send(6, 16)
        until(lambda: opened.status is Status.WAITING)  # a room that is open is not wanted
        if not before:
            assert prefill.wanted() == []
        receiving = decode.receive(7, prefill.address, 32, {"kv": [3]}, prefix=16, content=b"which")
        if before:
            until(lambda: prefill.snapshot()["load"]["pending_requests"] == 1)
            assert prefill.wanted() == []
        assert prefill.wanted(20) == [statelink.Wanted(7, 32, 16, b"which")]
        sending = prefill.send(7, 32, content=b"which")
        sending.push({"kv": [2]}, span=(16, 32))
        assert {each.wait(20) for each in (sending, receiving)} == {Status.SUCCEEDED}
        assert prefill.wanted() == []


def test_a_wanted_room_that_cannot_be_served_fails_on_decode_with_the_reason() -> None:
    with link_of("prefill") as prefill, link_of("decode") as decode:
        receiving = decode.receive(7, prefill.address, 16, {"kv": [1]})
        (wanted,) = prefill.wanted(20)
        prefill.send(wanted.room).abort("it is not in the cache any more")
        assert receiving.wait(20, quiesced=True) is Status.FAILED
        assert "it is not in the cache any more" in str(receiving.reason)


def test_decode_is_asked_for_nothing() -> None:
    with link_of("decode") as decode, pytest.raises(ConfigError, match="wanted"):
        decode.wanted()
