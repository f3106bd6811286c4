"""The embedded backend: strangers at its data port, and what the kernel refuses."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from statelink.errors import TransferError

from .by_hand import DONE, HEADER, REFUSED, REPLY, RESEND, Caller, Lost, changed, frame, hello, pair_key
from .common import (
    grant_all,
    join,
    u64,
    untouched,
    write,
)

if TYPE_CHECKING:
    from .node import Node
    from .remote import Remote

# Strangers at the data port.


@pytest.fixture
def caller(here: Node) -> Caller:
    """A caller that ``target`` in this process knows as ``source``, and has granted everything, as ``honest``."""
    made = Caller("source", here.open("target"))
    here.connect("target", "source", made.descriptor)
    here.connect("target", "honest", here.open("honest"))
    for name in ("source", "honest"):
        grant_all(here, a=name)
    return made


def closed_by_peer(sock: socket.socket) -> bool:
    with sock:
        try:
            while sock.recv(4096):
                pass
        except ConnectionError:
            pass
        return True


def still_serves(here: Node) -> bool:
    here.connect("honest", "target", here.descriptor("target"))
    transfer = here.write("honest", "target", 1, 1, u64(here.address), u64(here.address + 5000), u64(100))
    return here.outcome(transfer).ok


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\0" * 100,
    b"\xff" * 100_000,
    b"\x05\x00junk!",
    hello("source", "somebody else"),
    frame("Proof", proof=bytes(32), pid=1, address=1),
    hello() + b"\x02\x00ab",
    hello() + frame("Proof", proof=bytes(32), pid=os.getpid(), address=1 << 20),
    hello("nobody"),
    hello("nobody") * 2,
    hello().replace(b"source", b"\xff" * 6),
    hello().replace(b"target", b"\xc3(\xff\xff\xff\xff"),
    b"\x0b\x00\x82\xa4type\xa1\xff\xa1\xff\xc0",
    b"",
]


def test_garbage_is_dropped(here: Node, caller: Caller) -> None:
    """All of it at once: what says too little is dropped after five seconds."""
    socks = []
    for raw in GARBAGE:
        socks.append(caller.plain())
        with contextlib.suppress(ConnectionError):
            socks[-1].sendall(raw)
    assert all(closed_by_peer(sock) for sock in socks)
    assert still_serves(here)


@pytest.mark.parametrize(
    "answer",
    [
        b"\x0b\x00\x82\xa4type\xa1\xff\xa1\xff\xc0",
        hello(),
        frame("Welcome", copy=True),
        frame("Challenge", nonce=bytes(31), proof=bytes(32)),
        b"\x05\x00junk!",
        b"\xff\xff",
    ],
)
def test_who_answers_a_call_with_something_else(here: Node, answer: bytes) -> None:
    """Its text is none, or it is no answer: nothing is written to whoever listens there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stranger = changed(here.open("target"), port=server.getsockname()[1])
        here.open("source", connect_timeout=1.0)
        here.connect("source", "target", stranger)
        transfer = here.write("source", "target", 1, 1, u64(here.address), u64(here.address), u64(100))
        called, _ = server.accept()
        with called:
            called.sendall(answer)
            outcome = here.outcome(transfer)
    assert not outcome.ok
    assert "does not speak this protocol" in outcome.reason


