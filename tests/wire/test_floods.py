"""What one connection sends takes a bounded part of a link's time and memory: large messages come in parts."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq
from tests.helpers import peers

from statelink import wire

if TYPE_CHECKING:
    from collections import Counter

TURN = 4 << 20
"""Bytes that are taken from one connection before the others have their turn."""
HELD = 128
"""Messages of one connection that wait unread in this process."""
FEW = 512
"""Most such messages."""
UNFINISHED = 32 << 20
"""Bytes of messages whose last part is missing, of all who have not introduced themselves."""


@contextlib.contextmanager
def stranger(address: str) -> Iterator[zmq.Socket[bytes]]:
    with peers.dialled(address, "stranger") as made:
        yield made


@pytest.fixture
def listening() -> Iterator[wire.Channel]:
    channel = wire.Channel("p", "tcp://127.0.0.1:0", advertise="", keys=None, insecure=False)
    woken, waking = os.pipe()
    channel.start(woken, lambda name: name == "friend")
    yield channel
    channel.close()
    os.close(woken)
    os.close(waking)


def test_one_turn_takes_a_bounded_number_of_bytes(listening: wire.Channel) -> None:
    size = 200_000
    with stranger(listening.endpoint.address) as socket:
        for _ in range(64):
            socket.send_multipart([b"x", bytes(size)])
        time.sleep(0.3)  # until they wait in this process
        most = TURN // size + 2
        while listening.dropped.total() < 64:
            before = listening.dropped.total()
            assert list(listening.receive(5.0)) == []
            assert listening.dropped.total() - before <= most


def test_one_turn_takes_a_bounded_time(listening: wire.Channel) -> None:
    """Who handles messages slowly takes one of them, and then the others have their turn."""
    with stranger(listening.endpoint.address) as socket:
        for _ in range(8):
            socket.send_multipart(wire.encode(wire.Ping(sender="stranger")))
        counts: list[int] = []
        while sum(counts) < 8:
            taken = 0
            for _ in listening.receive(5.0):
                taken += 1
                time.sleep(0.02)
            counts.append(taken)
        assert max(counts) == 1


def test_little_is_held_of_who_is_not_read(listening: wire.Channel) -> None:
    """ZeroMQ stops to read from a connection; the rest waits at its sender."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger, socket.sndhwm, socket.sndtimeo = 0, 1, 500
    socket.connect(listening.endpoint.address)
    sent = 0
    try:
        with contextlib.suppress(zmq.Again):
            while sent < 10 * HELD:
                socket.send_multipart([b"x", bytes(250_000)])
                sent += 1
    finally:
        socket.close()
        context.term()
    assert sent < 2 * HELD + 64, "and what the kernel's buffers hold"


def test_a_stranger_says_hello_and_nothing_else_that_is_large(listening: wire.Channel) -> None:
    large = {name: bytes(20_000) for name in ("request", "attach", "hello")}
    with stranger(listening.endpoint.address) as unknown, peers.dialled(listening.endpoint.address, "friend") as friend:
        for who in (unknown, friend):
            for kind, body in large.items():
                who.send_multipart([kind.encode(), body])
            parts = list(peers.cut([b"request", bytes(2 * peers.PART)]))
            for part in parts:
                who.send_multipart(part)
        # Of the stranger two that are large, and each part; what is left is malformed, the whole of all parts included.
        expected = {"wire.unintroduced": 2 + len(parts), "wire.body": 1 + 3 + 1}
        until = time.monotonic() + 20
        while listening.dropped.total() < sum(expected.values()) and time.monotonic() < until:
            assert list(listening.receive(0.05)) == []
    assert listening.dropped == expected


def dropped(listening: wire.Channel, count: int) -> Counter[str]:
    """What was dropped, once it is so many frames; nothing else comes meanwhile."""
    until = time.monotonic() + 20
    while listening.dropped.total() < count and time.monotonic() < until:
        assert list(listening.receive(0.05)) == []
    return listening.dropped


