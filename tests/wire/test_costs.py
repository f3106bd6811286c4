"""What it costs to read the largest messages that may come: near linear in their size, whatever is in them."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import msgspec
import pytest

from statelink import wire
from statelink.errors import MismatchError, PeerError, WireError
from statelink.wire import KINDS, RENDEZVOUS_KINDS

from .largest import CASES, read

SMALL, LARGE = 32 << 10, 256 << 10
FREE = 200
"""Calls that any message may cost."""
ALLOWED = 0.08
"""Seconds of processor time that a message of any size may cost before its growth matters."""


def frames_of(name: str, nbytes: int) -> list[bytes]:
    return [name.partition(":")[0].encode(), msgspec.msgpack.encode(CASES[name](nbytes))]


def take(name: str, frames: list[bytes]) -> None:
    with contextlib.suppress(WireError, MismatchError, PeerError):  # to refuse one has to be as cheap
        read(name, frames)


def calls(name: str, frames: list[bytes]) -> int:
    """Calls of functions that reading a message takes, those into libraries among them."""
    count = 0

    def note(frame: Any, event: str, what: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        take(name, frames)
    finally:
        sys.setprofile(before)
    return count


def seconds(name: str, frames: list[bytes]) -> float:
    """Processor time of this thread, the least of several runs: others may disturb one."""
    found = []
    for _ in range(3):
        before = time.thread_time()
        take(name, frames)
        found.append(time.thread_time() - before)
    return min(found)


def test_every_kind_has_its_largest_message() -> None:
    assert {name.partition(":")[0].encode() for name in CASES} == {*KINDS, *RENDEZVOUS_KINDS}


@pytest.mark.parametrize("name", CASES)
def test_eight_times_the_bytes_cost_little_more_than_eight_times_the_work(name: str) -> None:
    small, large = frames_of(name, SMALL), frames_of(name, LARGE)
    assert calls(name, large) < 12 * calls(name, small) + FREE
    assert seconds(name, large) < 24 * seconds(name, small) + ALLOWED, "what numpy does grows faster than the message"


@pytest.mark.parametrize("kind", sorted({*KINDS, *RENDEZVOUS_KINDS}))
def test_each_kind_has_a_largest_size(kind: bytes) -> None:
    """It is looked at before anything of the body is."""
    type_ = {**KINDS, **RENDEZVOUS_KINDS}[kind]
    body = bytes(wire.limit_of(type_) + 1)
    with pytest.raises(WireError) as caught:
        wire.decode([kind, body], {**KINDS, **RENDEZVOUS_KINDS})
    assert caught.value.code == "wire.size"
    with pytest.raises(WireError) as caught:
        wire.decode([kind, body[:-1]], {**KINDS, **RENDEZVOUS_KINDS})
    assert caught.value.code == "wire.body"


def test_a_handshake_of_many_pieces_is_refused_after_a_bounded_number_of_them() -> None:
    """Each of its layouts is a few KB long, and falls apart into 65,536 pieces."""
    (kind, body) = frames_of("hello: 64 slabs", 66 << 10)
    message = wire.decode([kind, body])
    assert isinstance(message, wire.Hello)
    for effort in (wire.MAX_EFFORT, 1 << 12):
        with pytest.raises(WireError, match="a description takes too long to check") as caught:
            wire.read_handshake(message.handshake, effort)
        assert caught.value.code == "wire.effort"