@pytest.mark.parametrize(
    ("reply", "ok"),
    [
        (lambda number: REPLY.pack(b"SLr1", DONE, 0, number), True),
        (lambda number: REPLY.pack(b"SLr1", DONE, 0, number + 1), False),
        (lambda number: REPLY.pack(b"SLr2", DONE, 0, number), False),
        (lambda number: REPLY.pack(b"SLr1", 0, 0, number), False),
        (lambda number: REPLY.pack(b"SLr1", 5, 0, number), False),
        (lambda number: REPLY.pack(b"SLr1", DONE, 513, number) + bytes(513), False),
        (lambda number: b"\xff" * REPLY.size, False),
        (lambda number: b"", False),
    ],
    ids=["done", "another batch", "no magic", "status 0", "status 5", "a long reason", "noise", "nothing"],
)
def test_who_answers_a_write_with_something_else(here: Node, reply: Callable[[int], bytes], ok: bool) -> None:
    """A reply counts if it is one, and the next."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stranger = Caller("stranger", here.open("source"))
        here.connect("source", "stranger", changed(stranger.descriptor, port=server.getsockname()[1]))
        transfer = here.write("source", "stranger", 1, 1, u64(here.address), u64(here.address), u64(100))
        called, _ = server.accept()
        with called:
            stream = stranger.admit(called)
            number = HEADER.unpack(stream.read(HEADER.size))[3]
            stream.read(16 + 100)
            stream.write(reply(number))
            called.shutdown(socket.SHUT_WR)
            server.close()  # it is not let in again
            outcome = here.outcome(transfer)
    assert outcome.ok is ok
    assert outcome.settled or not ok


def test_wrong_keys(here: Node, caller: Caller) -> None:
    """Neither side speaks to one that does not hold the key."""
    for name in ("source", "nobody of its own"):
        other = changed(here.descriptor("target"), public=Caller(name, here.descriptor("target")).own["public"])
        here.connect("honest", "target", other)
        transfer = here.write("honest", "target", 1, 1, u64(here.address), u64(here.address), u64(100))
        assert "does not hold the key" in here.outcome(transfer).reason
    caller.key = bytes(32)
    with pytest.raises(Lost):
        caller.dial()
    sock = caller.plain()
    sock.sendall(hello())
    challenge = msgspec.msgpack.decode(sock.recv(int.from_bytes(sock.recv(2), "little")))
    sock.sendall(frame("Proof", proof=challenge["proof"], pid=0, address=0))  # reflected
    assert closed_by_peer(sock)
    assert still_serves(here)
    assert untouched(here.memory[:5000])


@pytest.mark.parametrize("most", [1, 3])
def test_a_connection_beyond_those_that_both_sides_take(here: Node, most: int) -> None:
    caller = Caller("source", here.open("target"))
    caller.own["streams"] = most
    here.connect("target", "source", caller.descriptor)
    for number in range(most):
        caller.dial(number=number).close()
    with pytest.raises(Lost):
        caller.dial(number=most)
    for number in (-1, 64):
        sock = caller.plain()
        sock.sendall(hello(number=number))
        assert closed_by_peer(sock)


def test_one_peer_cannot_pose_as_another(here: Node, caller: Caller) -> None:
    """It has both descriptors and a private half of its own, but not the other's."""
    impostor = Caller("source", here.descriptor("target"))
    for own in (impostor.own, caller.own):
        impostor.key = pair_key(impostor.private, own, impostor.peer)
        with pytest.raises(Lost):
            impostor.dial()
    caller.dial().close()


def test_a_former_incarnation_has_no_key(here: Node, caller: Caller) -> None:
    """The same name, started anew: what was agreed on before opens nothing."""
    new = Caller("source", here.descriptor("target"))
    here.connect("target", "source", new.descriptor)
    with pytest.raises(Lost):
        caller.dial()
    new.dial().close()


@pytest.mark.parametrize("change", [{"link": "other"}, {"public": bytes(31) + b"x"}], ids=["name", "half"])
@pytest.mark.parametrize("whose", ["own", "peer"])
def test_a_key_is_that_of_two_names_and_two_halves(caller: Caller, whose: str, change: dict[str, Any]) -> None:
    """The same numbers under another name, or in another pair, are another key."""
    ends = {"own": caller.own, "peer": caller.peer}
    ends[whose] = {**ends[whose], **change}
    caller.key = pair_key(caller.private, ends["own"], ends["peer"])
    with pytest.raises(Lost):
        caller.dial()


