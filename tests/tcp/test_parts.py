"""The embedded backend: nothing is left behind, and what is granted."""

from __future__ import annotations

import struct
import threading

import numpy as np
import pytest

from statelink.errors import TransferError

from .by_hand import DONE, HEADER, Caller, Lost
from .common import (
    MODES,
    POISON,
    batch_of,
    grant_all,
    join,
    opening,
    u64,
)
from .node import Node

# Nothing is left behind.


def test_close_twice(here: Node) -> None:
    join(here, here)
    grant_all(here)
    assert here.outcome(here.write("source", "target", 1, 1, u64(here.address), u64(here.address + 9), u64(5))).ok
    backends = list(here.backends.values())
    for backend in backends:
        backend.disconnect("nobody")
        backend.close()
        backend.close()
        backend.disconnect("target")
    with pytest.raises(TransferError, match="not connected"):
        backends[0].submit("target", batch_of(here))
    with pytest.raises(TransferError, match="closed"):
        backends[0].connect("target", backends[1].descriptor(), ())


@pytest.mark.parametrize("mode", MODES)
def test_nothing_leaks(here: Node, mode: str) -> None:
    other = Node(np.zeros(4096, np.uint8))
    before = here.held()
    ours, theirs = here.open("target"), other.open("source", **opening(mode))
    opened = here.held()
    for at in range(50):
        here.connect("target", "source", theirs)
        other.connect("source", "target", ours)
        here.grant("target", "source", 1, at, u64(here.address), u64(4096))
        done = other.write("source", "target", 1, at, u64(other.address), u64(here.address), u64(4096))
        assert other.outcome(done).ok
        here.disconnect("target", "source")
        other.disconnect("source", "target")
    assert here.held() == opened
    here.close_all()
    other.close_all()
    assert here.held() == before


def test_threads_are_bounded(here: Node) -> None:
    """A peer that connects again and again has one thread, which serves its last connection."""
    caller = Caller("source", here.open("target"))
    here.connect("target", "source", caller.descriptor)
    grant_all(here)
    before = threading.active_count()
    streams = [caller.dial() for _ in range(10)]
    assert threading.active_count() == before + 1
    for stream in streams[:-1]:
        with pytest.raises(Lost):
            stream.read(1)
        stream.close()
    streams[-1].write(HEADER.pack(b"SLw1", 1, 1, 1, 1, 1, 3) + struct.pack("<QQ", here.address, 3) + b"abc")
    assert streams[-1].answer()[0] == DONE
    assert here.memory[:4].tobytes() == b"abc" + bytes([POISON])
    streams[-1].close()


def test_what_is_granted_against_a_list_of_bytes(here: Node) -> None:
    """Blocks land if every byte of each is granted; the first that is not is named, and nothing lands."""
    random = np.random.default_rng(0)
    caller = Caller("source", here.open("target"))
    here.connect("target", "source", caller.descriptor)
    stream = caller.dial()
    taken = 0
    for room in range(200):
        granted = np.zeros(64, np.bool_)
        granted[random.integers(0, 64, 40 if room % 2 else 300)] = True
        cuts = random.integers(0, 2, 64).astype(np.bool_)
        starts = [at for at in range(64) if granted[at] and (not at or not granted[at - 1] or cuts[at])]
        ends = [next((to for to in range(at + 1, 64) if not granted[to] or to in starts), 64) for at in starts]
        base = np.uint64(here.address)
        here.grant("target", "source", room, 1, u64(*starts) + base, u64(*ends) - u64(*starts))
        count = int(random.integers(1, 20))
        at, nbytes = random.integers(0, 64, count, np.uint64), random.integers(1, 9, count, np.uint64)
        inside = [a + n <= 64 and granted[a : a + n].all() for a, n in zip(at.tolist(), nbytes.tolist(), strict=True)]
        total = int(nbytes.sum())
        header = HEADER.pack(b"SLw1", 1, count, room, room, 1, total)
        here.memory[:64] = POISON
        stream.write(header + (at + base).tobytes() + nbytes.tobytes() + b"x" * total)
        status, _, reason = stream.answer()
        taken += status == DONE
        assert (status == DONE) is all(inside)
        assert (here.memory[:64] == POISON).all() is not all(inside)
        if not all(inside):
            assert f"block {inside.index(False)} " in reason
    assert 20 < taken < 180
    stream.close()
