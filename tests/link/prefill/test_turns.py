"""Which push's batch goes next to a decode rank, and how much is under way at once."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.helpers.links import Rank
from tests.helpers.peers import until

import statelink
from statelink import Receiving, Sending, Status
from statelink.backend import DIRECT, Batch, Fence, SubmitMode, Transfer
from statelink.tcp import TcpBackend

PAGE = 512
"""Bytes of a page, and the most of a batch."""
PAGES = 256
MOST = 4
"""Transfers that the library takes at once."""
LARGE, SMALL = 40, 1
"""Pages of a room."""


class Flight(Transfer):
    """A batch that the library has. It ends when the test wants."""

    def __init__(self, peer: str, batch: Batch) -> None:
        super().__init__()
        self.peer = peer
        self.batch = batch

    def end(self) -> None:
        blocks = self.batch.blocks
        for source, target, nbytes in zip(
            blocks.source.tolist(), blocks.target.tolist(), blocks.nbytes.tolist(), strict=True
        ):
            ctypes.memmove(target, source, nbytes)
        self.succeed()


class Library:
    """Takes batches, and ends each at once, or when the test wants.

    Attributes:
        batches: All of them.
        running: Those that have not ended.
        inside: Called in each call, with the batch.
        at_once: Whether a batch ends inside the call.
    """

    def __init__(self) -> None:
        self.batches: list[Flight] = []
        self.running: list[Flight] = []
        self.inside: Callable[[Batch], None] = lambda batch: None
        self.at_once = True

    def submit(self, peer: str, batch: Batch) -> Transfer:
        flight = Flight(peer, batch)
        self.batches.append(flight)
        self.inside(batch)
        if self.at_once:
            flight.end()
        else:
            self.running.append(flight)
        return flight

    def end(self) -> None:
        """End the oldest batch that runs."""
        self.running.pop(0).end()

    def end_all(self) -> None:
        self.at_once = True
        while self.running:
            self.end()

    @property
    def rooms(self) -> list[int]:
        """The room of each batch."""
        return [flight.batch.room for flight in self.batches]


class Rooms:
    """Requests between a prefill link and decode links, all of this process."""

    def __init__(self, prefill: statelink.Link, source: Rank, targets: dict[statelink.Link, Rank]) -> None:
        self.prefill = prefill
        self.decode, self.other = targets
        self._source = source
        self._targets = targets
        self._sides: dict[int, tuple[Sending, Receiving, Rank, list[int]]] = {}
        self._free = 0

    def open(self, room: int, pages: int, decode: statelink.Link | None = None) -> None:
        """Open a room on both sides, which meet. No two of its pages are side by side, so that each is a block."""
        decode = decode or self.decode
        items = list(range(self._free, self._free + 2 * pages, 2))
        self._free = items[-1] + 2
        receiving = decode.receive(room, self.prefill.address, 16 * pages, {"kv": items}, deadline=60)
        sending = self.prefill.send(room, 16 * pages, deadline=60)
        self._sides[room] = sending, receiving, self._targets[decode], items
        until(lambda: sending.status is Status.WAITING)

    def push(self, *rooms: int) -> None:
        for room in rooms:
            sending, _, _, items = self._sides[room]
            sending.push({"kv": items})
        until(lambda: all(self._sides[room][0].status is not Status.WAITING for room in rooms))

    def abort(self, room: int) -> None:
        sending, receiving, _, _ = self._sides.pop(room)
        sending.abort("the test wants it")
        assert receiving.wait(20) is sending.wait(20) is Status.FAILED

    def succeeded(self) -> None:
        """Every room succeeds, and the right bytes are in its place."""
        for sending, receiving, target, items in self._sides.values():
            assert receiving.wait(20) is sending.wait(20) is Status.SUCCEEDED
            np.testing.assert_array_equal(target.arrays[:, items], self._source.arrays[:, items])


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    # The other side's backend sees nothing of these batches.
    declared = dataclasses.replace(TcpBackend.capabilities, max_transfers=MOST, target=Fence.MOVER)
    monkeypatch.setattr(TcpBackend, "capabilities", declared)
    monkeypatch.setattr(TcpBackend, "submit", lambda _, peer, batch: made.submit(peer, batch))
    return made


@pytest.fixture
def blocking(library: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The library holds the first call until this is set."""
    declared = dataclasses.replace(TcpBackend.capabilities, submit_mode=SubmitMode.BLOCKING, stalled_peers=None)
    monkeypatch.setattr(TcpBackend, "capabilities", declared)
    gate = threading.Event()

    def inside(batch: Batch) -> None:
        if len(library.batches) == 1:
            assert gate.wait(30)

    library.inside = inside
    yield gate
    gate.set()


