"""Frames that come together, or in pieces: each takes what is its own, and payload reaches its place."""

from __future__ import annotations

import ctypes
import os
import random
import struct
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from .by_hand import DONE, HEADER, REFUSED, Caller, Stream
from .common import POISON, grant_all, u64

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .node import Node

SEND, COPY = 1, 2
SIZE = 1 << 12
ROUNDS, WRITES = 20, 30


@pytest.fixture(params=[True, False], ids=["copies", "receives"])
def stream(here: Node, request: pytest.FixtureRequest) -> Iterator[Stream]:
    """A connection of ``source`` to ``target``, which may copy from this process's memory, or may not."""
    caller = Caller("source", here.open("target", same_host_copy=request.param))
    here.connect("target", "source", caller.descriptor)
    kept = []

    def at(token: bytes) -> tuple[int, int]:
        kept.append(np.frombuffer(token, np.uint8).copy())
        return os.getpid(), kept[0].ctypes.data

    made = caller.dial(at)
    assert made.copies is request.param
    grant_all(here)
    yield made
    made.close()


def test_frames_that_come_together(here: Node, stream: Stream) -> None:
    """WRITEs of both modes, allowed and refused, in pieces of any size."""
    numbers = random.Random(3)
    source = np.random.default_rng(3).integers(1, 255, SIZE, np.uint8)
    for first in range(1, ROUNDS * WRITES, WRITES):
        here.memory[:SIZE] = POISON
        expected = np.full(SIZE, POISON, np.uint8)
        sent, statuses = b"", []
        for sequence in range(first, first + WRITES):
            mode = numbers.choice([SEND, COPY]) if stream.copies else SEND
            room = numbers.choice([1, 1, 1, 2])
            cuts = sorted(numbers.sample(range(SIZE + 1), 2 * numbers.choice([1, 2, 40])))
            low, nbytes = np.array(cuts[::2], np.uint64), np.diff(np.array(cuts, np.uint64))[::2]
            total = int(nbytes.sum())
            sent += HEADER.pack(b"SLw1", mode, len(low), sequence, room, 1, total)
            sent += (low + np.uint64(here.address)).tobytes() + nbytes.tobytes()
            parts = [slice(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
            if mode == COPY:
                sent += (low + np.uint64(source.ctypes.data)).tobytes()
            else:
                sent += b"".join(source[part].tobytes() for part in parts)
            statuses.append((DONE if room == 1 else REFUSED, sequence))
            for part in parts if room == 1 else ():
                expected[part] = source[part]
        while sent:
            most = numbers.choice([1, 7, 48, 300, 5000, 100_000])
            stream.write(sent[:most])
            sent = sent[most:]
        assert [stream.answer()[:2] for _ in statuses] == statuses
        assert (here.memory[:SIZE] == expected).all()


def test_a_large_frame_after_small_ones(here: Node, stream: Stream) -> None:
    """More blocks than the receiver has space for at first, behind others that came with their beginning."""
    count = 2000
    small = HEADER.pack(b"SLw1", SEND, 1, 1, 1, 1, 3) + struct.pack("<QQ", here.address, 3) + b"abc"
    places = np.arange(count, dtype=np.uint64) * np.uint64(2) + u64(here.address + 64)
    sizes = np.ones(count, np.uint64)
    large = HEADER.pack(b"SLw1", SEND, count, 2, 1, 1, count) + places.tobytes() + sizes.tobytes() + b"x" * count
    stream.write(small + large + small)
    assert [stream.answer()[0] for _ in range(3)] == [DONE] * 3
    assert here.memory[:4].tobytes() == b"abc" + bytes([POISON])
    assert here.memory[64 : 64 + 2 * count].tobytes() == (b"x" + bytes([POISON])) * count


def test_a_batch_that_comes_again(here: Node) -> None:
    """One that has landed, and whose sender did not hear of it, is done and not written again. No other one is done."""
    caller = Caller("source", here.open("target"))
    here.connect("target", "source", caller.descriptor)
    grant_all(here)
    for batches in (
        [(7, 2, b"xyz", REFUSED, POISON), (8, 1, b"abc", DONE, ord("a"))],
        [(7, 2, b"xyz", REFUSED, ord("a")), (8, 1, b"xyz", DONE, ord("a")), (9, 1, b"def", DONE, ord("d"))],
    ):
        stream = caller.dial()
        for sequence, room, payload, status, found in batches:
            header = HEADER.pack(b"SLw1", SEND, 1, sequence, room, 1, 3)
            stream.write(header + struct.pack("<QQ", here.address, 3) + payload)
            assert stream.answer()[:2] == (status, sequence)
            assert here.memory[0] == found
        stream.close()


def test_a_batch_counts_though_its_answer_has_nobody_to_reach(here: Node) -> None:
    """Its sender is told later that it is done, and sends it no more: who waits for its bytes would wait for ever."""
    caller = Caller("source", here.open("target"))
    here.connect("target", "source", caller.descriptor)
    grant_all(here)
    landed = threading.Event()
    here.backends["target"].when_landed("source", 1, 1, 3, landed.set)
    batch = HEADER.pack(b"SLw1", SEND, 1, 7, 1, 1, 3) + struct.pack("<QQ", here.address, 3) + b"abc"
    stream = caller.dial()
    stream.write(batch[:-1])
    library, fd = ctypes.PyDLL(None), stream.detach()  # its calls let no other thread run
    assert library.send(fd, batch[-1:], 1, 0) == 1
    assert library.close(fd) == 0
    again = caller.dial()
    again.write(batch)
    assert again.answer()[:2] == (DONE, 7)
    assert landed.wait(10)
    again.close()
