"""A decode that gives a request up before it asks for it: prefill's room ends at once, whichever side is first."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

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
            sending = prefill.send(7, 4)
            assert sending.wait(20) is Status.FAILED
            assert sending.reason is not None
            assert (sending.reason.code, sending.reason.cause) == ("room.aborted", "its client left")


def test_an_instance_that_never_comes_is_forgotten_after_a_while() -> None:
    """Also if the room that was aborted had no deadline."""
    (address,) = free_addresses(1)
    with link_of("decode", heartbeat=0.05, deadline=0.5) as decode:
        receiving = decode.receive(7, address, 4, deadline=math.inf)
        until(lambda: address in decode.snapshot()["peers"])
        receiving.abort("its client left")
        assert receiving.wait(20, quiesced=True) is Status.FAILED
        until(lambda: not decode.snapshot()["peers"])


ENDS = pytest.mark.parametrize("first", ["send", "abort"])


@ENDS
def test_a_room_that_decode_gave_up(first: str) -> None:
    """Prefill's room ends with it, whenever it is opened."""
    with link_of("prefill") as prefill, link_of("decode") as decode:
        before = decode.receive(6, prefill.address, 4, {"kv": [1]})  # so that the request for the next is sent
        prefill.send(6, 4).push({"kv": [0]})
        assert before.wait(20) is Status.SUCCEEDED
        receiving = decode.receive(7, prefill.address, 4, {"kv": [0]})
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
        again = decode.receive(7, prefill.address, 4, {"kv": [2]})
        sending = prefill.send(7, 4)
        sending.push({"kv": [0]})
        assert again.wait(20) is sending.wait(20) is Status.SUCCEEDED


@contextlib.contextmanager
def misfits(ranks: int) -> Iterator[tuple[list[statelink.Link], statelink.Link, statelink.Link]]:
    """A prefill of so many ranks, a decode that fits it, and one of another model and the same name."""
    pages = np.zeros((2 + ranks, 2, 8, 16, 2, 8), np.uint8)

    def open_(role: str, name: str, rank: int = 0, width: int = 1, model: str = "m") -> statelink.Link:
        k, v = pages[rank if role == "prefill" else ranks + (model != "m")]
        parts = [state.kv_pages({0: (k[..., : 2 // width, :], v[..., : 2 // width, :])}, heads=2, tp=(rank, width))]
        inventory = state.describe(name, parts, rank=rank, ranks=width, model=model)
        return statelink.open({"role": role, "backend": "tcp"}, inventory)

    with contextlib.ExitStack() as stack:
        prefills = [stack.enter_context(open_("prefill", "prefill", rank, ranks)) for rank in range(ranks)]
        fits = stack.enter_context(open_("decode", "decode"))
        yield prefills, fits, stack.enter_context(open_("decode", "decode", model="another"))


@ENDS
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_sides_that_refuse_each_other(first: str, ranks: int) -> None:
    """Each rank of prefill hears why at once, and not at its deadline that decode never asked."""
    with misfits(ranks) as (prefills, fits, misfit):
        addresses = [each.address for each in prefills]
        sendings = [each.send(7, 4) for each in prefills] if first == "send" else []
        receiving = misfit.receive(7, addresses, 4)
        assert receiving.wait(20, quiesced=True) is Status.FAILED
        sendings = sendings or [each.send(7, 4) for each in prefills]
        for sending in sendings:
            assert sending.wait(20, quiesced=True) is Status.FAILED
            assert receiving.reason is not None
            assert sending.reason is not None
            assert sending.reason.what == receiving.reason.what
            assert sending.reason.code == "mismatch"
        # Both sides know of that use: the next one is another.
        again = fits.receive(7, addresses, 4, {"kv": [2]})
        sendings = [each.send(7, 4) for each in prefills]
        for sending in sendings:
            sending.push({"kv": [0]})
        assert {again.wait(20), *(sending.wait(20) for sending in sendings)} == {Status.SUCCEEDED}


def test_links_of_which_one_refuses_the_others_handshake() -> None:
    """Prefill's room goes on: the links do not know each other."""
    with link_of("prefill") as prefill, link_of("decode") as fits, link_of("decode", verify="digest") as misfit:
        sending = prefill.send(7, 4)
        receiving = misfit.receive(7, prefill.address, 4)
        assert receiving.wait(20, quiesced=True) is Status.FAILED
        assert receiving.reason is not None
        assert receiving.reason.code == "peer.verify"
        again = fits.receive(7, prefill.address, 4, {"kv": [2]})
        sending.push({"kv": [0]})
        assert again.wait(20) is sending.wait(20) is Status.SUCCEEDED


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
