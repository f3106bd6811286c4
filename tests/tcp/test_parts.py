"""The embedded backend: nothing is left behind; and its parts by themselves."""

from __future__ import annotations

import ctypes
import os
import struct
import threading

import numpy as np
import pytest

from statelink.errors import StatelinkError, TransferError
from statelink.tcp import _frames
from statelink.tcp._iovec import Vectors
from statelink.tcp._ranges import Ranges
from statelink.tcp._stream import Lost

from .common import (
    HEADER,
    MODES,
    POISON,
    Caller,
    batch_of,
    grant_all,
    join,
    u64,
)
from .node import Node, make_file

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
    path = make_file(4096)
    other = Node(path)
    os.unlink(path)
    before = here.held()
    ours, theirs = here.open("target"), other.open("source", same_host_copy=mode == "COPY")
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
    assert not here.backends["target"]._grants._grants
    here.close_all()
    other.close_all()
    assert here.held() == before


def test_threads_are_bounded(here: Node) -> None:
    """A peer that connects again and again has one thread, which serves its last connection."""
    ours, theirs = here.open("source"), here.open("target")
    here.connect("target", "source", ours)
    grant_all(here)
    before = threading.active_count()
    caller = Caller(here, "source", theirs, "target")
    streams = [caller.dial() for _ in range(10)]
    assert threading.active_count() == before + 1
    for stream in streams[:-1]:
        with pytest.raises(Lost):
            stream.read(memoryview(bytearray(1)))
        stream.close()
    streams[-1].write(HEADER.pack(b"SLw1", 1, 1, 1, 1, 1, 3) + struct.pack("<QQ", here.address, 3) + b"abc")
    streams[-1].read(memoryview(bytearray(_frames.REPLY.size)))
    assert here.memory[:4].tobytes() == b"abc" + bytes([POISON])
    streams[-1].close()
    caller.waker.close()


# The parts.


def test_windows_cover_every_byte() -> None:
    random = np.random.default_rng(0)
    nbytes = random.integers(1, 50, 3000, np.uint64)
    addresses = np.cumsum(nbytes + random.integers(0, 2, 3000, np.uint64))
    vectors = Vectors(addresses, nbytes)
    wanted = np.concatenate([np.arange(a, a + n) for a, n in zip(addresses.tolist(), nbytes.tolist(), strict=True)])
    assert vectors.total == len(wanted)
    position, seen = 0, []
    while position < vectors.total:
        pointer, count = vectors.window(position, int(random.integers(1, 60_000)))
        assert 0 < count <= 1024
        table = np.ctypeslib.as_array((ctypes.c_uint64 * (2 * count)).from_address(pointer)).reshape(count, 2)
        part = np.concatenate([np.arange(a, a + n) for a, n in table.tolist()])
        part = part[: int(random.integers(1, len(part) + 1))]  # a partial call
        seen.append(part)
        position += len(part)
    assert np.array_equal(np.concatenate(seen), wanted)


def test_ranges_against_a_list_of_bytes() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        granted = np.zeros(64, np.bool_)
        granted[random.integers(0, 64, 40)] = True
        cuts = random.integers(0, 2, 64).astype(np.bool_)
        starts = [at for at in range(64) if granted[at] and (not at or not granted[at - 1] or cuts[at])]
        ends = [next((to for to in range(at + 1, 64) if not granted[to] or to in starts), 64) for at in starts]
        ranges = Ranges(u64(*starts), u64(*ends) - u64(*starts))
        addresses, nbytes = random.integers(0, 64, 20, np.uint64), random.integers(0, 9, 20, np.uint64)
        inside = [
            n > 0 and a + n <= 64 and granted[a : a + n].all()
            for a, n in zip(addresses.tolist(), nbytes.tolist(), strict=True)
        ]
        expected = None if all(inside) else inside.index(False)
        assert ranges.outside(addresses, nbytes) == expected


def test_ranges_at_the_end_of_memory() -> None:
    top = (1 << 64) - 4096
    ranges = Ranges(u64(top), u64(4096))
    assert ranges.outside(u64(top, top + 4095), u64(4096, 1)) is None
    assert ranges.outside(u64(top), u64(4097)) == 0
    assert ranges.outside(u64(top + 1), u64((1 << 64) - 1)) == 0
    with pytest.raises(ValueError, match="disjoint"):
        Ranges(u64(top), u64(4097))


def test_errors_have_the_usual_shape(here: Node) -> None:
    here.open("source")
    with pytest.raises(StatelinkError) as caught:
        here.backends["source"].submit("nobody", batch_of(here))
    assert caught.value.code == "backend.transfer"
    assert caught.value.reason.who["peer"] == "nobody"
