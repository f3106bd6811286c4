"""Frames that were cut, changed or made up, through everything that decodes: one kind of error, and no memory kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from statelink import wire
from statelink.errors import PeerError, WireError

from .noise import Decoder, fuzz, resident
from .samples import LINK, card, messages

MEGABYTE = 1 << 20


def rendezvous_messages() -> list[wire.Message]:
    return [
        wire.Register(**LINK, instance="prefill-0", rank=1, ranks=2, address="tcp://10.0.0.1:7000"),
        wire.Registered(**LINK, lifetime=15.0),
        wire.Resolve(**LINK, instance="prefill-0"),
        wire.Resolved(**LINK, instance="p", addresses=("tcp://10.0.0.1:1", "tcp://[::1]:2"), present=2, ranks=2),
        wire.Browse(**LINK, instance="prefill-0", rank=3),
        wire.Browsed(**LINK, listed=(wire.Listed("p", 0, 2, "tcp://10.0.0.1:1", "p.0-1"),)),
    ]


def body_of(kind: bytes, kinds: dict[bytes, type[wire.Message]]) -> Callable[[bytes], Any]:
    """Decodes one kind of message; what it takes can be sent again."""

    def call(body: bytes) -> Any:
        got = wire.decode([kind, body], kinds)
        assert type(got) is kinds[kind]
        return wire.encode(got)

    return call


def handshake(raw: bytes) -> wire.Handshake:
    got = wire.read_handshake(msgspec.Raw(raw))
    assert type(got) is wire.Handshake
    return got


def decoders() -> dict[str, Decoder]:
    made: dict[str, Decoder] = {}
    for kinds, each in ((wire.KINDS, messages().values()), (wire.RENDEZVOUS_KINDS, rendezvous_messages())):
        for message in each:
            kind, body = wire.encode(message)
            made[kind.decode()] = Decoder(body_of(kind, kinds), body, (WireError,), ("wire.body",))
    made["handshake"] = Decoder(
        handshake, bytes(wire.write_handshake(card())), (WireError, PeerError), ("wire.handshake", "peer.state_type")
    )
    made["items"] = Decoder(lambda raw: wire.unpack_items(wire.ItemList(0, raw)), bytes(80), (WireError,))
    return made


DECODERS = decoders()


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_each_decoder_takes_what_is_right(name: str) -> None:
    DECODERS[name].call(DECODERS[name].good)


def run(frames: int, seed: int) -> None:
    fuzz(DECODERS, 5_000, seed)  # allocators and caches are warm after this
    before = resident()
    seen = fuzz(DECODERS, frames, seed + 1)
    assert seen.total() == frames
    refused = {name for name, code in seen if code != "taken"}
    assert DECODERS.keys() - refused <= {"items"}, "noise was taken"
    assert len({name for name, code in seen if code == "taken"}) > 16
    assert resident() - before < 16 * MEGABYTE


def test_frames() -> None:
    run(20_000, 1)


@pytest.mark.soak
def test_a_million_frames() -> None:
    run(1_100_000, 100)


def test_changed_handshakes_are_taken_or_refused_in_both_ways() -> None:
    seen = fuzz({"handshake": DECODERS["handshake"]}, 8_000, 2)
    assert {code for _, code in seen} == {"taken", "wire.handshake", "peer.state_type"}


def test_noise_in_any_number_of_frames_is_no_message() -> None:
    rng = random.Random(3)
    kinds = [*wire.KINDS, b"", b"\xff", b"teleport"]
    for _ in range(2_000):
        frames = [rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(5))]
        if frames and rng.random() < 0.5:
            frames[0] = rng.choice(kinds)
        code = ""
        try:
            wire.decode(frames)
        except WireError as error:
            code = error.code
        if code:
            assert code in ("wire.frames", "wire.kind", "wire.body")
        else:
            assert frames[0] in wire.KINDS
