"""Everything that reads what a peer sent, with something that it takes; and what is done to that."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from tests.wire.samples import LINK, card, messages
from tests.wire.test_fuzz import mutated

from statelink import wire
from statelink.errors import PeerError, TransferError, WireError
from statelink.tcp import _frames, _handshake
from statelink.tcp._descriptor import Descriptor
from statelink.tcp._stream import Lost

__all__ = ["DECODERS", "Decoder", "fuzz", "rendezvous_messages", "resident"]

REFUSALS = (WireError, PeerError, TransferError, Lost, _frames.BadFrameError)
"""The errors with which a decoder may answer; anything else that it raises is a defect."""


class Decoder:
    """A function that reads bytes from a peer.

    Args:
        call: It.
        good: Bytes that it takes.
    """

    def __init__(self, call: Callable[[bytes], Any], *good: bytes) -> None:
        self.call = call
        self.good = good


def rendezvous_messages() -> list[wire.Message]:
    return [
        wire.Register(**LINK, instance="prefill-0", rank=1, ranks=2, address="tcp://10.0.0.1:7000"),
        wire.Registered(**LINK, lifetime=15.0),
        wire.Resolve(**LINK, instance="prefill-0"),
        wire.Resolved(**LINK, instance="p", addresses=("tcp://10.0.0.1:1", "tcp://[::1]:2"), present=2, ranks=2),
    ]


def _body_of(kind: bytes, kinds: dict[bytes, type[wire.Message]]) -> Callable[[bytes], Any]:
    return lambda body: wire.decode([kind, body], kinds)


def _handshake_of(kind: Any) -> Callable[[bytes], Any]:
    return lambda raw: _handshake.decode(raw, kind)


def _batch(raw: bytes) -> Any:
    """As the receiver of a data connection reads it; the table of blocks is whatever follows."""
    if len(raw) < _frames.HEADER.size:
        raise _frames.BadFrameError("short")
    header = _frames.unpack_header(raw[: _frames.HEADER.size])
    body = raw[_frames.HEADER.size :]
    size = 8 * header.arrays * header.blocks
    assert size <= 8 * 3 * _frames.MAX_BLOCKS  # what the receiver would allocate
    if len(body) < size:
        raise _frames.BadFrameError("short")
    arrays = np.frombuffer(body[:size], "<u8").reshape(header.arrays, header.blocks).astype(np.uint64)
    _frames.check_lengths(header, arrays[1])
    assert arrays[1].astype(object).sum() == header.total  # in Python's numbers: nothing wrapped around
    return header


def _reply(raw: bytes) -> Any:
    if len(raw) != _frames.REPLY.size:
        raise _frames.BadFrameError("short")
    return _frames.unpack_reply(raw)


def _decoders() -> dict[str, Decoder]:
    made: dict[str, Decoder] = {}
    for name, message in messages().items():
        made[name] = Decoder(_body_of(name.encode(), wire.KINDS), wire.encode(message)[1])
    for each in rendezvous_messages():
        kind, body = wire.encode(each)
        made[kind.decode()] = Decoder(_body_of(kind, wire.RENDEZVOUS_KINDS), body)
    made["card"] = Decoder(lambda raw: wire.read_handshake(msgspec.Raw(raw)), bytes(wire.write_handshake(card())))
    made["items"] = Decoder(lambda raw: wire.unpack_items(wire.ItemList(0, raw)), bytes(80))
    handshakes: list[Any] = [
        _handshake.Hello("prefill", "decode", bytes(32)),
        _handshake.Challenge(bytes(32), bytes(32)),
        _handshake.Proof(bytes(32), 77, 1 << 40),
        _handshake.Welcome(True),
    ]
    for hand in handshakes:
        raw = _handshake.frame(hand)[_handshake.PREFIX :]
        made[f"tcp {type(hand).__name__}"] = Decoder(_handshake_of(type(hand)), raw)
    descriptor = Descriptor(link="p", host="127.0.0.1", port=7000, public=bytes(32), boot="x").encode()
    made["tcp descriptor"] = Decoder(lambda raw: Descriptor.decode(raw, "p"), descriptor)
    write = struct.pack("<4sBxxxI4xQQQQ", b"SLw1", 1, 2, 1, 1, 1, 30) + struct.pack("<QQQQ", 4096, 8192, 10, 20)
    made["tcp write"] = Decoder(_batch, write)
    made["tcp reply"] = Decoder(_reply, _frames.pack_reply(_frames.Status.DONE, 7))
    return made


DECODERS = _decoders()


def fuzz(frames: int, seed: int) -> tuple[Counter[str], Counter[str]]:
    """Put frames through the decoders, a tenth of them noise; how many each took, and how many it refused."""
    rng = random.Random(seed)
    taken: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    longest = 0
    names = sorted(DECODERS)
    for number in range(frames):
        name = names[number % len(names)]
        decoder = DECODERS[name]
        noise = rng.random() < 0.1
        raw = rng.randbytes(rng.choice((0, 1, 7, 48, 300))) if noise else mutated(rng, rng.choice(decoder.good))
        try:
            decoder.call(raw)
        except REFUSALS as error:
            refused[name] += 1
            longest = max(longest, len(str(error)))
        else:
            taken[name] += 1
    assert longest < 2000  # what a peer sends does not fill the log
    return taken, refused


def resident(pid: int | str = "self") -> int:
    """Bytes of memory that a process has."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096
