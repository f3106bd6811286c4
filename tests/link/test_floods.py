"""One connection that sends as much as it can: it costs the others no more than their turn, and little memory."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq
from tests.helpers import peers
from tests.helpers.links import link_of
from tests.wire.noise import resident

from statelink import Status, wire
from statelink.errors import WireError
from statelink.wire import _channel
from statelink.wire._channel import TURN_BYTES, UNREAD
from statelink.wire._parts import PART, Parts, cut

if TYPE_CHECKING:
    import statelink

MEGABYTE = 1 << 20
FLOOD = """
import itertools, sys, zmq
import msgspec
from tests.wire.largest import CASES
from statelink.wire._parts import cut
address, kind = sys.argv[1:]
context = zmq.Context()
socket = context.socket(zmq.DEALER)
socket.setsockopt_string(zmq.ROUTING_ID, "d#0")
socket.sndhwm = 8
socket.connect(address)
if kind == "nothing":
    messages = [[b"hello", bytes(250_000)], [b"request", bytes(250_000)], [b"x", bytes(250_000)]]
else:
    tree = CASES[kind](4_000_000)
    messages = list(cut([b"hello", msgspec.msgpack.encode(tree)]))
print("ready", flush=True)
for frames in itertools.cycle(messages):
    socket.send_multipart(frames, copy=False)
"""


EVERYTHING = """
import contextlib, itertools, random, sys, zmq
import msgspec
from tests.wire.largest import CASES
from tests.wire.test_fuzz import mutated
from statelink import wire
from statelink.wire._parts import cut
address, number = sys.argv[1], int(sys.argv[2])
context = zmq.Context()
socket = context.socket(zmq.DEALER)
socket.setsockopt_string(zmq.ROUTING_ID, "d#0")
socket.sndhwm = 64
socket.linger = -1
socket.connect(address)
rng = random.Random(number)
messages = []
for name, make in CASES.items():
    for size in (1_000, 14_000, 66_000, 1_000_000):
        messages.append([name.partition(":")[0].encode(), msgspec.msgpack.encode(make(size))])
messages = [(sum(map(len, each)), each) for each in messages]
weights = [1 / size for size, _ in messages]  # as many bytes of each
print("ready", flush=True)
sent = 0
while sent < number:
    kind, body = rng.choices(messages, weights)[0][1]
    if len(body) < 4000 and rng.random() < 0.3:
        body = mutated(rng, body)
    for frames in cut([kind, body]):
        socket.send_multipart(frames)
        sent += 1
