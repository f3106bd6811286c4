"""Attacks on a live link's control port: nothing that it says of itself changes, and it goes on serving."""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq
from tests.helpers import peers
from tests.helpers.links import DECODE, PREFILL, STRANGE, keys, link_of, named, state_of
from tests.link.test_malformed import examples, mutated
from tests.wire.noise import resident

from statelink import Status, wire
from statelink.errors import Reason

if TYPE_CHECKING:
    import socket

    import statelink

MEGABYTE = 1 << 20


def hello(link: statelink.Link, name: str) -> list[bytes]:
    """A right introduction of a decode link that is like this prefill link otherwise."""
    card = peers.handshake_of(name, "decode", link.inventory)
    return wire.encode(wire.Hello(sender=name, handshake=wire.write_handshake(card)))


def greeted(prefill: statelink.Link, name: str) -> bool:
    return name in prefill.snapshot()["peers"]


def serves(prefill: statelink.Link) -> None:
    """One that is allowed is heard."""
    honest = named("honest", DECODE)
    with peers.dialled(prefill.address, honest, DECODE) as socket_:
        socket_.send_multipart(hello(prefill, honest))
        assert socket_.poll(20_000), "no answer"
        assert socket_.recv_multipart()[0] == b"welcome"
        peers.until(lambda: greeted(prefill, honest))
        socket_.send_multipart(wire.encode(wire.Bye(sender=honest, to=prefill.name)))
        peers.until(lambda: not greeted(prefill, honest))


def test_keys_that_are_not_allowed_are_counted_and_get_no_descriptor(caplog: pytest.LogCaptureFixture) -> None:
    with link_of("prefill", keys=keys(PREFILL, DECODE)) as prefill:
        before = state_of(prefill)
        attempts = 40
        for number in range(attempts):
            with peers.dialled(prefill.address, f"stranger {number}", STRANGE) as socket_:
                socket_.send_multipart(hello(prefill, f"stranger {number}"))
                peers.until(lambda least=number: prefill.snapshot()["refused_keys"] > least)  # type: ignore[misc]
                assert not socket_.poll(0)
        assert state_of(prefill) == before
        assert prefill.snapshot()["dropped_frames"] == {}
        warnings = [each for each in caplog.records if "key that is not allowed" in each.getMessage()]
        assert len(warnings) <= 7, "1, 2, 4, ... 32 and perhaps 64"
        assert STRANGE["public"] in warnings[0].getMessage()
        serves(prefill)


