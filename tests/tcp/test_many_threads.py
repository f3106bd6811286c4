"""Batches of one peer may be submitted by several threads: whoever finds nobody sending sends what is queued."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.helpers.peers import until

from statelink.backend import Outcome

from .common import MODES, SLOWLY, batch_of, grant_all, join, u64
from .node import Node

if TYPE_CHECKING:
    from statelink.backend import Transfer

    from .remote import Remote

THREADS, BATCHES, SIZE = 4, 60, 30_000


@pytest.mark.parametrize("mode", MODES)
def test_batches_of_several_threads_arrive(target: Remote, mode: str) -> None:
    """Also where the socket takes a part of a batch only, and the interpreter changes threads in the middle."""
    memory = np.random.default_rng(5).integers(0, 255, THREADS * BATCHES * SIZE, np.uint8)
    source = Node(memory)
    expected = target.memory.copy()
    expected[: len(memory)] = memory
    if mode == "SEND":
        target.do("reads", **SLOWLY)
    join(source, target, mode)
    grant_all(target)
    started = threading.Barrier(THREADS)
    submitted: list[list[Transfer]] = [[] for _ in range(THREADS)]

    def submit(thread: int) -> None:
        started.wait(20)
        for number in range(BATCHES):
            at = (thread * BATCHES + number) * SIZE
            columns = {"source": u64(source.address + at), "target": u64(target.address + at), "nbytes": u64(SIZE)}
            submitted[thread].append(source.backends["source"].submit("target", batch_of(source, **columns)))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=submit, args=(n,), daemon=True) for n in range(THREADS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
        until(lambda: all(each.outcome is not None for part in submitted for each in part), 60)
    finally:
        sys.setswitchinterval(interval)
        source.close_all()
    assert [[each.outcome for each in part] for part in submitted] == [[Outcome(True)] * BATCHES] * THREADS
    np.testing.assert_array_equal(target.memory, expected)