socket.send_multipart(wire.encode(wire.Ping(sender="d", to="p")))
print(sent, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def flood(address: str, kind: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", FLOOD, address, kind], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == b"ready"
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def stranger(address: str) -> Iterator[zmq.Socket[bytes]]:
    with peers.dialled(address, "stranger") as made:
        yield made


@pytest.mark.parametrize("kind", ["nothing", "hello: 2 slabs", "hello: few pieces"])
def test_deadlines_are_met_beside_a_flood(kind: str) -> None:
    """Of what no peer may send, and of introductions that take long to read."""
    with link_of("prefill") as prefill, link_of("decode") as decode, flood(prefill.address, kind):
        peers.until(lambda: dropped(prefill) > 0 or prefill.snapshot()["load"]["handshakes"] > 0)
        memory = resident()
        late = 0.0
        for number in range(1, 6):
            begun = time.monotonic()
            sending = prefill.send(number, 32, deadline=0.2)
            assert sending.wait(60) is Status.FAILED
            late = max(late, time.monotonic() - begun - 0.2)
        receiving = decode.receive(7, prefill.address, 32, {"kv": [0, 1]}, deadline=60)
        sending = prefill.send(7, 32, deadline=60)
        sending.push({"kv": [0, 1]})
        assert receiving.wait(60) is Status.SUCCEEDED
        assert late < 3, "a turn takes hundredths of a second"
        assert resident() - memory < 256 * MEGABYTE


def dropped(link: statelink.Link) -> int:
    return sum(link.snapshot()["dropped_frames"].values())


@pytest.fixture
def listening() -> Iterator[wire.Channel]:
    channel = wire.Channel("p", "tcp://127.0.0.1:0", advertise="", keys=None, insecure=False)
    channel.knows = lambda name: name == "friend"
    yield channel
    channel.close()


def test_one_turn_takes_a_bounded_number_of_bytes(listening: wire.Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_channel, "TURN_SECONDS", 60.0)
    size = 200_000
    with stranger(listening.endpoint.address) as socket:
        for _ in range(64):
            socket.send_multipart([b"x", bytes(size)])
        peers.until(lambda: list(listening.receive(0.05)) == [] and listening.dropped.total() > 0)
        most = TURN_BYTES // size + 2
        while listening.dropped.total() < 64:
            before = listening.dropped.total()
            assert list(listening.receive(5.0)) == []
            assert listening.dropped.total() - before <= most


def test_one_turn_takes_a_bounded_time(listening: wire.Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who handles messages slowly takes one of them, and then the others have their turn."""
    monkeypatch.setattr(_channel, "TURN_SECONDS", 0.0)
    with stranger(listening.endpoint.address) as socket:
        for _ in range(8):
            socket.send_multipart(wire.encode(wire.Ping(sender="stranger")))
        counts: list[int] = []
        while sum(counts) < 8:
            taken = 0
            for _ in listening.receive(5.0):
                taken += 1
                time.sleep(0.001)
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
            while sent < 10 * UNREAD:
                socket.send_multipart([b"x", bytes(250_000)])
                sent += 1
    finally:
        socket.close()
        context.term()
    assert sent < 2 * UNREAD + 64, "and what the kernel's buffers hold"


def test_a_stranger_says_hello_and_nothing_else_that_is_large(listening: wire.Channel) -> None:
    large = {name: bytes(20_000) for name in ("request", "attach", "hello")}
    with stranger(listening.endpoint.address) as unknown, peers.dialled(listening.endpoint.address, "friend") as friend:
        for who in (unknown, friend):
            for kind, body in large.items():
                who.send_multipart([kind.encode(), body])
            parts = list(cut([b"request", bytes(2 * PART)]))
            for part in parts:
                who.send_multipart(part)
        # Of the stranger two that are large, and each part; what is left is malformed, the whole of all parts included.
        expected = {"wire.unintroduced": 2 + len(parts), "wire.body": 1 + 3 + 1}
        until = time.monotonic() + 20
        while listening.dropped.total() < sum(expected.values()) and time.monotonic() < until:
            assert list(listening.receive(0.05)) == []
    assert listening.dropped == expected


def test_parts_are_put_together_and_bounded() -> None:
    body = bytes(range(256)) * 5000
    first, *rest = cut([b"hello", body])
    parts = Parts(1 << 30)
    whole = [parts.add("a", part, 1 << 30) for part in (first, *rest)][-1]
    assert whole == [b"hello", body]
    assert parts.nbytes == 0
    for bad in ([b"hello", b"x", b"short"], rest[1], [b"other", *rest[0][1:]], [b"hello", b"", first[2]]):
        parts.add("a", first, 1 << 30)
        with pytest.raises(WireError) as caught:
            parts.add("a", bad, 1 << 30)
        assert caught.value.code == "wire.frames"
        assert parts.nbytes == 0, "what came before it is forgotten"
    with pytest.raises(WireError) as caught:
        parts.add("a", first, len(body) - 1)
    assert caught.value.code == "wire.size"
    few = Parts(3 * PART)
    for number in range(10):
        few.add(number, first, 1 << 30)
    assert few.nbytes <= 3 * PART, "whoever has said nothing for longest gives way"
    with pytest.raises(WireError):
        few.add(0, rest[0], 1 << 30)
    assert few.add(9, rest[0], 1 << 30) is None


def test_the_largest_introduction_is_taken_in_parts(listening: wire.Channel) -> None:
    body = wire.encode(wire.Hello(sender="stranger", handshake=_raw(wire.MAX_HANDSHAKE)))[1]
    with stranger(listening.endpoint.address) as socket:
        for frames in cut([b"hello", body]):
            socket.send_multipart(frames)
        got: list[wire.Message] = []
        until = time.monotonic() + 20
        while not got and time.monotonic() < until:
            got += [message for message, _ in listening.receive(0.05)]
    assert isinstance(got[0], wire.Hello)
    assert len(bytes(got[0].handshake)) == wire.MAX_HANDSHAKE
    assert not listening.dropped


def _raw(nbytes: int) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(bytes(nbytes - 5)))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_deadlines_are_met_beside_many_hostile_frames_of_every_kind() -> None:
    frames = 100_000
    with link_of("prefill") as prefill:
        process = subprocess.Popen(
            [sys.executable, "-c", EVERYTHING, prefill.address, str(frames)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"ready"
        sent: list[bytes] = []
        output = process.stdout
        reader = threading.Thread(target=lambda: sent.append(output.readline()))
        reader.start()
        memory = resident()
        late, rooms = [0.0], 0
        while not sent:
            rooms += 1
            begun = time.monotonic()
            assert prefill.send(rooms, 32, deadline=0.2).wait(60) is Status.FAILED
            late.append(time.monotonic() - begun - 0.2)
        reader.join()
        process.stdin.close()
        assert process.wait(60) == 0
        process.stdout.close()
        counted = prefill.snapshot()["dropped_frames"]
        print(f"{int(sent[0])} frames; {rooms} deadlines, the latest {max(late):.3f} s late; dropped: {counted}")
        assert max(late) < 1
        assert resident() - memory < 256 * MEGABYTE
