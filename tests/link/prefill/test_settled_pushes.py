"""One push is settled: every destination has it, and nothing reads its memory, although the room goes on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.expect import carry
from tests.helpers.fleet import Fleet
from tests.link.test_topology import sharded, shards
from tests.link.test_verify import FAULTY

from statelink import Status

if TYPE_CHECKING:
    from tests.helpers.engine import RoomHandle
    from tests.helpers.pair import Pair
    from tests.link.conftest import TwoEngines


def settles(sending: RoomHandle, count: int) -> None:
    """Wait until so many pushes have settled, and no more."""
    until = time.monotonic() + 20
    while (seen := sending.see()).settled < count and time.monotonic() < until:
        time.sleep(0.002)
    assert (seen.settled, seen.status) == (count, Status.TRANSFERRING), seen


def push(made: Pair, sending: RoomHandle, case: Any, first: int, last: int, **named: Any) -> None:
    sending.push(case.span(first, last, made.prefill.memory.pools), span=(first, last), **named)


def test_an_engine_uses_the_pages_of_a_settled_push_again(pair: Pair) -> None:
    """While the room goes on: what is there later is not what decode gets."""
    case = pair.case(200)
    receiving, sending = pair.begin(case)
    carry([pair.prefill.memory], pair.expected, case)
    assert sending.see().settled == 0
    for number, (first, last) in enumerate(((0, 64), (64, 128))):
        push(pair, sending, case, first, last)
        settles(sending, number + 1)
        assert not sending.see().quiesced
        for name in ("kv", "dsa"):
            pages = case.span(first, last, pair.prefill.memory.pools)[name]
            for memory in (pair.prefill.memory, pair.untouched):
                for array in memory.arrays[name].values():
                    if len(array):
                        array[pages] = 0
    push(pair, sending, case, 128, 200)
    receiving.succeeded()
    assert sending.succeeded().settled == 3
    pair.done(case)
    pair.verify()


def test_a_page_holds_other_positions_once_its_push_is_settled(pair: Pair) -> None:
    """Such as that of a request that was preempted, and is computed again."""
    case = pair.case(200)
    receiving, sending = pair.begin(case)
    carry([pair.prefill.memory], pair.expected, case)
    push(pair, sending, case, 0, 64)
    settles(sending, 1)
    for memory in (pair.prefill.memory, pair.untouched):
        for array in memory.arrays["kv"].values():
            array[case.source["kv"][:4]] = array[case.source["kv"][4:8]]
    rest = case.span(64, 200, pair.prefill.memory.pools)
    sending.push({**rest, "kv": [*case.source["kv"][:4], *rest["kv"][4:]]}, span=(64, 200))
    receiving.succeeded()
    sending.succeeded()
    pair.done(case)
    pair.verify()


def test_a_push_that_waits_is_not_settled(pair: Pair) -> None:
    """For decode, or for its event. Those behind it wait, too."""
    case = pair.case(200)
    gate = pair.prefill.engine.gate("event")
    sending = pair.send(case)
    push(pair, sending, case, 0, 64)
    time.sleep(0.05)
    assert sending.see().settled == 0
    receiving = pair.receive(case)
    settles(sending, 1)
    push(pair, sending, case, 64, 128, ready=gate)
    push(pair, sending, case, 128, 200)
    time.sleep(0.05)
    assert sending.see().settled == 1
    pair.prefill.engine.release(gate)
    pair.ended(case, receiving, sending)
    assert sending.see().settled == 3


def test_the_pushes_of_a_room_that_fails_before_decode_asked_are_settled(pair: Pair) -> None:
    case = pair.case(200)
    sending = pair.send(case)
    push(pair, sending, case, 0, 64)
    sending.abort("as planned")
    assert "as planned" in sending.failed()
    assert sending.wait(quiesced=True).settled == 1
    push(pair, sending, case, 64, 128)
    assert sending.see().settled == 1, "the room did not take this one"
    pair.done(case)


FAULTS = pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")


@FAULTS
def test_what_a_failed_room_left_behind_is_not_settled(two_engines: TwoEngines) -> None:
    """Until the library has ended it, and nothing reads the memory."""
    made = two_engines.pair(backend=f"faulty-{two_engines.backend}")
    made.run()
    engine, case = two_engines.prefill, made.case()
    receiving, sending = made.begin(case)
    push(made, sending, case, 0, 64)
    settles(sending, 1)
    engine.run(FAULTY, "heal")
    engine.run(FAULTY, "plan", "submit", "hang")
    push(made, sending, case, 64, 128)
    push(made, sending, case, 128, 200)
    until = time.monotonic() + 20
    while not engine.run(FAULTY, "struck", "hang") and time.monotonic() < until:
        time.sleep(0.002)
    receiving.abort("as planned")
    assert "as planned" in sending.failed()
    time.sleep(0.05)
    seen = sending.see()
    assert (seen.settled, seen.quiesced) == (1, False)
    sending.take_back("it is needed")
    seen = sending.see()
    assert (seen.settled, seen.quiesced, seen.taken_back) == (1, True, True)
    engine.run(FAULTY, "heal")
    until = time.monotonic() + 20
    while (seen := sending.see()).settled < 3 and time.monotonic() < until:
        time.sleep(0.002)
    assert seen.settled == 3
    made.pardon(case)
    made.done(case)


@FAULTS
def test_a_push_is_settled_once_every_destination_has_it(two_engines: TwoEngines) -> None:
    """Two ranks of decode. To one of them, the second push hangs in the library."""
    backend = f"faulty-{two_engines.backend}"
    fleet = Fleet(two_engines, [sharded(0, 1)], shards(2), backend=backend)
    fleet.run(200)
    engine, case = two_engines.prefill, fleet.case(200)
    receiving = fleet.receive(case)
    (sending,) = (link.send(case.room, case.tokens, deadline=30) for link in fleet.prefill.links)
    pools = fleet.prefill.memories[0].pools
    sending.push(case.span(0, 64, pools), span=(0, 64))
    settles(sending, 1)
    engine.run(FAULTY, "heal")
    engine.run(FAULTY, "plan", "submit", "hang")
    before = sending.see().report.moved["kv"].nbytes
    sending.push(case.span(64, 128, pools), span=(64, 128))
    until = time.monotonic() + 20
    while (seen := sending.see()).report.moved["kv"].nbytes == before and time.monotonic() < until:
        time.sleep(0.002)
    assert seen.report.moved["kv"].nbytes > before, "the other rank has the second push"
    assert (seen.settled, seen.status) == (1, Status.TRANSFERRING)
    engine.run(FAULTY, "heal")
    for room in (sending, *receiving):
        assert "could not move a batch" in room.failed()
    assert sending.wait(quiesced=True).settled == 2
