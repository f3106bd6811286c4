"""A room's id is used again, and what is left of its earlier use does no harm."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from tests.helpers.peers import until

from statelink import Status

if TYPE_CHECKING:
    from tests.helpers.pair import Pair
    from tests.link.conftest import TwoEngines

FAULTS = "faulty_backends"
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
@pytest.mark.parametrize("asks", ["before", "after"])
def test_prefill_never_knew_of_the_use_that_decode_gave_up(pair: Pair, asks: str) -> None:
    """Then both use the id. Nobody can tell which use prefill's room is for: both are told, long before a deadline."""
    pair.run()
    case = pair.case()
    early = pair.receive(case)
    until(lambda: pair.prefill.snapshot()["load"]["pending_requests"] == 1)
    early.abort("the user left")
    assert early.wait(quiesced=True).quiesced
    until(lambda: pair.prefill.snapshot()["load"]["pending_requests"] == 0)
    if asks == "before":
        receiving = pair.receive(case)
        until(lambda: pair.prefill.snapshot()["load"]["pending_requests"] == 1)
        assert "the user left" in pair.send(case).failed()
    else:
        assert "the user left" in pair.send(case).failed()
        receiving = pair.receive(case)
    reason = receiving.why()
    assert reason.code == "room.reused"
    assert "another id" in reason.hint
    assert receiving.wait(quiesced=True).quiesced
    late = pair.send(case)  # of the use that decode was refused
    assert late.why().code == "room.reused"
    last = pair.send(case)
    pair.push(last, case)
    pair.ended(case, pair.receive(case), last)


@TCP
def test_an_earlier_use_takes_its_grant_back_late(two_engines: TwoEngines) -> None:
    """Its instance still knows of the next use: it fails when prefill closes."""
    made = two_engines.pair(backend="faulty-tcp")
    two_engines.decode.run(FAULTS, "plan", "revoke", "block")
    case = made.case()
    receiving, sending = made.begin(case)
    made.push(sending, case)
    made.ended(case, receiving, sending)
    again = made.receive(case)
    until(lambda: bool(two_engines.decode.run(FAULTS, "struck", "block")))
    two_engines.decode.run(FAULTS, "heal")
    assert again.reach(Status.WAITING).status is Status.WAITING
    time.sleep(0.1)  # the grant is taken back
    made.prefill.close()
    assert "prefill was lost" in again.failed(10)


@TCP
def test_decode_says_of_an_earlier_use_again_that_it_gave_up(two_engines: TwoEngines) -> None:
    """It asks about memory that it cannot give back yet at every beat: that ends one room, and not the next."""
    made = two_engines.pair(backend="faulty-tcp", heartbeat=0.1)
    made.run()
    for number in range(4):  # it said so an odd or an even number of times
        two_engines.decode.run(FAULTS, "plan", "grant", "block")
        case = made.case()
        early = made.receive(case)
        early.abort("the user left")
        early.failed()
        time.sleep(0.1)  # prefill hears of it
        assert "the user left" in made.send(case).failed()
        time.sleep(0.35 + 0.1 * number)
        until(lambda: bool(two_engines.decode.run(FAULTS, "struck", "block")))
        two_engines.decode.run(FAULTS, "heal")
        assert early.wait(quiesced=True).quiesced
        sending = made.send(case)
        made.push(sending, case)
        made.ended(case, made.receive(case), sending)


@pytest.mark.parametrize("backend", ["tcp", "nixl"], indirect=True, scope="session")
def test_an_earlier_use_that_was_never_served_gets_nothing_of_the_next(pair: Pair) -> None:
    """Both sides are told; so is who asks for the use that failed with it, and then the id is free again."""
    pair.run()
    for _ in range(5):
        case = pair.case()
        first = pair.send(case)
        first.abort("the user left")
        assert first.wait(quiesced=True).quiesced
        second = pair.send(case)
        pair.push(second, case)
        for _ in range(2):
            receiving = pair.receive(case)
            reason = receiving.why()
            assert reason.code == "room.reused"
            assert receiving.wait(quiesced=True).quiesced
            assert second.why() == reason
        assert second.wait(quiesced=True).quiesced
        assert pair.decode.memory.differences(pair.expected) == []
        third = pair.send(case)
        pair.push(third, case)
        pair.ended(case, pair.receive(case), third)