def test_who_dials_shows_nothing_to_a_key_that_is_not_allowed() -> None:
    """The other direction of the same list: an address from a router does not decide who learns where memory is."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.ROUTER)
    server.linger = 0
    server.curve_server, server.curve_secretkey = True, STRANGE["secret"].encode()
    port = server.bind_to_random_port("tcp://127.0.0.1")
    address = peers.keyed(f"tcp://127.0.0.1:{port}", STRANGE)
    try:
        for allowed, heard in (((PREFILL,), 0), ((PREFILL, STRANGE), 1)):
            with link_of("decode", keys=keys(DECODE, *allowed)) as decode:
                room = decode.receive(1, address, 32, deadline=1.5)
                room.wait(10)
                text = str(room.reason)
                assert ("is not in this link's allow-list" in text) is not heard
                assert bool(server.poll(0)) is bool(heard)
    finally:
        server.close()
        context.term()


def test_an_allowed_peer_cannot_take_anothers_name() -> None:
    """Not the routing id, not the sender in a message; and the name is free for its owner alone."""
    victim = named("victim", DECODE)
    with link_of("prefill", keys=keys(PREFILL, DECODE, STRANGE)) as prefill:
        with peers.dialled(prefill.address, victim, DECODE) as socket_:
            socket_.send_multipart(hello(prefill, victim))
            peers.until(lambda: greeted(prefill, victim))
        before = state_of(prefill)
        bye = wire.encode(wire.Bye(sender=victim, to=prefill.name))
        with peers.dialled(prefill.address, victim, STRANGE) as thief:
            thief.send_multipart(hello(prefill, victim))
            thief.send_multipart(bye)
            peers.until(lambda: prefill.snapshot()["dropped_frames"] == {"wire.sender": 2})
            assert not thief.poll(0)
        assert state_of(prefill) == before
        with peers.dialled(prefill.address, victim, DECODE) as owner:
            owner.send_multipart(bye)
            peers.until(lambda: not greeted(prefill, victim))


@pytest.mark.parametrize("secured", [True, False])
def test_a_recorded_handshake_is_worth_nothing(secured: bool) -> None:
    """Every byte that a peer said, said again. Without keys it works, so the recording is right."""
    honest = named("honest", DECODE)
    config: dict[str, Any] = {"keys": keys(PREFILL, DECODE)} if secured else {}
    with link_of("prefill", **config) as prefill:
        recorder = peers.Recorder(prefill.address)
        through = str(wire.parse_endpoint(prefill.address)._replace(address=f"tcp://127.0.0.1:{recorder.port}"))
        with peers.dialled(through, honest, DECODE if secured else None) as socket_:
            socket_.send_multipart(hello(prefill, honest))
            peers.until(lambda: greeted(prefill, honest))
        recorder.close()
        with peers.dialled(prefill.address, honest, DECODE if secured else None) as socket_:
            socket_.send_multipart(wire.encode(wire.Bye(sender=honest, to=prefill.name)))
            peers.until(lambda: not greeted(prefill, honest))
        before = state_of(prefill)
        for _ in range(3 if secured else 50):
            cut = recorder.replay()
            if secured:
                assert cut
            elif greeted(prefill, honest):
                break  # at once, as a rule; the former connection of that name may not be gone yet
        assert greeted(prefill, honest) is not secured
        if not secured:
            return
        assert state_of(prefill) == before
        assert prefill.snapshot()["dropped_frames"] == {}
        serves(prefill)


def test_who_was_lost_in_silence_is_told_so_when_it_says_hello() -> None:
    """Its `Hello` may be older than the loss: then it takes itself for attached, and attaches again only if told."""
    with (
        link_of("prefill", heartbeat=0.05, liveness=0.3) as prefill,
        peers.dialled(prefill.address, "honest", None) as socket_,
    ):
        socket_.rcvtimeo = 20_000
        for number, expected in enumerate(([b"welcome"], [b"unknown", b"welcome"], [b"welcome"])):
            socket_.send_multipart(hello(prefill, "honest"))
            heard: list[bytes] = []
            while b"welcome" not in heard:
                kind = socket_.recv_multipart()[0]
                heard += [kind] if kind != b"pong" else []
            assert heard == expected
            if not number:
                peers.until(lambda: not greeted(prefill, "honest"))


def test_silent_and_slow_connections_are_cut_off() -> None:
    """However many there are, another is served meanwhile; and none is kept for longer than a handshake may take."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47)
    with link_of("prefill", keys=keys(PREFILL, DECODE)) as prefill:
        before = state_of(prefill)
        callers = {peers.connect(prefill.address): number % 50 for number in range(150)}
        for each, said in callers.items():
            each.sendall(greeting[:said])
        serves(prefill)
        open_ = dict(callers)
        end = time.monotonic() + 30
        while open_ and time.monotonic() < end:
            for each, said in list(open_.items()):
                if not still_open(each, greeting[said : said + 1] if said % 2 else b""):
                    del open_[each]
                else:
                    open_[each] = said + 2 * (said % 2)
            time.sleep(0.05)
        for each in callers:
            each.close()
        assert not open_, f"{len(open_)} connections were kept"
        assert state_of(prefill) == before


