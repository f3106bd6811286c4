"""Small pushes of several rooms in one batch, over a backend that declares that it takes them so."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from tests.helpers.links import Rank
from tests.helpers.peers import until

import statelink
from statelink import Receiving, Sending, Status
from statelink.backend import Batch, Capabilities, Fence, SubmitMode, Transfer
from statelink.errors import Reason, TransferError
from statelink.tcp import TcpBackend

PAGES, TOKENS = 2, 32
"""Of each room."""
FIRST, LAST = 1, 6
"""Rooms: the first one is held in the library, while the others are pushed."""


class Library:
    """Copies inside the posting call. It holds the first call until it may go on.

    Attributes:
        batches: Room and blocks of each call.
        held: Set when the first call waits.
        gate: Lets it go on.
        refuses: Address to which nothing may be written; 0 for none.
        raises: Raised for a batch of several rooms, after the first call.
        failed: The outcome of such a batch, if it has one that is not a success.
    """

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []
        self.held = threading.Event()
        self.gate = threading.Event()
        self.refuses = 0
        self.raises: BaseException | None = None
        self.failed: Transfer | None = None

    def submit(self, peer: str, batch: Batch) -> Transfer:
        blocks = batch.blocks
        self.batches.append((batch.room, blocks.count))
        if len(self.batches) == 1:
            self.held.set()
            assert self.gate.wait(30)
        if self.raises is not None and not batch.room:
            raise self.raises
        if self.failed is not None and not batch.room:
            return self.failed
        if self.refuses and (blocks.target == self.refuses).any():
            raise TransferError("the library refuses a block", cause="it is not registered", peer=peer)
        for source, target, nbytes in zip(
            blocks.source.tolist(), blocks.target.tolist(), blocks.nbytes.tolist(), strict=True
        ):
            ctypes.memmove(target, source, nbytes)
        transfer = Transfer()
        transfer.succeed()
        return transfer


class Rooms:
    """Requests between two links of this process."""

    def __init__(self, prefill: statelink.Link, decode: statelink.Link, source: Rank, target: Rank) -> None:
        self.prefill = prefill
        self.decode = decode
        self.source = source
        self.target = target
        self.expected = target.arrays.copy()
        self.sending: dict[int, Sending] = {}
        self.receiving: dict[int, Receiving] = {}

    def pages(self, room: int) -> list[int]:
        return [PAGES * room + number for number in range(PAGES)]

    def open(self, room: int) -> None:
        """Open a room on both sides, which meet."""
        self.receiving[room] = self.decode.receive(room, self.prefill.address, TOKENS, {"kv": self.pages(room)})
        self.sending[room] = self.prefill.send(room, TOKENS)
        until(lambda: self.sending[room].status is Status.WAITING)

    def push(self, room: int) -> None:
        self.sending[room].push({"kv": self.pages(room)})

    def push_all(self, library: Library) -> None:
        """Push all rooms, of which the first one is held meanwhile."""
        for room in range(FIRST, LAST + 1):
            self.open(room)
        self.push(FIRST)
        assert library.held.wait(20)
        for room in range(FIRST + 1, LAST + 1):
            self.push(room)
        until(lambda: all(self.sending[room].status is not Status.WAITING for room in self.sending))

    def succeeded(self, *rooms: int) -> None:
        for room in rooms:
            assert self.sending[room].wait(20) is self.receiving[room].wait(20) is Status.SUCCEEDED
            self.expected[:, self.pages(room)] = self.source.arrays[:, self.pages(room)]
            report = self.sending[room].report
            assert report is not None
            assert report.moved["kv"].nbytes == PAGES * self.source.arrays[:, 0].nbytes
        np.testing.assert_array_equal(self.target.arrays, self.expected)

    def failed(self, room: int) -> Reason:
        assert self.sending[room].wait(20) is self.receiving[room].wait(20) is Status.FAILED
        reason = self.sending[room].reason
        assert reason is not None
        return reason


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    declared = dataclasses.replace(
        TcpBackend.capabilities,
        submit_mode=SubmitMode.BLOCKING,
        stalled_peers=None,
        target=Fence.MOVER,
        joins_rooms=True,
    )
    monkeypatch.setattr(TcpBackend, "capabilities", declared)
    monkeypatch.setattr(TcpBackend, "submit", lambda _, peer, batch: made.submit(peer, batch))
    return made


@pytest.fixture
def rooms(library: Library) -> Iterator[Rooms]:
    source, target = Rank("p", 1), Rank("d")
    config = {"role": "prefill", "backend": "tcp"}
    with source.open(config) as prefill, target.open(config, role="decode") as decode:
        yield Rooms(prefill, decode, source, target)
        library.gate.set()


def blocks_of(library: Library, room: int) -> list[int]:
    return [count for number, count in library.batches if number == room]


def test_rooms_that_wait_for_one_another_share_a_batch(rooms: Rooms, library: Library) -> None:
    rooms.push_all(library)
    library.gate.set()
    rooms.succeeded(*range(FIRST, LAST + 1))
    (alone,) = blocks_of(library, FIRST)
    assert blocks_of(library, 0) == [alone * (LAST - FIRST)]
    assert len(library.batches) == 2


def test_a_room_alone_keeps_its_batch(rooms: Rooms, library: Library) -> None:
    library.gate.set()
    for room in (1, 2, 3):
        rooms.open(room)
        rooms.push(room)
        rooms.succeeded(room)
    assert [room for room, _ in library.batches] == [1, 2, 3]


def test_a_batch_holds_no_more_blocks_than_the_backend_takes(
    rooms: Rooms, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TcpBackend, "capabilities", dataclasses.replace(TcpBackend.capabilities, max_blocks=4))
    rooms.push_all(library)
    library.gate.set()
    rooms.succeeded(*range(FIRST, LAST + 1))
    assert max(count for _, count in library.batches) <= 4


def test_a_bad_block_fails_its_own_room_alone(rooms: Rooms, library: Library) -> None:
    bad = FIRST + 2
    library.refuses = int(rooms.target.arrays[0, rooms.pages(bad)[0]].ctypes.data)
    rooms.push_all(library)
    library.gate.set()
    assert rooms.failed(bad).what == "the library refuses a block"
    rooms.succeeded(*(room for room in rooms.sending if room != bad))


def test_a_room_that_is_aborted_while_it_waits_is_not_moved(rooms: Rooms, library: Library) -> None:
    gone = FIRST + 3
    rooms.push_all(library)
    rooms.receiving[gone].abort("its client left")
    assert "its client left" in str(rooms.failed(gone))
    library.gate.set()
    assert rooms.receiving[gone].wait(20, quiesced=True) is Status.FAILED
    rooms.succeeded(*(room for room in rooms.sending if room != gone))
    (alone,) = blocks_of(library, FIRST)
    assert sum(blocks_of(library, 0)) == alone * (LAST - FIRST - 1)


def test_rooms_of_a_transfer_that_fails_wait_until_it_has_stopped(rooms: Rooms, library: Library) -> None:
    library.failed = Transfer()
    library.failed.fail("the cable was pulled", settled=False)
    rooms.push_all(library)
    library.gate.set()
    rooms.succeeded(FIRST)
    others = range(FIRST + 1, LAST + 1)
    for room in others:
        assert rooms.failed(room).cause == "the cable was pulled"
        assert not rooms.sending[room].quiesced
        assert not rooms.receiving[room].quiesced
    library.failed.settle()
    for room in others:
        assert rooms.sending[room].wait(20, quiesced=True) is Status.FAILED
        assert rooms.receiving[room].wait(20, quiesced=True) is Status.FAILED


def test_a_defect_of_the_backend_keeps_the_memory_of_all(rooms: Rooms, library: Library) -> None:
    library.raises = ZeroDivisionError("a defect of this backend")
    rooms.push_all(library)
    library.gate.set()
    rooms.succeeded(FIRST)
    for room in range(FIRST + 1, LAST + 1):
        reason = rooms.failed(room)
        assert (reason.code, reason.cause) == ("backend.defect", "a defect of this backend")
        assert not rooms.sending[room].quiesced
        rooms.sending[room].take_back("the test is over")
        rooms.receiving[room].take_back("the test is over")


@pytest.mark.parametrize("cut", [1, 8])
def test_pushes_of_one_room_keep_their_order(
    rooms: Rooms, library: Library, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """One of them is small, and may wait for others, and one is too large for that: the first or the second."""
    monkeypatch.setattr(TcpBackend, "capabilities", dataclasses.replace(TcpBackend.capabilities, max_blocks=4))
    rooms.open(FIRST)
    tokens, pages = 16 * 9, list(range(10, 19))
    receiving = rooms.decode.receive(7, rooms.prefill.address, tokens, {"kv": pages})
    sending = rooms.prefill.send(7, tokens)
    rooms.push(FIRST)
    assert library.held.wait(20)
    sending.push({"kv": pages[:cut]}, span=(0, 16 * cut))
    sending.push({"kv": pages[cut:]}, span=(16 * cut, tokens))
    until(lambda: sending.status is Status.TRANSFERRING)
    library.gate.set()
    assert receiving.wait(20) is sending.wait(20) is Status.SUCCEEDED
    rooms.expected[:, pages] = rooms.source.arrays[:, pages]
    rooms.succeeded(FIRST)


def test_an_owners_fence_and_joint_batches_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="cannot carry several rooms"):
        Capabilities(
            memory_kinds=frozenset({"dram"}),
            submit_mode=SubmitMode.ASYNC,
            source=Fence.MOVER,
            target=Fence.OWNER,
            joins_rooms=True,
        )
