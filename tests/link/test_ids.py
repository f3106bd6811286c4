"""A room's id is used again, and what is left of its earlier use does no harm."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from statelink import Status

if TYPE_CHECKING:
    from tests.helpers.pair import Pair
    from tests.link.conftest import Workshop

CHILD = "tests.helpers.child"
TCP = pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")


@TCP
def test_an_earlier_use_was_given_up_before_prefill_opened_it(pair: Pair) -> None:
    """Prefill's room fails with decode's reason, once; the id's next use has nothing to do with it."""
    pair.run()
    for _ in range(3):
        case = pair.case()
        early = pair.decode.receive(case.room, pair.prefill.address, case.tokens)
        early.abort("the user left")
        early.failed()
        time.sleep(0.1)  # prefill hears of it
        assert "the user left" in pair.send(case).failed()
        receiving = pair.receive(case)
        time.sleep(0.1)  # prefill is asked before it opens the room
        sending = pair.send(case)
        pair.push(sending, case)
        pair.ended(case, receiving, sending)


@TCP
def test_an_earlier_use_takes_its_grant_back_late(workshop: Workshop) -> None:
    """Its instance still knows of the next use: it fails when prefill closes."""
    made = workshop.pair()
    gate = workshop.decode.gate("revokes")
    workshop.decode.call("run_here", CHILD, "hold", (made.decode.key, "revoke", gate))
    case = made.case()
    receiving, sending = made.begin(case)
    made.push(sending, case)
    made.ended(case, receiving, sending)
    again = made.receive(case)
    workshop.decode.release(gate)
    assert again.reach(Status.WAITING).status is Status.WAITING
    time.sleep(0.1)  # the grant is taken back
    made.prefill.close()
    assert "prefill was lost" in again.failed(10)


@TCP
def test_decode_says_of_an_earlier_use_again_that_it_gave_up(workshop: Workshop) -> None:
    """It asks about memory that it cannot give back yet at every beat: that ends one room, and not the next."""
    made = workshop.pair(heartbeat=0.1)
    made.run()
    for number in range(4):  # it said so an odd or an even number of times
        gate = workshop.decode.gate(f"grants-{number}")
        workshop.decode.call("run_here", CHILD, "hold", (made.decode.key, "grant", gate))
        case = made.case()
        early = made.receive(case)
        early.abort("the user left")
        early.failed()
        time.sleep(0.1)  # prefill hears of it
        assert "the user left" in made.send(case).failed()
        time.sleep(0.35 + 0.1 * number)
        workshop.decode.release(gate)
        assert early.wait(quiesced=True).quiesced
        sending = made.send(case)
        made.push(sending, case)
        made.ended(case, made.receive(case), sending)
