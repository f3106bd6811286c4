"""A decode that gives a request up before it asks for it: prefill's room ends at once, whichever side is first."""

from __future__ import annotations

import pytest
from tests.helpers.links import link_of

from statelink import Status
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
