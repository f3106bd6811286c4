"""Peers that stand still in the middle of a move: they cost nobody else anything, however many they are."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.pair import Pair
from tests.helpers.peers import until
from tests.helpers.pools import Kv

from statelink import Status

if TYPE_CHECKING:
    from tests.link.conftest import TwoEngines

PATIENT: dict[str, Any] = {"heartbeat": 0.25, "liveness": 60.0, "deadline": 90.0}
"""So that nothing ends while it is looked at: whoever waits for what is stopped waits in vain."""
BACKENDS = pytest.mark.parametrize("backend", ["tcp", "nixl", "mooncake"], indirect=True, scope="session")


@BACKENDS
def test_stopped_decodes_delay_no_other(two_engines: TwoEngines) -> None:
    """As many as there are data threads, each with a room that is being moved; a third's rooms go on as before."""
    threads = 2
    prefill = two_engines.open("prefill", [Kv()], threads=threads, **PATIENT)
    doomed = [two_engines.engine() for _ in range(threads)]
    pairs = [Pair(prefill, two_engines.open("decode", [Kv()], engine=each, **PATIENT)) for each in doomed]
    other = Pair(prefill, two_engines.open("decode", [Kv()], **PATIENT))
    for pair in (*pairs, other):
        pair.run(32)
    rooms = []
    for pair, engine in zip(pairs, doomed, strict=True):
        case = pair.case(200)
        receiving, sending = pair.begin(case)
        sending.reach(Status.WAITING)
        engine.stop()
        pair.push(sending, case)
        sending.reach(Status.TRANSFERRING)
        rooms.append((pair, case, receiving, sending))
    try:
        for _ in range(3):
            other.run(32)
        assert [sending.see().status for *_, sending in rooms] == [Status.TRANSFERRING] * threads
    finally:
        for engine in doomed:
            engine.go_on()
    for pair, case, receiving, sending in rooms:
        pair.ended(case, receiving, sending)


@pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")
def test_connections_that_hang_delay_no_other(two_engines: TwoEngines) -> None:
    """Two prefills keep the calls that connect to them waiting; a third is connected and serves."""
    backend = f"faulty-{two_engines.backend}"
    engine = two_engines.decode
    decode = two_engines.open("decode", [Kv()], backend=backend, **PATIENT)
    engine.run("faulty_backends", "plan", "connect", "block", 0, 2)
    waits = []
    for number in range(2):
        prefill = two_engines.open("prefill", [Kv()], backend=backend, **PATIENT)
        waits.append(decode.receive(70 + number, prefill.address, 32))
    until(lambda: engine.run("faulty_backends", "struck", "block") == 2)
    Pair(two_engines.open("prefill", [Kv()], backend=backend, **PATIENT), decode).run(32)
    assert [room.see().status for room in waits] == [Status.BOOTSTRAPPING] * 2
    engine.run("faulty_backends", "heal")
    for room in waits:
        room.reach(Status.WAITING)
        room.abort()
        room.failed()


def on(*cases: tuple[str, str]) -> pytest.MarkDecorator:
    """Backends, and what becomes of who was stopped."""
    return pytest.mark.parametrize(("backend", "after"), cases, indirect=["backend"], scope="session")


def run_again(pair: Pair) -> None:
    """A request goes well. Those before it may fail: decode finds out by them that prefill had given it up."""
    for _ in range(10):
        case = pair.case(32)
        receiving, sending = pair.begin(case)
        pair.push(sending, case)
        seen = receiving.wait(20.0, quiesced=True)
        if seen.status is Status.SUCCEEDED:
            break
        assert seen.reason is not None
        assert seen.reason.code == "peer.lost", seen
        sending.abort()
        sending.failed()
        pair.spoilt(case)
    pair.ended(case, receiving, sending)


@on(("tcp", "goes on"), ("tcp", "is killed"), ("mooncake", "is killed"))
def test_what_a_stopped_decode_was_to_get_comes_back(two_engines: TwoEngines, after: str) -> None:
    """Prefill's memory waits for the proof that nobody gets its bytes any more; then the link closes cleanly, too."""
    hasty = {**PATIENT, "liveness": 2.0}
    doomed = two_engines.engine()
    prefill = two_engines.open("prefill", [Kv()], **hasty)
    pair = Pair(prefill, two_engines.open("decode", [Kv()], engine=doomed, **hasty))
    pair.run(32)
    case = pair.case(200)
    _, sending = pair.begin(case)
    sending.reach(Status.WAITING)
    doomed.stop()
    pair.push(sending, case)
    assert "decode was lost" in sending.failed()
    time.sleep(2.0)  # longer than it takes where there is proof
    assert not sending.see().quiesced, (sending.why(), prefill.snapshot())
    if after == "is killed":
        doomed.kill()
    else:
        doomed.go_on()
    assert sending.wait(quiesced=True).quiesced
    assert prefill.snapshot()["quarantined"] == []
    if after == "goes on":
        pair.pardon(case)
        run_again(pair)
    assert prefill.close(5.0)
