"""Attacks on the data port of the embedded backend: no byte lands, and others are served meanwhile."""

from __future__ import annotations

import contextlib
import logging
import secrets
import struct
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from tests.helpers.peers import Recorder, until
from tests.tcp.by_hand import DONE, HEADER, REFUSED, Caller, Lost, changed, fields_of, frame, hello, pair_key
from tests.tcp.common import POISON, grant_all, u64, untouched

from statelink.errors import TransferError

if TYPE_CHECKING:
    import socket

    from tests.tcp.node import Node


MOST_PENDING = 32
"""Callers that have not authenticated, of which the port keeps no more."""


@pytest.fixture
def caller(here: Node) -> Caller:
    """``source``, to whom ``target`` has granted everything for room 1, generation 1; and so it has to ``honest``."""
    theirs = here.open("target", same_host_copy=False)
    made = Caller("source", theirs)
    here.connect("target", "source", made.descriptor)
    here.connect("target", "honest", here.open("honest", same_host_copy=False))
    here.connect("honest", "target", theirs)
    for name in ("source", "honest"):
        grant_all(here, a=name)
    return made


def write_frame(here: Node, room: int, generation: int, *, at: int = 0, nbytes: int = 8) -> bytes:
    header = HEADER.pack(b"SLw1", 1, 1, 1, room, generation, nbytes)
    return header + struct.pack("<QQ", here.address + at, nbytes) + b"x" * nbytes


def honest(here: Node) -> bool:
    """The granted peer writes where nothing else does."""
    source, target = u64(here.address), u64(here.address + (1 << 19))
    ok: bool = here.outcome(here.write("honest", "target", 1, 1, source, target, u64(64))).ok
    return ok


@pytest.mark.parametrize(
    ("room", "generation"), [(1, 2), (1, 0), (2, 1), (0, 0), ((1 << 64) - 1, 1), (1, (1 << 64) - 1)]
)
def test_a_grant_is_for_one_use_of_one_room(here: Node, caller: Caller, room: int, generation: int) -> None:
    stream = caller.dial()
    stream.write(write_frame(here, room, generation))
    status, _, reason = stream.answer()
    assert status == REFUSED
    assert f"no grant for room {room}, generation {generation}" in reason
    assert untouched(here.memory)
    stream.write(write_frame(here, 1, 1))  # while the right one is taken on the same connection
    assert stream.answer()[0] == DONE
    stream.close()


def test_a_grant_is_for_one_peer(here: Node, caller: Caller) -> None:
    """Another peer of the same target, authenticated, that names the room and the ranges of the first."""
    other = Caller("other", here.descriptor("target"))
    here.connect("target", "other", other.descriptor)
    here.grant("target", "other", 5, 1, u64(here.address + 4096), u64(100))
    stream = other.dial()
    for each in (write_frame(here, 1, 1), write_frame(here, 5, 1), write_frame(here, 5, 1, at=4096 + 93)):
        stream.write(each)
        assert stream.answer()[0] == REFUSED
    assert untouched(here.memory)
    stream.write(write_frame(here, 5, 1, at=4096 + 92))
    assert stream.answer()[0] == DONE
    stream.close()


def test_another_incarnations_grant(here: Node, caller: Caller) -> None:
    """The peer was started anew under its name: neither process may use what the old one had."""
    old = caller.dial()
    again = Caller("source", here.descriptor("target"))
    here.connect("target", "source", again.descriptor)
    with contextlib.suppress(Lost):
        old.write(write_frame(here, 1, 1))
    with pytest.raises(Lost):
        old.answer()
    old.close()
    stream = again.dial()
    stream.write(write_frame(here, 1, 1))
    assert stream.answer()[0] == REFUSED
    stream.close()
    assert untouched(here.memory)


