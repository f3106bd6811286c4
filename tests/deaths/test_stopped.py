"""Peers that stand still in the middle of a move: they cost nobody else anything, however many they are."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.pair import Pair
from tests.helpers.peers import until
from tests.helpers.pools import Kv

from statelink import Status

if TYPE_CHECKING:
    from tests.link.conftest import Workshop

PATIENT: dict[str, Any] = {"heartbeat": 0.25, "liveness": 60.0, "deadline": 90.0}
"""So that nothing ends while it is looked at: whoever waits for what is stopped waits in vain."""
BACKENDS = pytest.mark.parametrize("backend", ["tcp", "nixl", "mooncake"], indirect=True, scope="session")


@BACKENDS
def test_stopped_decodes_delay_no_other(workshop: Workshop) -> None:
    """As many as there are data threads, each with a room that is being moved; a third's rooms go on as before."""
    threads = 2
    prefill = workshop.open("prefill", [Kv()], threads=threads, **PATIENT)
    doomed = [workshop.engine() for _ in range(threads)]
    pairs = [Pair(prefill, workshop.open("decode", [Kv()], engine=each, **PATIENT)) for each in doomed]
    other = Pair(prefill, workshop.open("decode", [Kv()], **PATIENT))
    for pair in (*pairs, other):
        pair.run(32)
    rooms = []
    for pair, engine in zip(pairs, doomed, strict=True):
        case = pair.case(200)
        receiving, sending = pair.begin(case)
        sending.reach(Status.WAITING)
        engine.signal(signal.SIGSTOP)
        pair.push(sending, case)
        sending.reach(Status.TRANSFERRING)
        rooms.append((pair, case, receiving, sending))
    try:
        for _ in range(3):
            other.run(32)
        assert [sending.see().status for *_, sending in rooms] == [Status.TRANSFERRING] * threads
    finally:
        for engine in doomed:
            engine.signal(signal.SIGCONT)
    for pair, case, receiving, sending in rooms:
        pair.ended(case, receiving, sending)


@pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")
def test_connections_that_hang_delay_no_other(workshop: Workshop) -> None:
    """Two prefills keep the calls that connect to them waiting; a third is connected and serves."""
    backend = f"faulty-{workshop.backend}"
    engine = workshop.decode
    decode = workshop.open("decode", [Kv()], backend=backend, **PATIENT)
    engine.run("faulty_backends", "plan", "connect", "block", 0, 2)
    waits = []
    for number in range(2):
        prefill = workshop.open("prefill", [Kv()], backend=backend, **PATIENT)
        waits.append(decode.receive(70 + number, prefill.address, 32))
    until(lambda: engine.run("faulty_backends", "struck", "block") == 2)
    Pair(workshop.open("prefill", [Kv()], backend=backend, **PATIENT), decode).run(32)
    assert [room.see().status for room in waits] == [Status.BOOTSTRAPPING] * 2
    engine.run("faulty_backends", "heal")
    for room in waits:
        room.reach(Status.WAITING)
        room.abort()
        room.failed()
