"""The embedded backend: strangers at its data port, and what the kernel refuses."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from statelink.errors import TransferError
from statelink.tcp import _frames, _handshake, _iovec
from statelink.tcp._descriptor import pair_key
from statelink.tcp._stream import Lost

from .common import (
    HEADER,
    Caller,
    grant_all,
    join,
    u64,
    untouched,
    write,
)

if TYPE_CHECKING:
    import socket

    from .node import Node, Remote

# Strangers at the data port.


@pytest.fixture
def caller(here: Node) -> Iterator[Caller]:
    """A caller that ``target`` in this process knows as ``source``, and has granted everything."""
    theirs = here.open("target", handshake_timeout=0.5, max_pending=4)
    ours = here.open("source")
    here.connect("target", "source", ours)
    grant_all(here)
    caller = Caller(here, "source", theirs, "target")
    yield caller
    caller.waker.close()


def closed_by_peer(sock: socket.socket) -> bool:
    with sock:
        try:
            while sock.recv(4096):
                pass
        except ConnectionError:
            pass
        return True


def still_serves(here: Node) -> bool:
    here.connect("source", "target", here.descriptor("target"))
    transfer = here.write("source", "target", 1, 1, u64(here.address), u64(here.address + 5000), u64(100))
    return here.outcome(transfer).ok


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 100,
        b"\xff" * 100_000,
        b"\x05\x00junk!",
        _handshake.frame(_handshake.Hello("source", "somebody else", bytes(32))),
        _handshake.frame(_handshake.Proof(bytes(32), 1, 1)),
        _handshake.frame(_handshake.Hello("source", "target", bytes(32))) + b"\x02\x00ab",
        _handshake.frame(_handshake.Hello("source", "target", bytes(32)))
        + _handshake.frame(_handshake.Proof(bytes(32), os.getpid(), 1 << 20)),
        _handshake.frame(_handshake.Hello("nobody", "target", bytes(32))),
        _handshake.frame(_handshake.Hello("nobody", "target", bytes(32))) * 2,
        _handshake.frame(_handshake.Hello("source", "target", bytes(32))).replace(b"source", b"\xff" * 6),
        b"",
    ],
)
def test_garbage_is_dropped(here: Node, caller: Caller, raw: bytes) -> None:
    sock = caller.plain()
    with contextlib.suppress(ConnectionError):
        sock.sendall(raw)
    assert closed_by_peer(sock)
    assert still_serves(here)


@pytest.mark.parametrize("kind", [_handshake.Hello, _handshake.Challenge, _handshake.Proof, _handshake.Welcome])
def test_text_that_is_none_is_not_this_protocol(kind: Any) -> None:
    """Its bytes are no UTF-8, in a name or in the key of a field."""
    for raw in (
        _handshake.frame(_handshake.Hello("source", "target", bytes(32)))[2:].replace(
            b"target", b"\xc3(\xff\xff\xff\xff"
        ),
        b"\x82\xa4type\xa1\xff\xa1\xff\xc0",
    ):
        with pytest.raises(Lost, match="does not speak this protocol"):
            _handshake.decode(raw, kind)


def test_wrong_keys(here: Node, caller: Caller) -> None:
    """Neither side speaks to one that does not hold the key."""
    right = caller.key
    caller.key = bytes(32)
    with pytest.raises(Lost, match="does not hold the key"):
        caller.dial()
    hello = _handshake.Hello("source", "target", bytes(32))
    sock = caller.plain()
    sock.sendall(_handshake.frame(hello))
    length = int.from_bytes(sock.recv(2), "little")
    challenge = _handshake.decode(sock.recv(length), _handshake.Challenge)
    proof = _handshake.Proof(challenge.proof, 0, 0)  # reflected
    assert not _handshake.verify(right, hello, challenge.nonce, proof)
    sock.sendall(_handshake.frame(proof))
    assert closed_by_peer(sock)
    assert still_serves(here)


def test_one_peer_cannot_pose_as_another(here: Node, caller: Caller) -> None:
    """It has both descriptors and a private half of its own, but not the other's."""
    here.open("impostor")
    private = here.backends["impostor"]._private
    named = msgspec.structs.replace(here.backends["impostor"]._own, link="source")
    for own in (caller.own, named):
        caller.key = pair_key(private, own, caller.peer)
        with pytest.raises(Lost, match="does not hold the key"):
            caller.dial()


def test_a_former_incarnation_has_no_key(here: Node, caller: Caller) -> None:
    """The same name, started anew: what was agreed on before opens nothing."""
    here.close("source")
    here.open("source")
    here.connect("target", "source", here.descriptor("source"))
    with pytest.raises(Lost, match="does not hold the key"):
        caller.dial()
    caller.pose(here, "source")
    caller.dial().close()


def test_a_descriptor_holds_no_secret(here: Node, caller: Caller) -> None:
    """Whoever read both descriptors can compute neither the key nor the private halves."""
    private = here.backends["source"]._private.private_bytes_raw()
    read = here.descriptor("source") + here.descriptor("target")
    assert private not in read
    assert caller.key not in read
    assert pair_key(here.backends["target"]._private, caller.peer, caller.own) == caller.key
    assert caller.key not in (caller.own.public, caller.peer.public)


