"""A prefill that does not answer, or that a directory does not know. Rooms fail long before their deadlines."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.links import link_of
from tests.helpers.pair import Pair
from tests.helpers.peers import until

from statelink import Status
from statelink.rendezvous import RendezvousServer

if TYPE_CHECKING:
    from tests.link.conftest import TwoEngines

QUICK: dict[str, Any] = {"heartbeat": 0.1, "liveness": 1.0}
FAR = 600.0
"""Seconds: a deadline that never comes during a test."""


@pytest.fixture
def mute() -> Iterator[str]:
    """An address that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield f"tcp://127.0.0.1:{made.getsockname()[1]}"


@pytest.fixture
def free() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        return f"tcp://127.0.0.1:{made.getsockname()[1]}"


@pytest.mark.parametrize(("where", "said"), [("mute", "takes connections"), ("free", "nothing listens there")])
def test_a_peer_that_was_never_heard(where: str, said: str, request: pytest.FixtureRequest) -> None:
    address = request.getfixturevalue(where)
    with link_of("decode", **QUICK) as decode:
        for number in (1, 2):  # the second one after the first was given up
            room = decode.receive(number, address, 4, {"kv": [1]}, deadline=FAR)
            assert room.wait(30) is Status.FAILED
            assert room.reason is not None
            assert room.reason.code == "peer.unreachable"
            assert said in str(room.reason)
            assert room.quiesced, "nobody was asked to write"


@pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")
def test_a_peer_that_is_lost_fails_new_rooms_and_heals(two_engines: TwoEngines) -> None:
    """Its process stands still. Rooms under way fail, and so does what comes later; afterwards all is as before."""
    engine = two_engines.engine()
    pair = Pair(
        two_engines.open("prefill", engine=engine, **QUICK), two_engines.open("decode", **{**QUICK, "deadline": FAR})
    )
    pair.run()
    engine.stop()
    try:
        codes = []
        for case in (pair.case(), pair.case()):
            receiving = pair.receive(case)
            codes.append(receiving.why(30).code)
            pair.pardon(case)
        assert codes[1] == "peer.unreachable", codes
        assert codes[0] in ("peer.lost", "peer.unreachable")
    finally:
        engine.go_on()
    pair.run()


def test_an_instance_that_is_not_registered() -> None:
    with RendezvousServer() as directory, link_of("decode", rendezvous=directory.address, **QUICK) as decode:
        room = decode.receive(1, "prefill-0", 4, {"kv": [1]}, deadline=FAR)
        assert room.wait(30) is Status.FAILED
        assert room.reason is not None
        assert room.reason.code == "peer.unreachable"
        assert "nobody of this name is registered with the rendezvous server" in str(room.reason)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RendezvousServer]:
    """A directory with two ranks of data parallelism, whose names an engine has made, and with another instance."""
    with (
        RendezvousServer(lifetime=1.0) as directory,
        link_of("prefill", "prefill-0_dp0", rendezvous=directory.address),
        link_of("prefill", "prefill-0_dp1", rendezvous=directory.address),
        link_of("prefill", "prefill-01", rendezvous=directory.address),
    ):
        until(lambda: len(directory.snapshot()["instances"]) == 3)
        yield directory


def test_a_name_that_only_begins_those_that_are_registered(ranks: RendezvousServer) -> None:
    """An engine has added to it. Nobody waits for it."""
    with link_of("decode", rendezvous=ranks.address, **{**QUICK, "liveness": FAR}) as decode:
        room = decode.receive(1, "prefill-0", 4, {"kv": [1]}, deadline=FAR)
        assert room.wait(30) is Status.FAILED
        assert room.reason is not None
        assert room.reason.code == "peer.unknown"
        assert room.reason.cause is not None
        assert room.reason.cause.endswith(" are prefill-0_dp0, prefill-0_dp1")


def test_a_name_with_another_number_than_those_that_are_registered(ranks: RendezvousServer) -> None:
    """Its instance may be starting. When the wait is over, the reason lists what is there."""
    with link_of("decode", rendezvous=ranks.address, **QUICK) as decode:
        room = decode.receive(1, "prefill-0_dp7", 4, {"kv": [1]}, deadline=FAR)
        assert room.wait(30) is Status.FAILED
        assert room.reason is not None
        assert room.reason.code == "peer.unreachable"
        assert "and prefill-0_dp0, prefill-0_dp1 are" in str(room.reason)


def test_a_name_is_waited_for_where_ranks_may_not_have_registered_again() -> None:
    """The directory has just started. So an instance of just this name may be there that it does not know."""
    with (
        RendezvousServer(lifetime=FAR) as directory,
        link_of("prefill", "prefill-0_dp0", rendezvous=directory.address),
        link_of("decode", rendezvous=directory.address, **QUICK) as decode,
    ):
        until(lambda: len(directory.snapshot()["instances"]) == 2)
        room = decode.receive(1, "prefill-0", 4, {"kv": [1]}, deadline=FAR)
        assert room.wait(30) is Status.FAILED
        assert room.reason is not None
        assert room.reason.code == "peer.unreachable"