LOW_ORDER = [
    bytes(32),
    b"\x01" + bytes(31),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    bytes.fromhex("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
    bytes.fromhex("edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
]


@pytest.mark.parametrize("public", LOW_ORDER, ids=lambda public: public.hex()[:4])
def test_a_public_half_that_would_make_the_key_known(here: Node, caller: Caller, public: bytes) -> None:
    forged = changed(caller.descriptor, public=public)
    with pytest.raises(TransferError, match="no X25519 key"):
        here.connect("target", "source", forged)
    caller.dial().close()  # and whom it was before is still known


def test_slow_callers(here: Node, caller: Caller) -> None:
    """However many hang around, and however slowly they speak, the port serves others, and they are dropped."""
    socks = []
    for number in range(40):
        socks.append(caller.plain())
        with contextlib.suppress(ConnectionError):  # it is one of too many
            socks[-1].sendall(hello()[: number * 2])
    assert still_serves(here)
    assert all(closed_by_peer(sock) for sock in socks)


def test_wrong_proof_of_memory(here: Node, caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pid and address where the token is not: the receiver does not read from there."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert still_serves(here)
    assert here.mode("honest", "target") == "SEND"


def test_only_the_token_proves_a_memory(here: Node, caller: Caller) -> None:
    stale: list[bytes] = []
    kept: list[Any] = []

    def at(token: bytes) -> int:
        kept.append(np.frombuffer(token, np.uint8))
        return int(kept[-1].ctypes.data)

    def noted(token: bytes) -> tuple[int, int]:
        stale.append(token)
        return os.getpid(), at(token)

    cases: list[tuple[Any, bool]] = [
        (noted, True),
        (lambda token: (os.getpid(), at(stale[0])), False),
        (lambda token: (os.getpid(), at(token[1:] + b"x")), False),
        (lambda token: (0, at(token)), False),
        (lambda token: (os.getpid(), 1), False),
    ]
    for place, expected in cases:
        stream = caller.dial(place)
        assert stream.copies is expected
        stream.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"x" * 48,
        HEADER.pack(b"SLw1", 3, 1, 1, 1, 1, 1),
        HEADER.pack(b"SLw1", 1, 0, 1, 1, 1, 0),
        HEADER.pack(b"SLw1", 1, (1 << 15) + 1, 1, 1, 1, 1 << 20),
        HEADER.pack(b"SLw1", 1, 1, 1, 1, 1, 1 << 63),
        HEADER.pack(b"SLw1", 1, 1, 1, 1, 1, 7) + struct.pack("<QQ", 4096, 8),
        HEADER.pack(b"SLw1", 1, 1, 1, 1, 1, 7) + struct.pack("<QQ", 4096, 0),
        HEADER.pack(b"SLw1", 1, 2, 1, 1, 1, 7) + struct.pack("<QQQQ", 0, 0, (1 << 64) - 1, 8),
    ],
)
def test_malformed_batches(here: Node, caller: Caller, raw: bytes) -> None:
    stream = caller.dial()
    stream.write(raw)
    with pytest.raises(Lost):
        stream.read(1)
    stream.close()
    assert untouched(here.memory)
    assert still_serves(here)


@pytest.mark.parametrize("mode", [1, 2])
def test_wrapped_address(here: Node, caller: Caller, mode: int) -> None:
    """Their end, computed in 64 bits, comes before their start."""
    stream = caller.dial()
    blocks = np.array([[here.address, (1 << 64) - 8], [8, 1 << 45], [here.address, 1 << 20]], np.uint64)
    stream.write(HEADER.pack(b"SLw1", mode, 2, 1, 1, 1, 8 + (1 << 45)) + blocks[: mode + 1].tobytes())
    status, _, reason = stream.answer()
    assert status == REFUSED
    assert "block 1" in reason
    stream.close()
    assert untouched(here.memory)


def test_copy_from_a_process_that_was_not_proven(here: Node, caller: Caller) -> None:
    stream = caller.dial()
    stream.write(HEADER.pack(b"SLw1", 2, 1, 5, 1, 1, 100) + struct.pack("<QQQ", here.address, 100, here.address + 200))
    assert stream.answer()[:2] == (RESEND, 5)
    stream.close()
    assert untouched(here.memory)


# The kernel's refusal.


def test_memory_may_not_be_read(source: Remote, target: Remote) -> None:
    target.do("reads", forbidden=True)
    join(source, target)
    grant_all(target)
    target.do("reads")
    arrives(source, target, "SEND")


def test_memory_may_not_be_read_any_more(source: Remote, target: Remote) -> None:
    join(source, target)
    grant_all(target)
    arrives(source, target, "COPY")
    target.do("reads", forbidden=True)
    arrives(source, target, "SEND")


def arrives(source: Remote, target: Remote, mode: str) -> None:
    source.memory[:1000] = np.random.default_rng().integers(0, 255, 1000, np.uint8)
    assert write(source, target).ok
    assert np.array_equal(target.memory[:1000], source.memory[:1000])
    assert untouched(target.memory[1000:])
    assert source.do("mode", "source", "target") == mode