def test_a_part_out_of_its_place_ends_the_message(listening: wire.Channel) -> None:
    """What came before it is forgotten: the right next part is out of its place, too."""
    first, second, *_ = peers.cut([b"hello", bytes(3 * peers.PART)])
    bad = [
        [b"hello", b"x", b"short"],
        [b"hello", second[1], struct.pack("<QQ", 2 * peers.PART, 3 * peers.PART)],
        [b"hello", second[1], struct.pack("<QQ", peers.PART, 4 * peers.PART)],
        [b"hello", bytes(peers.PART), struct.pack("<QQ", peers.PART, peers.PART + 5)],
        [b"hello", b"", second[2]],
    ]
    with stranger(listening.endpoint.address) as socket:
        for number, each in enumerate(bad, 1):
            for frames in (first, each, second):
                socket.send_multipart(frames)
            assert dropped(listening, 2 * number) == {"wire.frames": 2 * number}
        whole = wire.limit_of(wire.Hello) + 1
        socket.send_multipart([b"hello", first[1], struct.pack("<QQ", 0, whole)])
        assert dropped(listening, 2 * len(bad) + 1)["wire.size"] == 1


def test_unfinished_messages_of_strangers_are_bounded(listening: wire.Channel) -> None:
    """Whoever has said nothing for longest gives way, and the latest are heard."""
    size = wire.MAX_HANDSHAKE
    count = UNFINISHED // size + 2
    parts = [list(peers.cut(_hello(f"stranger-{number}", size))) for number in range(count)]
    with contextlib.ExitStack() as stack:
        address = listening.endpoint.address
        sockets = [stack.enter_context(peers.dialled(address, f"stranger-{number}")) for number in range(count)]
        for socket, messages in zip(sockets, parts, strict=True):
            for frames in messages[:-1]:
                socket.send_multipart(frames)
            settled(listening)
        heard: list[str] = []
        for socket, messages in zip(sockets, parts, strict=True):
            socket.send_multipart(messages[-1])
        until = time.monotonic() + 20
        while len(heard) + listening.dropped.total() < count and time.monotonic() < until:
            heard += [message.sender for message, _ in listening.receive(0.05)]
    assert sorted(heard) == [f"stranger-{number}" for number in range(2, count)]
    assert listening.dropped == {"wire.frames": 2}


def test_unfinished_messages_of_strangers_are_few_however_short(listening: wire.Channel) -> None:
    """Nobody says when a connection ends, and a stranger may open one after the other."""
    address, body = listening.endpoint.address, wire.MAX_HANDSHAKE
    begins, goes_on = [b"hello", b"x", struct.pack("<QQ", 0, body)], [b"hello", b"x", struct.pack("<QQ", 1, body)]
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(stranger(address))
        for number in range(FEW + 1):
            with contextlib.ExitStack() as own:
                last = own.enter_context(stranger(address)) if number else first
                last.send_multipart(begins)
                last.send_multipart([b"no kind", b""])
                assert dropped(listening, number + 1) == {"wire.kind": number + 1}
                if number == FEW:
                    stack.push(own.pop_all())
        for latest, refused in ((last, 0), (first, 1)):
            latest.send_multipart(goes_on)
            latest.send_multipart([b"no kind", b""])
            assert dropped(listening, FEW + 2 + 2 * refused)["wire.frames"] == refused


def settled(listening: wire.Channel) -> None:
    """Take all that comes, until nothing does: no message is whole."""
    quiet = 0
    while quiet < 3:
        before = time.monotonic()
        assert list(listening.receive(0.05)) == []
        quiet = quiet + 1 if time.monotonic() - before >= 0.05 else 0


def test_the_largest_introduction_is_taken_in_parts(listening: wire.Channel) -> None:
    with stranger(listening.endpoint.address) as socket:
        for frames in peers.cut(_hello("stranger", wire.MAX_HANDSHAKE)):
            socket.send_multipart(frames)
        got: list[wire.Message] = []
        until = time.monotonic() + 20
        while not got and time.monotonic() < until:
            got += [message for message, _ in listening.receive(0.05)]
    assert isinstance(got[0], wire.Hello)
    assert len(bytes(got[0].handshake)) == wire.MAX_HANDSHAKE
    assert not listening.dropped


def _hello(name: str, nbytes: int) -> list[bytes]:
    """An introduction of so many bytes."""
    raw = msgspec.Raw(msgspec.msgpack.encode(bytes(nbytes - 5)))
    return wire.encode(wire.Hello(sender=name, handshake=raw))