@pytest.fixture
def rooms(library: Library) -> Iterator[Rooms]:
    config = {"backend": "tcp", "slice_bytes": PAGE, "threads": 1}
    source, first, second = Rank("p", 1, PAGES), Rank("d", 0, PAGES), Rank("e", 0, PAGES)
    with (
        source.open(config, role="prefill") as prefill,
        first.open(config, role="decode") as one,
        second.open(config, role="decode") as other,
    ):
        yield Rooms(prefill, source, {one: first, other: second})
        library.end_all()


def first_batches(library: Library, count: int) -> list[int]:
    until(lambda: len(library.batches) >= count)
    return library.rooms[:count]


def test_a_small_push_goes_beside_a_large_one_that_is_under_way(rooms: Rooms, library: Library) -> None:
    library.at_once = False
    rooms.open(1, LARGE)
    rooms.open(2, SMALL)
    rooms.push(1)
    until(lambda: library.running)
    before = len(library.running)
    assert before < MOST, "some of what the library takes is kept for small ones"
    rooms.push(2)
    assert first_batches(library, before + 1)[-1] == 2
    library.end_all()
    rooms.succeeded()


def test_a_small_push_goes_next_and_large_ones_take_turns(
    rooms: Rooms, library: Library, blocking: threading.Event
) -> None:
    """While the first batch of one large push is in the library, another one and a small one come."""
    for room, pages in ((1, LARGE), (2, LARGE), (3, SMALL)):
        rooms.open(room, pages)
    rooms.push(1)
    until(lambda: library.batches)
    rooms.push(2, 3)
    blocking.set()
    rooms.succeeded()
    assert library.rooms[:4] == [1, 3, 1, 2]
    large = [room for room in library.rooms if room != 3]
    changes = sum(here != there for here, there in itertools.pairwise(large))
    assert changes >= len(large) - 4, "two large ones do not take turns"


def test_a_stream_of_small_pushes_leaves_a_large_one_its_half(
    rooms: Rooms, library: Library, blocking: threading.Event
) -> None:
    small = range(10, 10 + 2 * LARGE)
    rooms.open(1, LARGE)
    for room in small:
        rooms.open(room, SMALL)
    rooms.push(1)
    until(lambda: library.batches)
    rooms.push(*small)
    blocking.set()
    rooms.succeeded()
    last = len(library.rooms) - 1 - library.rooms[::-1].index(1)
    beside = sum(room != 1 for room in library.rooms[:last])
    assert LARGE - 3 <= beside <= LARGE + 3


def test_what_is_under_way_is_bounded_and_none_is_lost(rooms: Rooms, library: Library) -> None:
    library.at_once = False
    for room in range(1, 2 + MOST):
        rooms.open(room, 10)
    rooms.push(*range(1, 2 + MOST))
    seen = 0
    for _ in range(10 * (1 + MOST)):
        until(lambda: library.running)
        seen = max(seen, len(library.running))
        library.end()
    rooms.succeeded()
    assert seen <= MOST
    assert len(library.batches) == 10 * (1 + MOST)


def test_nothing_goes_of_a_room_that_is_aborted_while_its_batch_waits(rooms: Rooms, library: Library) -> None:
    library.at_once = False
    rooms.open(1, LARGE)
    rooms.open(2, LARGE)
    rooms.push(1, 2)
    while 2 not in library.rooms:
        until(lambda: library.running)
        library.end()
    rooms.abort(1)
    begun = library.rooms.count(1)
    library.end_all()
    rooms.succeeded()
    assert library.rooms.count(1) == begun


def test_nothing_goes_of_a_room_that_is_aborted_while_another_has_its_turn(
    rooms: Rooms, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job that tells its hooks waits behind the one that is inside the library, and then goes on."""
    monkeypatch.setattr(type(DIRECT.sender()), "prompt", False)  # so data threads run the jobs
    pushed, aborted = threading.Event(), threading.Event()

    def inside(batch: Batch) -> None:
        assert (pushed if batch.room == 1 else aborted).wait(30)

    library.inside = inside
    rooms.open(1, LARGE)
    rooms.open(2, LARGE)
    rooms.push(1)
    until(lambda: library.batches)
    rooms.push(2)
    pushed.set()
    until(lambda: 2 in library.rooms)
    begun = library.rooms.count(1)
    rooms.abort(1)
    aborted.set()
    rooms.succeeded()
    assert library.rooms.count(1) == begun


def test_pushes_to_several_peers_share_a_thread(rooms: Rooms, library: Library, blocking: threading.Event) -> None:
    """A call for a large push takes long, and the next one is for the other peer."""
    held = library.inside

    def slow(batch: Batch) -> None:
        held(batch)
        time.sleep(0.002)

    library.inside = slow
    rooms.open(1, LARGE)
    rooms.open(2, LARGE, rooms.other)
    rooms.push(1)
    until(lambda: library.batches)
    rooms.push(2)
    blocking.set()
    rooms.succeeded()
    turns = [flight.peer for flight in library.batches]
    assert sum(here != there for here, there in itertools.pairwise(turns)) > LARGE
