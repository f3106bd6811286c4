"""Links whose engine gives its memory away for a while, and gets it back at the same addresses."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.helpers.fleet import Fleet
from tests.helpers.links import link_of
from tests.helpers.peers import cut, dialled, until
from tests.link import remapping
from tests.link.test_staged import hang
from tests.link.test_topology import TCP, shards
from tests.link.test_verify import FAULTY

from statelink import Status, wire
from statelink.errors import ClosedError, RoomError, StateError, TransferError
from statelink.tcp import TcpBackend
from statelink.testing import free_addresses

if TYPE_CHECKING:
    from tests.helpers.engine import LinkHandle
    from tests.link.conftest import TwoEngines

HELD = 4
"""Largest handshakes that a suspended link keeps."""


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_memory_that_is_gone_for_a_while(two_engines: TwoEngines, side: str) -> None:
    """It is unmapped meanwhile. Link, name and address stay; the other side need not do anything."""
    made = two_engines.pair()
    made.run()
    link = made.prefill if side == "prefill" else made.decode
    before = link.snapshot()
    link.suspend()
    assert link.snapshot()["suspended"]
    link.engine(remapping.unmap, link.key)
    case = made.case()
    with pytest.raises(ClosedError, match="the link is suspended") as caught:
        made.send(case) if side == "prefill" else made.receive(case)
    assert caught.value.code == "closed.suspended"
    other = made.receive(case) if side == "prefill" else made.send(case)
    with pytest.raises(StateError):  # the memory is not there
        link.resume()
    assert link.snapshot()["suspended"]
    link.engine(remapping.map_again, link.key)
    link.resume()
    receiving, sending = (other, made.send(case)) if side == "prefill" else (made.receive(case), other)
    made.push(sending, case)
    made.ended(case, receiving, sending)
    after = link.snapshot()
    assert not after["suspended"]
    assert (after["link"], after["address"]) == (before["link"], before["address"])
    link.suspend()
    link.suspend()  # which does nothing
    link.resume()
    link.resume()
    made.run()


@pytest.mark.soak_over("mooncake", why="who gives memory away first is the link's matter")
def test_one_rank_after_the_other(two_engines: TwoEngines) -> None:
    """All ranks of both instances give their memory away, as in a fleet that waits for new weights."""
    ranks = shards(2)
    fleet = Fleet(two_engines, ranks, ranks)
    fleet.run(64)
    links: list[LinkHandle] = [*fleet.prefill.links, *fleet.decode.links]
    for link in links:
        link.suspend()
    for link in reversed(links):
        link.resume()
    fleet.run(64)


@TCP
def test_rooms_that_have_not_ended_are_in_the_way(two_engines: TwoEngines) -> None:
    made = two_engines.pair()
    case = made.case()
    receiving, sending = made.begin(case)
    for link in (made.prefill, made.decode):
        with pytest.raises(RoomError, match=f"rooms {case.room} have not ended") as caught:
            link.suspend()
        assert caught.value.code == "room.unfinished"
        assert not link.snapshot()["suspended"]
    made.push(sending, case)
    made.ended(case, receiving, sending)
    made.run()


def test_memory_that_is_not_quiet_is_in_the_way(two_engines: TwoEngines) -> None:
    """Also if the engine takes it back, until there is proof."""
    made = two_engines.pair(backend=f"faulty-{two_engines.backend}")
    made.run()
    case, receiving, sending = hang(two_engines, made, two_engines.prefill)
    receiving.abort("as planned")
    sending.failed()
    receiving.failed()
    held = [(made.prefill, sending), (made.decode, receiving)][: 1 if two_engines.backend == "tcp" else 2]
    for _ in range(2):
        for link, room in held:
            with pytest.raises(RoomError, match=f"rooms {case.room} have ended, and transfers of theirs") as caught:
                link.suspend(0.3)
            assert caught.value.code == "room.unfinished"
            room.take_back("it is needed")
    two_engines.prefill.run(FAULTY, "heal")
    for link in (made.decode, made.prefill):
        link.suspend()
        link.resume()
    made.spoilt(case)
    made.run()


def test_what_peers_see() -> None:
    """A room that has asked fails at once, and one that comes meanwhile waits."""
    with link_of("prefill") as prefill, link_of("decode") as decode:
        early = decode.receive(7, prefill.address, 4, {"kv": [1]})
        until(lambda: prefill.snapshot()["load"]["pending_requests"])
        prefill.suspend()
        assert early.wait(20) is Status.FAILED
        assert early.reason is not None
        assert (early.reason.code, early.reason.cause) == ("peer.lost", "it was suspended")
        late = decode.receive(8, prefill.address, 4, {"kv": [1]})
        doomed = decode.receive(9, prefill.address, 4, {"kv": [2]}, deadline=1.0)
        assert doomed.wait(20) is Status.FAILED
        assert doomed.reason is not None
        assert doomed.reason.code == "room.deadline"
        assert late.status is Status.BOOTSTRAPPING
        prefill.resume()
        sending = prefill.send(8, 4)
        sending.push({"kv": [0]})
        assert late.wait(20) is sending.wait(20) is Status.SUCCEEDED


def test_handshakes_that_wait_are_bounded() -> None:
    """However many are sent to a suspended link. Who was not heard sends another, once the link is back."""
    with link_of("prefill") as prefill:
        prefill.suspend()
        junk = msgspec.Raw(msgspec.msgpack.encode(bytes(wire.MAX_HANDSHAKE - 5)))
        for number in range(HELD + 1):
            name = f"stranger-{number}"
            with dialled(prefill.address, name) as socket:
                for frames in cut(wire.encode(wire.Hello(sender=name, handshake=junk))):
                    socket.send_multipart(frames)
                socket.send_multipart([b"no kind", b""])
                until(lambda: prefill.snapshot()["dropped_frames"].get("wire.kind", 0) > number)  # noqa: B023 # at once
        assert prefill.snapshot()["dropped_frames"]["wire.busy"] == 1
        with link_of("decode") as decode:
            receiving = decode.receive(8, prefill.address, 4, {"kv": [1]})
            until(lambda: prefill.snapshot()["dropped_frames"]["wire.busy"] > 1)
            prefill.resume()
            prefill.send(8, 4).push({"kv": [0]})
            assert receiving.wait(20) is Status.SUCCEEDED


def test_an_engine_gives_up_every_room_first() -> None:
    with link_of("prefill") as prefill, link_of("decode") as decode:
        sending = prefill.send(7, 4)
        receiving = decode.receive(7, prefill.address, 4, {"kv": [1]})
        assert (prefill.rooms(), decode.rooms()) == ([sending], [receiving])
        for link in (prefill, decode):
            for room in link.rooms():
                room.abort("as planned")
                assert room.wait(20, quiesced=True) is Status.FAILED
            link.suspend()
            assert not link.rooms()


def test_calls_of_a_suspended_link() -> None:
    with link_of("prefill") as prefill, link_of("decode") as decode:
        assert not decode.snapshot()["suspended"]
        decode.suspend()
        prefill.suspend()
        assert decode.suspended
        for call in (
            lambda: decode.receive(7, prefill.address, 4),
            lambda: decode.decline(7, prefill.address),
            lambda: decode.keep(7, prefill.address, 5),
            lambda: prefill.send(7, 4),
        ):
            with pytest.raises(ClosedError) as caught:
                call()
            assert caught.value.code == "closed.suspended"
        assert decode.changes() == []
        assert prefill.close()
        with pytest.raises(ClosedError, match="the link is closed"):
            prefill.resume()
        decode.resume()
        assert decode.close()


@pytest.mark.parametrize("how", ["suspends", "closes"])
def test_a_peer_that_could_not_be_connected_because_it_was_leaving(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its goodbye comes after the connection has failed. It is tried again at once, and not only after a while."""
    connect = TcpBackend.connect

    def refused(backend: TcpBackend, peer: str, *given: Any) -> None:
        if peer.startswith("decode"):
            return
        monkeypatch.setattr(TcpBackend, "connect", connect)
        raise TransferError("a peer cannot be connected", cause="nobody listens there", backend="tcp", peer=peer)

    monkeypatch.setattr(TcpBackend, "connect", refused)
    (address,) = free_addresses(1)
    with link_of("decode") as decode, contextlib.ExitStack() as stack:
        prefill = stack.enter_context(link_of("prefill", listen=address))
        receiving = decode.receive(7, address, 4, {"kv": [0]})
        assert receiving.wait(20) is Status.FAILED
        assert decode.snapshot()["peers"] == {address: "refused"}
        if how == "suspends":
            prefill.suspend()
            prefill.resume()
        else:
            prefill.close()
            prefill = stack.enter_context(link_of("prefill", listen=address))
        until(lambda: decode.snapshot()["peers"].get(address) != "refused", 5)
        again = decode.receive(8, address, 4, {"kv": [0]})
        sending = prefill.send(8, 4)
        sending.push({"kv": [0]})
        assert again.wait(20) is sending.wait(20) is Status.SUCCEEDED
