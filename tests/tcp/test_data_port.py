"""Attacks on the data port of the embedded backend: no byte lands, and others are served meanwhile."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import struct
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from tests.helpers.links import Recorder
from tests.tcp.common import HEADER, POISON, Caller, grant_all, u64, untouched
from tests.tcp.node import Node, make_file, wait_for

from statelink.tcp import _frames, _handshake
from statelink.tcp._descriptor import Descriptor
from statelink.tcp._stream import Lost, Stream

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator


@pytest.fixture
def here() -> Iterator[Node]:
    path = make_file(1 << 20)
    node = Node(path)
    node.memory[:] = POISON
    os.unlink(path)
    yield node
    node.close_all()


@pytest.fixture
def caller(here: Node) -> Iterator[Caller]:
    """``source``, to whom ``target`` has granted everything for room 1, generation 1."""
    theirs = here.open("target", same_host_copy=False, handshake_timeout=0.5, max_pending=8)
    here.connect("target", "source", here.open("source", same_host_copy=False))
    here.connect("source", "target", theirs)
    grant_all(here)
    made = Caller(here, "source", theirs, "target")
    yield made
    made.waker.close()


def write_frame(here: Node, room: int, generation: int, *, at: int = 0, nbytes: int = 8) -> bytes:
    header = HEADER.pack(b"SLw1", 1, 1, 1, room, generation, nbytes)
    return header + struct.pack("<QQ", here.address + at, nbytes) + b"x" * nbytes


def answer(stream: Stream) -> tuple[_frames.Status, str]:
    raw = bytearray(_frames.REPLY.size)
    stream.read(memoryview(raw), time.monotonic() + 10)
    reply = _frames.unpack_reply(raw)
    reason = bytearray(reply.length)
    stream.read(memoryview(reason), time.monotonic() + 10)
    return reply.status, reason.decode()


def honest(here: Node) -> bool:
    """The granted peer writes where nothing else does."""
    source, target = u64(here.address), u64(here.address + (1 << 19))
    ok: bool = here.outcome(here.write("source", "target", 1, 1, source, target, u64(64))).ok
    return ok


@pytest.mark.parametrize(
    ("room", "generation"), [(1, 2), (1, 0), (2, 1), (0, 0), ((1 << 64) - 1, 1), (1, (1 << 64) - 1)]
)
def test_a_grant_is_for_one_use_of_one_room(here: Node, caller: Caller, room: int, generation: int) -> None:
    stream = caller.dial()
    stream.write(write_frame(here, room, generation))
    status, reason = answer(stream)
    assert status is _frames.Status.REFUSED
    assert f"no grant for room {room}, generation {generation}" in reason
    assert untouched(here.memory)
    stream.write(write_frame(here, 1, 1))  # while the right one is taken on the same connection
    assert answer(stream)[0] is _frames.Status.DONE
    stream.close()


def test_a_grant_is_for_one_peer(here: Node, caller: Caller) -> None:
    """Another peer of the same target, authenticated, that names the room and the ranges of the first."""
    here.connect("target", "other", here.open("other", same_host_copy=False))
    here.grant("target", "other", 5, 1, u64(here.address + 4096), u64(100))
    caller.pose(here, "other")
    stream = caller.dial()
    for frame in (write_frame(here, 1, 1), write_frame(here, 5, 1), write_frame(here, 5, 1, at=4096 + 93)):
        stream.write(frame)
        assert answer(stream)[0] is _frames.Status.REFUSED
    assert untouched(here.memory)
    stream.write(write_frame(here, 5, 1, at=4096 + 92))
    assert answer(stream)[0] is _frames.Status.DONE
    stream.close()


def test_another_incarnations_grant(here: Node, caller: Caller) -> None:
    """The peer was started anew under its name: neither process may use what the old one had."""
    old = caller.dial()
    here.close("source")
    here.connect("target", "source", here.open("source", same_host_copy=False))
    with contextlib.suppress(Lost):
        old.write(write_frame(here, 1, 1))
    with pytest.raises(Lost):
        answer(old)
    old.close()
    caller.pose(here, "source")
    stream = caller.dial()
    stream.write(write_frame(here, 1, 1))
    assert answer(stream)[0] is _frames.Status.REFUSED
    stream.close()
    assert untouched(here.memory)


@pytest.mark.parametrize("fresh", [True, False])
def test_a_recorded_connection_is_worth_nothing(
    here: Node, caller: Caller, fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte of a connection that wrote, sent again while the grant still holds.

    Where the receiver's challenge is always the same one, it works: the recording is right.
    """
    if not fresh:
        monkeypatch.setattr(secrets, "token_bytes", bytes)
    recorder = Recorder("127.0.0.1", caller.peer.port)
    through = msgspec.structs.replace(caller.peer, port=recorder.port).encode()
    here.connect("source", "target", through)
    assert here.outcome(here.write("source", "target", 1, 1, u64(here.address + 9000), u64(here.address), u64(100))).ok
    here.disconnect("source", "target")
    recorder.close()
    here.memory[:] = POISON
    here.memory[:100] = 1
    cut = recorder.replay("127.0.0.1", caller.peer.port)
    assert cut is fresh
    if fresh:
        assert (here.memory[:100] == 1).all(), "nothing was written"
    else:
        wait_for(lambda: untouched(here.memory), "the recorded write")