def test_a_key_is_that_of_two_names_and_two_halves(here: Node, caller: Caller) -> None:
    """The same numbers under another name, or in another pair, are another key."""
    private, own, peer = here.backends["source"]._private, caller.own, caller.peer
    renamed = pair_key(private, msgspec.structs.replace(own, link="other"), peer)
    their_name = pair_key(private, own, msgspec.structs.replace(peer, link="other"))
    moved = pair_key(private, msgspec.structs.replace(own, public=bytes(32)), peer)
    assert len({caller.key, renamed, their_name, moved}) == 4


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
    forged = msgspec.structs.replace(caller.own, public=public).encode()
    with pytest.raises(TransferError, match="no X25519 key"):
        here.connect("target", "source", forged)
    caller.dial().close()  # and whom it was before is still known


def test_slow_callers(here: Node, caller: Caller) -> None:
    """However many hang around, and however slowly they speak, the port serves others, and they are dropped."""
    hello = _handshake.frame(_handshake.Hello("source", "target", bytes(32)))
    socks = []
    for number in range(12):
        socks.append(caller.plain())
        socks[-1].sendall(hello[: number * 3])
    assert still_serves(here)
    assert all(closed_by_peer(sock) for sock in socks)


def test_wrong_proof_of_memory(here: Node, caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pid and address where the token is not: the receiver does not read from there."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert still_serves(here)
    assert here.mode("source", "target") == "SEND"


def test_only_the_token_proves_a_memory(here: Node) -> None:
    key, hello, nonce = bytes(32), _handshake.Hello("a", "b", bytes(32)), bytes(32)
    right = np.frombuffer(_handshake._token(key, hello, nonce), np.uint8)
    stale = np.frombuffer(_handshake._token(key, hello, bytes(31) + b"x"), np.uint8)
    cases = (
        (os.getpid(), right, True),
        (os.getpid(), stale, False),
        (os.getpid(), right[1:], False),
        (0, right, False),
    )
    for pid, memory, expected in cases:
        proof = _handshake.Proof(bytes(32), pid, memory.ctypes.data)
        assert _handshake.witness(key, hello, nonce, proof) is expected
    assert not _handshake.witness(key, hello, nonce, _handshake.Proof(bytes(32), os.getpid(), 1))


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
        stream.read(memoryview(bytearray(1)))
    stream.close()
    assert untouched(here.memory)
    assert still_serves(here)


@pytest.mark.parametrize("mode", [1, 2])
def test_wrapped_address(here: Node, caller: Caller, mode: int) -> None:
    """Their end, computed in 64 bits, comes before their start."""
    stream = caller.dial()
    blocks = np.array([[here.address, (1 << 64) - 8], [8, 1 << 45], [here.address, 1 << 20]], np.uint64)
    stream.write(HEADER.pack(b"SLw1", mode, 2, 1, 1, 1, 8 + (1 << 45)) + blocks[: mode + 1].tobytes())
    answer = bytearray(_frames.REPLY.size)
    stream.read(memoryview(answer))
    reply = _frames.unpack_reply(answer)
    assert reply.status is _frames.Status.REFUSED
    reason = bytearray(reply.length)
    stream.read(memoryview(reason))
    assert b"block 1" in reason
    stream.close()
    assert untouched(here.memory)


def test_copy_from_a_process_that_was_not_proven(here: Node, caller: Caller) -> None:
    here.connect("target", "far", here.open("far", same_host_copy=False))
    here.grant("target", "far", 1, 1, u64(here.address), u64(100))
    caller.pose(here, "far")
    stream = caller.dial()
    stream.write(HEADER.pack(b"SLw1", 2, 1, 5, 1, 1, 100) + struct.pack("<QQQ", here.address, 100, here.address + 200))
    answer = bytearray(_frames.REPLY.size)
    stream.read(memoryview(answer))
    assert _frames.unpack_reply(answer)[:2] == (_frames.Status.RESEND, 5)
    stream.close()
    assert untouched(here.memory)


# The kernel's refusal.


def test_memory_may_not_be_read(here: Node, source: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_iovec, "_process_vm_readv", refuse)
    join(source, here)
    grant_all(here)
    monkeypatch.undo()
    here_copies(source, here, "SEND")


def test_memory_may_not_be_read_any_more(here: Node, source: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    join(source, here)
    grant_all(here)
    here_copies(source, here, "COPY")
    monkeypatch.setattr(_iovec, "_process_vm_readv", refuse)
    here_copies(source, here, "SEND")


def refuse(*_: object) -> int:
    ctypes.set_errno(errno.EPERM)
    return -1


def here_copies(source: Remote, here: Node, mode: str) -> None:
    source.memory[:1000] = np.random.default_rng().integers(0, 255, 1000, np.uint8)
    assert write(source, here).ok
    assert np.array_equal(here.memory[:1000], source.memory[:1000])
    assert untouched(here.memory[1000:])
    assert source.do("mode", "source", "target") == mode
