"""Large batches of one host are copied by several threads: every byte once, and none of them outlives its peer."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from .common import POISON, SPACE, extra_process, grant_all, join, u64, write
from .node import Node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .remote import Remote

COUNT = 3001
"""Blocks of a batch, of which pieces hold neither whole ones nor equally many."""
LARGE = 4 << 20
"""Bytes that two threads copy."""


@pytest.fixture
def here() -> Iterator[Node]:
    node = Node(np.full(SPACE, POISON, np.uint8))
    yield node
    node.close_all()


def copying() -> int:
    """How many threads of this process help to copy."""
    return sum(thread.name.startswith("tcp-copy-") for thread in threading.enumerate())


def test_every_byte_arrives_once(source: Remote, here: Node) -> None:
    random = np.random.default_rng(5)
    source.memory[:] = random.integers(0, 255, SPACE, np.uint8)
    nbytes = random.integers(1, 15_000, COUNT, np.uint64)
    starts = np.concatenate((u64(0), np.cumsum(nbytes)[:-1]))
    order = random.permutation(COUNT)
    expected = here.memory.copy()
    for at, length in zip(starts[order].tolist(), nbytes[order].tolist(), strict=True):
        expected[at : at + length] = source.memory[at : at + length]

    join(source, here)
    grant_all(here)
    places = starts[order]
    blocks = places + np.uint64(source.address), places + np.uint64(here.address), nbytes[order]
    assert source.do("outcome", source.do("write", "source", "target", 1, 1, *blocks)) == (True, "", True)
    assert np.array_equal(here.memory, expected)
    assert copying() == 1
    here.do("disconnect", "target", "source")
    assert copying() == 0


def test_a_small_batch_needs_one_thread(source: Remote, here: Node) -> None:
    join(source, here)
    grant_all(here)
    assert write(source, here, nbytes=LARGE - 1).ok
    assert copying() == 0
    assert write(source, here, nbytes=LARGE).ok
    assert copying() == 1


def test_a_source_that_dies_leaves_no_thread_at_work(here: Node) -> None:
    with extra_process() as source:
        join(source, here, stall_timeout=5.0)
        grant_all(here)
        assert write(source, here, nbytes=LARGE).ok
        source.do("write", "source", "target", 1, 1, u64(source.address), u64(here.address), u64(SPACE))
    here.do("disconnect", "target", "source")
    assert copying() == 0
    here.memory[:] = POISON
    time.sleep(0.05)
    assert (here.memory == POISON).all()