def test_slow_and_many_connections(here: Node, caller: Caller, caplog: pytest.LogCaptureFixture) -> None:
    """Silent ones, and ones that say a byte now and then: bounded in number and in time, counted, and hardly logged."""
    hello = _handshake.frame(_handshake.Hello("source", "target", bytes(32)))
    listener = here.backends["target"]._listener
    caplog.set_level(logging.INFO, "statelink.tcp")
    callers: list[socket.socket] = []
    for number in range(120):
        callers.append(caller.plain())
        with contextlib.suppress(OSError):
            callers[-1].sendall(hello[: number % 20])
        assert len(listener._pending) <= 8
    assert honest(here)
    held = callers[-4:]
    for at in range(20, len(hello)):  # one byte at a time does not extend the time
        for each in held:
            with contextlib.suppress(OSError):
                each.sendall(hello[at : at + 1])
        time.sleep(0.05)
        if not listener._pending:
            break
    else:
        pytest.fail("they were still heard when they had said everything")
    for each in callers:
        each.close()
    assert listener.dropped["many"] >= 100
    assert listener.dropped["slow"] >= 1
    assert sum(listener.dropped.values()) >= 120
    logged = [each for each in caplog.records if "dropped an incoming" in each.getMessage()]
    assert 1 <= len(logged) <= 20
    assert honest(here)


def test_a_peer_that_stops_in_the_middle_holds_up_nobody(here: Node, caller: Caller) -> None:
    """Authenticated, and silent after half a header, half a table, half a payload; others write, and it is revoked."""
    here.connect("target", "other", here.open("other", same_host_copy=False))
    whole = write_frame(here, 1, 1, nbytes=4096)
    for end in (10, HEADER.size + 5, len(whole) - 1000):
        stream = caller.dial()
        stream.write(whole[:end])
        here.connect("other", "target", here.descriptor("target"))
        here.grant("target", "other", 9, 1, u64(here.address + 8192), u64(64))
        done = here.write("other", "target", 9, 1, u64(here.address), u64(here.address + 8192), u64(64))
        assert here.outcome(done).ok
        stream.close()
    stream = caller.dial()
    stream.write(whole[:-1000])
    wait_for(lambda: (here.memory[:3000] == ord("x")).all(), "most of a payload")
    assert here.outcome(here.revoke("target", "source", 1, 1)).ok
    stream.write(whole[-1000:])
    status, reason = answer(stream)
    assert status is _frames.Status.REFUSED
    assert reason
    assert (here.memory[3096:4096] == POISON).all()
    stream.close()


def test_noise_at_the_data_port(here: Node, caller: Caller, caplog: pytest.LogCaptureFixture) -> None:
    """Random bytes and changed introductions, each over a connection of its own; and after a right introduction too."""
    random = np.random.default_rng(3)
    hello = _handshake.frame(_handshake.Hello("source", "target", bytes(32)))
    deep = b"\x91" * 4000
    for number in range(250):
        raw = bytearray(hello if number % 2 else random.bytes(int(random.integers(0, 200))))
        if number % 7 == 0:
            raw = bytearray(len(deep).to_bytes(2, "little") + deep)
        elif raw:
            raw[int(random.integers(0, len(raw)))] ^= int(random.integers(1, 256))
        with caller.plain() as sock, contextlib.suppress(OSError):
            sock.sendall(bytes(raw))
    for _ in range(40):
        stream = caller.dial()
        raw = bytearray(write_frame(here, 1, 1))
        raw[int(random.integers(0, HEADER.size + 16))] ^= 0x80
        with contextlib.suppress(Lost):
            stream.write(bytes(raw))
            stream.read(memoryview(bytearray(1)), time.monotonic() + 0.05)
        stream.close()
    here.memory[:] = np.where(here.memory == ord("x"), POISON, here.memory)  # a change may still be a right write
    assert untouched(here.memory)
    assert honest(here)
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


def test_what_travels_holds_no_key(here: Node, caller: Caller) -> None:
    """Neither the pair's key nor a private half is among the bytes of descriptors or of a whole connection."""
    recorder = Recorder("127.0.0.1", caller.peer.port)
    here.connect("source", "target", msgspec.structs.replace(caller.peer, port=recorder.port).encode())
    assert honest(here)
    here.disconnect("source", "target")
    recorder.close()
    seen = b"".join(recorder.said) + here.descriptor("source") + here.descriptor("target")
    privates = [here.backends[name]._private.private_bytes_raw() for name in ("source", "target")]
    assert len(seen) > 300
    assert not any(secret in seen for secret in (caller.key, *privates))
    assert Descriptor.decode(here.descriptor("source"), "source").public in seen