@pytest.mark.parametrize("fresh", [True, False])
def test_a_recorded_connection_is_worth_nothing(
    here: Node, caller: Caller, fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte of a connection that wrote, sent again while the grant still holds.

    Where the receiver's challenge is always the same one, it lets the recording in, so that is right. But it knows the
    batch by its number, which landed before.
    """
    if not fresh:
        monkeypatch.setattr(secrets, "token_bytes", bytes)
    recorder = Recorder(f"tcp://127.0.0.1:{caller.peer['port']}")
    here.connect("honest", "target", changed(here.descriptor("target"), port=recorder.port))
    assert here.outcome(here.write("honest", "target", 1, 1, u64(here.address + 9000), u64(here.address), u64(100))).ok
    here.disconnect("honest", "target")
    recorder.close()
    here.memory[:] = POISON
    here.memory[:100] = 1
    cut = recorder.replay()
    assert cut is fresh
    assert (here.memory[:100] == 1).all(), "it is not written again"


def still_open(sock: socket.socket) -> bool:
    """Whether the port has not hung up."""
    try:
        sock.setblocking(False)
        return bool(sock.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_slow_and_many_connections(here: Node, caller: Caller, caplog: pytest.LogCaptureFixture) -> None:
    """Silent ones, and ones that say a byte now and then: bounded in number and in time, and hardly logged.

    One that this side may have yet to connect to waits as long, and is no reason for a warning.
    """
    caplog.set_level(logging.DEBUG, "statelink.tcp")
    callers: list[socket.socket] = []
    for number in range(120):
        callers.append(caller.plain())
        with contextlib.suppress(OSError):
            callers[-1].sendall(hello()[: number % 20])
    until(lambda: sum(map(still_open, callers)) <= MOST_PENDING, what="the end of all but a few")
    assert honest(here)
    held = callers[-4:]
    early = caller.plain()
    early.sendall(hello("early"))
    for at in range(20, len(hello())):  # one byte at a time does not extend the time
        for each in held:
            with contextlib.suppress(OSError):
                each.sendall(hello()[at : at + 1])
        time.sleep(0.1)
        if not any(map(still_open, callers)):
            break
    else:
        pytest.fail("they were still heard when they had said everything")
    until(lambda: not still_open(early), what="the end of the one that came early")
    for each in (*callers, early):
        each.close()
    dropped = [each for each in caplog.records if "dropped an incoming" in each.getMessage()]
    assert sum("too many connections" in each.getMessage() for each in dropped) >= len(callers) - MOST_PENDING
    assert sum("did not authenticate in time" in each.getMessage() for each in dropped) >= 1
    assert [each.levelno for each in dropped if "not connected to 'early'" in each.getMessage()] == [logging.DEBUG]
    assert len(dropped) >= 120
    assert 1 <= sum(each.levelno > logging.DEBUG for each in dropped) <= 20
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
    until(lambda: (here.memory[:3000] == ord("x")).all(), what="most of a payload")
    assert here.outcome(here.revoke("target", "source", 1, 1)).ok
    stream.write(whole[-1000:])
    status, _, reason = stream.answer()
    assert status == REFUSED
    assert reason
    assert (here.memory[3096:4096] == POISON).all()
    stream.close()


def spoilt(raw: bytes, random: np.random.Generator) -> bytes:
    """One byte of it is another, or it is noise."""
    if random.random() < 0.2:
        return bytes(random.bytes(int(random.integers(0, 200))))
    made = bytearray(raw)
    made[int(random.integers(0, len(made)))] ^= int(random.integers(1, 256))
    return bytes(made)


def test_noise_at_the_data_port(here: Node, caller: Caller, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever comes, no byte lands that should not, the honest are served, and nothing is a defect."""
    random = np.random.default_rng(3)
    deep = b"\x91" * 4000
    proof = frame("Proof", proof=bytes(32), pid=77, address=1 << 40)
    for number in range(250):
        raw = len(deep).to_bytes(2, "little") + deep if number % 7 == 0 else spoilt(hello(), random)
        with caller.plain() as sock, contextlib.suppress(OSError):
            sock.sendall(raw)
            sock.sendall(spoilt(proof, random))
    for _ in range(40):
        stream = caller.dial()
        header = bytearray(write_frame(here, 1, 1))
        header[int(random.integers(0, HEADER.size + 16))] ^= 1 << int(random.integers(0, 8))
        with contextlib.suppress(Lost):
            stream.write(bytes(header))
            stream.read(1, 0.05)
        stream.close()
    for _ in range(250):
        with contextlib.suppress(TransferError):  # one byte of its key may be another: that is another peer's
            here.connect("honest", "nobody", spoilt(changed(caller.descriptor, link="nobody"), random))
        here.disconnect("honest", "nobody")
    here.memory[:] = np.where(here.memory == ord("x"), POISON, here.memory)  # a change may still be a right write
    assert untouched(here.memory)
    assert honest(here)
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


def test_what_travels_holds_no_key(here: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the pair's key nor a private half is among the bytes of descriptors or of a whole connection."""
    privates: list[X25519PrivateKey] = []
    generate = X25519PrivateKey.generate

    def kept() -> X25519PrivateKey:
        privates.append(generate())
        return privates[-1]

    monkeypatch.setattr(X25519PrivateKey, "generate", kept)
    ours, theirs = (here.open(name, same_host_copy=False) for name in ("honest", "target"))
    here.connect("target", "honest", ours)
    grant_all(here, a="honest")
    recorder = Recorder(f"tcp://127.0.0.1:{fields_of(theirs)['port']}")
    here.connect("honest", "target", changed(theirs, port=recorder.port))
    assert honest(here)
    here.disconnect("honest", "target")
    recorder.close()
    seen = b"".join(recorder.said) + ours + theirs
    own, other = privates
    key = pair_key(own, fields_of(ours), fields_of(theirs))
    assert key == pair_key(other, fields_of(theirs), fields_of(ours))
    assert len(seen) > 300
    assert fields_of(ours)["public"] in seen
    assert not any(secret in seen for secret in (key, *(each.private_bytes_raw() for each in privates)))
