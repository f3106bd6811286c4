"""Frames that were cut, changed or made up, through what reads the data port: refused by name, and no memory kept."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.wire.noise import Decoder, fuzz, resident

from statelink.errors import PeerError, TransferError
from statelink.tcp import _frames, _handshake
from statelink.tcp._descriptor import Descriptor
from statelink.tcp._stream import Lost

REFUSALS = (PeerError, TransferError, Lost, _frames.BadFrameError)


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


def decoders() -> dict[str, Decoder]:
    made: dict[str, Decoder] = {}
    handshakes: list[Any] = [
        _handshake.Hello("prefill", "decode", bytes(32)),
        _handshake.Challenge(bytes(32), bytes(32)),
        _handshake.Proof(bytes(32), 77, 1 << 40),
        _handshake.Welcome(True),
    ]
    for hand in handshakes:
        raw = _handshake.frame(hand)[_handshake.PREFIX :]
        made[f"tcp {type(hand).__name__}"] = Decoder(_handshake_of(type(hand)), raw, REFUSALS)
    descriptor = Descriptor(link="p", host="127.0.0.1", port=7000, public=bytes(32), boot="x").encode()
    made["tcp descriptor"] = Decoder(lambda raw: Descriptor.decode(raw, "p"), descriptor, REFUSALS)
    write = struct.pack("<4sBxxxI4xQQQQ", b"SLw1", 1, 2, 1, 1, 1, 30) + struct.pack("<QQQQ", 4096, 8192, 10, 20)
    made["tcp write"] = Decoder(_batch, write, REFUSALS)
    made["tcp reply"] = Decoder(_reply, _frames.pack_reply(_frames.Status.DONE, 7), REFUSALS)
    return made


DECODERS = decoders()


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_each_decoder_takes_what_is_right(name: str) -> None:
    DECODERS[name].call(DECODERS[name].good)


@pytest.mark.parametrize("frames", [10_000, pytest.param(300_000, marks=pytest.mark.soak)])
def test_frames(frames: int) -> None:
    fuzz(DECODERS, 2_000, 1)  # allocators and caches are warm after this
    before = resident()
    seen = fuzz(DECODERS, frames, 2)
    assert seen.total() == frames
    assert {name for name, code in seen if code != "taken"} == set(DECODERS), "noise was taken"
    assert resident() - before < 16 << 20