def still_open(each: socket.socket, say: bytes) -> bool:
    """Says a little more of what is right, or nothing; whether the connection is still there."""
    try:
        each.setblocking(False)
        each.send(say)
        return bool(each.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_oversized_frames_are_cut_off_before_they_are_kept() -> None:
    """A frame that announces more than may be sent, inside the security: its sender is cut off at the announcement."""
    with (
        link_of("prefill", keys=keys(PREFILL, DECODE)) as prefill,
        peers.dialled(prefill.address, "big", DECODE) as big,
    ):
        before = state_of(prefill)
        memory = resident()
        cut_off = big.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        big.send_multipart([b"hello", bytes(wire.MAX_FRAME + 1)])
        assert cut_off.poll(20_000), "it was let through"
        big.disable_monitor()
        cut_off.close()
        serves(prefill)
        assert state_of(prefill) == before
        assert prefill.snapshot()["dropped_frames"] == {}, "it never arrived"
    assert resident() - memory < 3 * 64 * MEGABYTE, "what was sent lies in this process too, as the sender's"


PRODUCTS: list[tuple[str, Any]] = [
    ("ranks", 1 << 40),
    ("rank", 1 << 62),
    ("regions", [[1, 1 << 63, "dram"]] * 70_000),
    ("components", [{}] * 70_000),
    ("axes", {f"axis{number}": [0, 1 << 40] for number in range(5_000)}),
]


@pytest.mark.parametrize(("field", "value"), PRODUCTS, ids=[field for field, _ in PRODUCTS])
def test_inventories_that_promise_too_much(field: str, value: Any) -> None:
    """One field of an introduction of an allowed peer is out of all bounds: it is refused, and takes no memory."""
    name = named("vast", DECODE)
    with (
        link_of("prefill", keys=keys(PREFILL, DECODE)) as prefill,
        peers.dialled(prefill.address, name, DECODE) as vast,
    ):
        before = state_of(prefill)
        tree = msgspec.msgpack.decode(
            bytes(wire.write_handshake(peers.handshake_of(name, "decode", prefill.inventory)))
        )
        assert field in tree["inventory"]
        tree["inventory"][field] = value
        memory = resident()
        for frames in peers.cut([b"hello", msgspec.msgpack.encode({"sender": name, "handshake": tree})]):
            vast.send_multipart(frames)
        assert vast.poll(20_000)
        assert vast.recv_multipart()[0] == b"refuse"
        assert resident() - memory < 32 * MEGABYTE
        assert state_of(prefill) == before


def test_a_flood_from_an_allowed_key_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Changed and random frames, the handshake's among them, from somebody who may speak and was not introduced."""
    order = random.Random(5)
    frames, name = 4000, named("flood", DECODE)
    caplog.set_level(logging.INFO, "statelink")
    with link_of("prefill", keys=keys(PREFILL, DECODE)) as prefill:
        before = state_of(prefill)
        with peers.dialled(prefill.address, name, DECODE) as flood:
            flood.rcvtimeo = 20_000
            good = [*examples(prefill, name), hello(prefill, name)]  # type: ignore[arg-type]
            bye = wire.encode(wire.Bye(sender=name, to=prefill.name))
            memory = 0
            for number in range(frames):
                if number == frames // 4:
                    memory = resident()
                noise = order.random() < 0.3
                flood.send_multipart(
                    [order.randbytes(order.choice([0, 5, 60, 900])) for _ in range(order.choice([1, 2, 2, 3]))]
                    if noise
                    else mutated(order.choice(good), order)
                )
                while flood.poll(0):
                    flood.recv_multipart()
            flood.send_multipart(bye)
            use: Any = {"sender": name, "to": prefill.name, "room": 424_242, "generation": 1}
            flood.send_multipart(wire.encode(wire.Request(**use, tokens=1, prefix=0)))
            unknown = wire.encode(wire.Unknown(sender=prefill.name, to=name, room=424_242, generation=1))
            while flood.recv_multipart() != unknown:  # everything before it has been handled
                pass
        assert state_of(prefill) == before
        assert resident() - memory < 48 * MEGABYTE
        dropped = sum(prefill.snapshot()["dropped_frames"].values())
        logged = [each for each in caplog.records if "dropped a frame" in each.getMessage()]
        assert dropped > frames // 3
        assert len(logged) < 70, "a few for each kind, whatever their number"
        assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []
        serves(prefill)


def test_answers_to_who_dialled_may_be_anything() -> None:
    """A server that decode dialled, and allowed, answers with what it likes: that room ends with a reason."""
    order, name = random.Random(6), named("server", PREFILL)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.ROUTER)
    server.linger = 0
    server.curve_server, server.curve_secretkey = True, PREFILL["secret"].encode()
    port = server.bind_to_random_port("tcp://127.0.0.1")
    address = peers.keyed(f"tcp://127.0.0.1:{port}", PREFILL)
    try:
        with link_of("decode", keys=keys(DECODE, PREFILL)) as decode:
            room = decode.receive(1, address, 32, deadline=30)
            assert server.poll(20_000)
            routing, kind, _ = server.recv_multipart()
            assert kind == b"hello"
            good = [
                frames
                for frames in examples(decode, name)  # type: ignore[arg-type]
                if frames[0] not in (b"refuse", b"bye", b"unknown")
            ]
            for _ in range(1500):
                frames = mutated(order.choice(good), order)
                if frames[0] not in (b"refuse", b"bye", b"unknown", b"welcome"):
                    server.send_multipart([routing, *frames])
            before = state_of(decode)
            assert before["rooms"]["bootstrapping"] == 1
            refusal = wire.encode(wire.Refuse(sender=name, to=decode.name, reason=Reason("x.y", "enough of this")))
            end = time.monotonic() + 25
            while room.wait(0.1) is not Status.FAILED and time.monotonic() < end:
                while server.poll(0):  # it dials anew now and then while nobody says who he is
                    routing = server.recv_multipart()[0]
                server.send_multipart([routing, *refusal])
            assert str(room.reason).startswith("enough of this")
            assert room.quiesced
            assert sum(decode.snapshot()["dropped_frames"].values()) > 300
    finally:
        server.close()
        context.term()
