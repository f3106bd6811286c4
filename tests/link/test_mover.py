"""Driving a backend, without one."""

from __future__ import annotations

import threading
from typing import Any, cast

import numpy as np
import pytest

from statelink.backend import Backend, Batch, Blocks, RegionTable, Transfer
from statelink.link._mover import move
from statelink.state import Region
from statelink.tcp import TcpBackend


class Lazy:
    """A library that works only while it is polled, and ends one transfer each time."""

    name = "lazy"
    capabilities = TcpBackend.capabilities

    def submit(self, peer: str, batch: Batch) -> Transfer:
        return Transfer()

    def poll(self, transfers: list[Transfer]) -> None:
        assert all(transfer.outcome is None for transfer in transfers)
        transfers[0].succeed()


def test_polls_until_the_last_transfer_has_ended() -> None:
    """Several are under way at once, and the first to end says nothing of the others."""
    count = 2 * Lazy.capabilities.max_transfers
    places = np.arange(count, dtype=np.uint64) * np.uint64(64) + np.uint64(4096)
    zero = np.zeros(count, np.uint32)
    blocks = Blocks(places, places, np.full(count, 64, np.uint64), zero, zero)
    table = RegionTable([Region(4096, 64 * count)], "lazy")
    given_up = threading.Event()
    timer = threading.Timer(10.0, given_up.set)
    timer.start()
    backend: Any = Lazy()
    moving = move(
        cast("Backend", backend),
        "peer",
        [blocks],
        room=1,
        generation=1,
        tables=(table, table),
        slice_bytes=64,
        cancelled=given_up,
    )
    with pytest.raises(StopIteration) as ended:
        next(moving)
    timer.cancel()
    timer.join()
    assert ended.value.value == (64 * count, count, None, frozenset(), ())
