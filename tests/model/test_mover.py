"""Driving a backend, without one."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from statelink.backend import Backend, Batch, Blocks, Outcome, RegionTable, Transfer
from statelink.link._mover import Moving, move
from statelink.state import Region
from statelink.tcp import TcpBackend

if TYPE_CHECKING:
    from collections.abc import Generator


def side_by_side(count: int) -> tuple[Blocks, RegionTable]:
    """So many blocks of 64 bytes, and the one region that they fill."""
    places = np.arange(count, dtype=np.uint64) * np.uint64(64) + np.uint64(4096)
    zero = np.zeros(count, np.uint32)
    blocks = Blocks(places, places, np.full(count, 64, np.uint64), zero, zero)
    table = RegionTable([Region(4096, 64 * count)], "lazy")
    return blocks, table


class Lazy:
    """A library that works only while it is polled, and ends one transfer each time."""

    name = "lazy"
    capabilities = TcpBackend.capabilities

    def submit(self, peer: str, batch: Batch) -> Transfer:
        return Transfer()

    def poll(self, transfers: list[Transfer]) -> None:
        assert all(transfer.outcome is None for transfer in transfers)
        transfers[0].succeed()


def outcome_of(moving: Generator[float | None, None, Moving]) -> Moving:
    """What became of a move, which may wait as often as it likes."""
    while True:
        try:
            next(moving)
        except StopIteration as ended:
            result: Moving = ended.value
            return result


def test_polls_until_the_last_transfer_has_ended() -> None:
    """Several are under way at once, and the first to end says nothing of the others."""
    count = 2 * Lazy.capabilities.max_transfers
    blocks, table = side_by_side(count)
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
    result = outcome_of(moving)
    timer.cancel()
    timer.join()
    assert result == (64 * count, count, None, frozenset(), (), ())


class Picky(Lazy):
    """It takes a MiB at once, be it in one block."""

    capabilities = dataclasses.replace(TcpBackend.capabilities, max_bytes=1 << 20, max_blocks=4)

    def __init__(self) -> None:
        self.taken: list[Blocks] = []

    def submit(self, peer: str, batch: Batch) -> Transfer:
        self.taken.append(batch.blocks)
        return Transfer()


def test_a_block_that_is_larger_than_a_library_takes_is_cut() -> None:
    """Of three blocks the second is, and what is moved is the same byte for byte."""
    mib = 1 << 20
    sizes = np.array([100, 2 * mib + 1, 200], np.uint64)
    source = np.array([4096, 8192, 4096 + 4 * mib], np.uint64)
    target = source + np.uint64(1 << 40)
    one, two = np.zeros(3, np.uint32), np.ones(3, np.uint32)
    here = RegionTable([Region(4096, 8 * mib)], "picky")
    there = RegionTable([Region(1, 1), Region(4096 + (1 << 40), 8 * mib)], "picky")
    backend: Any = Picky()
    moving = move(
        cast("Backend", backend),
        "peer",
        [Blocks(source, target, sizes, one, two)],
        room=1,
        generation=1,
        tables=(here, there),
        slice_bytes=1 << 40,
        cancelled=threading.Event(),
    )
    assert outcome_of(moving).nbytes == sizes.sum()
    assert [piece.nbytes.tolist() for piece in backend.taken] == [[100], [mib], [mib], [1, 200]]
    whole = Blocks.concatenate(backend.taken)
    assert whole.source.tolist() == [4096, 8192, 8192 + mib, 8192 + 2 * mib, 4096 + 4 * mib]
    assert (whole.target - whole.source == 1 << 40).all()
    assert (whole.source_region.tolist(), whole.target_region.tolist()) == ([0] * 5, [1] * 5)


class Sudden(Transfer):
    """One that a thread of its backend fails, just before it is looked at for the so many-th time."""

    def __init__(self, looks: int) -> None:
        self._looks = looks
        super().__init__()

    @property
    def outcome(self) -> Outcome | None:
        """The outcome at this look."""
        self._looks -= 1
        return Outcome(False, "the link went down", settled=False) if self._looks < 0 else None

    @outcome.setter
    def outcome(self, outcome: Outcome | None) -> None: ...


class Breaking(Lazy):
    """The second of its transfers fails by itself, and every other succeeds when it is polled."""

    def __init__(self, looks: int) -> None:
        self.made: list[Transfer] = []
        self._looks = looks

    def submit(self, peer: str, batch: Batch) -> Transfer:
        self.made.append(Sudden(self._looks) if len(self.made) == 1 else Transfer())
        return self.made[-1]

    def poll(self, transfers: list[Transfer]) -> None:
        for transfer in transfers:
            if not isinstance(transfer, Sudden):
                transfer.succeed()


@pytest.mark.parametrize("looks", range(12))
def test_sees_a_failure_whenever_it_comes(looks: int) -> None:
    """The outcome may be set between any two looks at it, and is never lost."""
    count = 2 * Lazy.capabilities.max_transfers
    blocks, table = side_by_side(count)
    moving = move(
        cast("Backend", Breaking(looks)),
        "peer",
        [blocks],
        room=1,
        generation=1,
        tables=(table, table),
        slice_bytes=64,
        cancelled=threading.Event(),
    )
    result = outcome_of(moving)
    assert result.reason is not None
    assert result.reason.cause == "the link went down"
    assert len(result.strays) == 1
