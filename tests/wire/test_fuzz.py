"""Frames that were cut, changed or made up: one kind of error, and nothing else, ever."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from statelink import wire
from statelink.errors import PeerError, StatelinkError, WireError

from .samples import card, messages

Argument = TypeVar("Argument")
Result = TypeVar("Result")

PER_EXAMPLE = 60
EXAMPLES = 350
PROFILE = settings(derandomize=True, database=None, deadline=None, max_examples=EXAMPLES)

# Markers that announce much more than follows, deep nesting, and numbers at the edges of their types.
LIES = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\x91" * 3000,
    b"\x81\xa1x" * 1500,
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + b"\x00" * 7,
    b"\xcb\x7f\xf8" + b"\x00" * 6,
    b"\xc0",
    b"\xc1",
    b"\xa4\xff\xfe\xfd\xfc",
)


def attempt(call: Callable[[Argument], Result], given: Argument) -> Result | StatelinkError:
    """What the call returns, or Statelink's own error; whatever else it raises is a failure."""
    try:
        return call(given)
    except StatelinkError as error:
        return error


def mutated(rng: random.Random, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        action = rng.randrange(6)
        if action == 0:
            del data[at:]
        elif action == 1:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif action == 2:
            data[at : at + rng.randrange(9)] = rng.choice(LIES)
        elif action == 3:
            data[at:at] = data[: rng.randrange(20)]
        elif action == 4:
            del data[at : at + rng.randrange(1, 9)]
        else:
            data[at:at] = rng.randbytes(rng.randrange(12))
    return bytes(data)


def test_changed_messages_decode_or_are_one_kind_of_error() -> None:
    bodies = {kind.encode(): wire.encode(message)[1] for kind, message in messages().items()}
    kinds = sorted(bodies)
    seen: Counter[str] = Counter()

    @PROFILE
    @given(st.integers(0, 1 << 32))
    def check(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(PER_EXAMPLE):
            kind = rng.choice(kinds)
            body = mutated(rng, bodies[rng.choice(kinds) if rng.random() < 0.05 else kind])
            got = attempt(wire.decode, [kind, body])
            if isinstance(got, StatelinkError):
                assert type(got) is WireError
                assert got.code == "wire.body"
                assert len(str(got)) < 1000
                seen["refused"] += 1
            else:
                assert type(got) is wire.KINDS[kind]
                wire.encode(got)
                seen["taken"] += 1

    check()
    assert seen.total() >= 20_000
    assert seen["refused"] > 5_000
    assert seen["taken"] > 1_000


def test_changed_cards_decode_or_are_refused() -> None:
    body = bytes(wire.write_handshake(card()))
    seen: Counter[str] = Counter()

    @settings(PROFILE, max_examples=200)
    @given(st.integers(0, 1 << 32))
    def check(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(40):
            got = attempt(wire.read_handshake, msgspec.Raw(mutated(rng, body)))
            if isinstance(got, StatelinkError):
                assert (type(got), got.code) in ((WireError, "wire.handshake"), (PeerError, "peer.state_type"))
                seen[got.code] += 1
            else:
                assert type(got) is wire.Handshake
                seen["taken"] += 1

    check()
    assert seen.total() >= 8_000
    assert min(seen["wire.handshake"], seen["taken"], seen["peer.state_type"]) > 0, seen


@settings(PROFILE, max_examples=300)
@given(st.sampled_from(sorted(wire.KINDS)), st.binary(max_size=200))
def test_noise_is_no_message(kind: bytes, body: bytes) -> None:
    got = attempt(wire.decode, [kind, body])
    assert got.code == "wire.body" if isinstance(got, WireError) else type(got) is wire.KINDS[kind]


@settings(PROFILE, max_examples=200)
@given(st.lists(st.binary(max_size=40), max_size=4))
def test_noise_in_any_number_of_frames_is_no_message(frames: list[bytes]) -> None:
    got = attempt(wire.decode, frames)
    if isinstance(got, WireError):
        assert got.code in ("wire.frames", "wire.kind", "wire.body")
    else:
        assert frames[0] in wire.KINDS
