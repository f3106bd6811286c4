"""Clauses on moves that succeed: of every size, number and address."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from .. import _inside
from .._bench import LAYOUT, Pair, Subject, scattered
from .._lab import Lab, Suite, needs
from .._memory import MIB
from .._saying import all_moved, same
from .._worker import Finding

if TYPE_CHECKING:
    from statelink.backend import Outcome

__all__ = ["Moving"]

PLACE = "Nothing was early: write the right bytes to the right place, as `source`, `target` and `nbytes` say."

SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""Times this, a small number has something in each of its eight bytes."""

SHAPES = {
    "1 byte": (1, 1, 0),
    "8 MiB at once": (1, 8 * MIB, 0),
    "one block with odd ends": (1, 4097, 2),
    "64 odd blocks": (64, 65537, 0),
    "64 blocks of a page": (64, 4096, 0),
    "1000 small blocks": (1000, 333, 1),
    "20000 blocks": (20_000, 129, 0),
}


class Moving(Suite):
    """Bytes arrive, and nothing else changes."""

    @pytest.mark.parametrize("shape", SHAPES)
    def test_blocks_arrive_whatever_their_size(self, pair: Pair, shape: str) -> None:
        """Blocks at unaligned addresses in any order arrive byte by byte, and no other byte changes.

        Move each block from `source` to `target`, `nbytes` of it, before its transfer succeeds. Nothing is aligned,
        sorted or merged for you.
        """
        pair.fill(len(shape))
        pair.carry(scattered(pair, *SHAPES[shape]))

    @pytest.mark.parametrize("size", [512, 4096, 65536])
    def test_whole_pages_arrive_and_nothing_beyond(self, pair: Pair, size: int) -> None:
        """Aligned blocks of whole pages arrive, and no byte before or behind any of them changes.

        Move exactly `nbytes` of each block. Do not round up to pages, or to the next batch of a buffer.
        """
        first = -pair.source.regions[0].address % 4096, -pair.target.regions[0].address % 4096
        rows = [(0, first[0] + n * size, 0, first[1] + (2 * n + 1) * size, size) for n in range(32)]
        pair.fill(size)
        pair.carry(pair.blocks(rows))

    def test_a_hundred_thousand_blocks_arrive(self, pair: Pair) -> None:
        """A hundred thousand blocks arrive.

        Declare `max_blocks` as what the library takes at once; the core cuts.
        """
        pair.fill(9)
        pair.carry(scattered(pair, 100_000, 61, 0))

    def test_a_quarter_of_a_gibibyte_arrives(self, lab: Lab) -> None:
        """One block of 256 MiB arrives, cut as `max_bytes` says.

        Declare `max_bytes` as what the library takes at once; the core cuts blocks down to a MiB, and no further.
        """
        size = 256 * MIB
        pair = lab.pair(((size,),))
        for at in range(0, size, 8 * MIB):  # no byte of the target is what it has to become
            numbers = np.arange(at // 8, at // 8 + MIB, dtype=np.uint64) * SPREAD
            pair.source.arrays[0][at : at + 8 * MIB] = numbers.view(np.uint8)
            pair.target.arrays[0][at : at + 8 * MIB] = (~numbers).view(np.uint8)
        blocks = pair.blocks([(0, 0, 0, 0, size)])
        pair.grant(blocks)
        all_moved(pair.move(blocks))
        same(pair.target.arrays[0], pair.source.arrays[0], "the target")

    def test_every_alignment_arrives(self, pair: Pair) -> None:
        """Source and target need not be aligned, nor aligned alike.

        Do not round addresses or lengths.
        """
        rows = [(3, 128 * n + a, 3, 128 * n + 3 * b, 64) for n, (a, b) in enumerate(np.ndindex(16, 16))]
        pair.fill(3)
        pair.carry(pair.blocks(rows))

    def test_a_batch_at_its_limit_is_taken_whole(self, pair: Pair) -> None:
        """As many blocks as it declares go into one batch.

        Declare a `max_blocks` that the library takes.
        """
        declared = pair.subject.capabilities
        count = min(declared.max_blocks, max(1, declared.max_bytes // 64), 50_000)
        blocks = scattered(pair, count, 64, 0)
        pair.fill(4)
        pair.grant(blocks)
        expected = pair.expected(blocks)
        order = pair.order(blocks)
        outcome: Outcome = pair.source.worker(_inside.submit_whole, order, pair.subject.patience)
        all_moved([outcome])
        pair.verify(expected, blocks)

    def test_rooms_follow_each_other(self, pair: Pair) -> None:
        """Rooms and generations of any number share one connection, and none disturbs another.

        Keep nothing of a room beyond its transfers, and treat both numbers as 64 bits wide.
        """
        pair.fill(5)
        top = (1 << 64) - 1
        for number, (room, generation) in enumerate(((1, 1), (top, 1), (1, top), (7, 7), (1, 2))):
            pair.carry(pair.blocks([(3, 10, 3, 1 + 1000 * number, 999)]), room, generation)

    def test_the_same_bytes_move_to_several_places(self, pair: Pair) -> None:
        """Sources may overlap.

        Do not expect that sources are disjoint; targets are.
        """
        pair.fill(6)
        pair.carry(pair.blocks([(1, n % 5, 0, 70_000 * n, 66_001) for n in range(50)]))

    def test_zeros_arrive(self, pair: Pair) -> None:
        """Blocks of zeros overwrite what their targets hold, as any other bytes do.

        Write every block, whatever its bytes are: the target's memory is not empty before.
        """
        pair.fill(7)
        pair.source.memory[:] = 0
        pair.carry(pair.blocks([(0, 5, 0, 3, MIB), (3, 1, 3, 2, 97), (1, 0, 1, 4096, 8192)]))

    @pytest.mark.parametrize("size", [1, 4096, 300_000])
    def test_bytes_are_visible_before_a_move_is_done(self, subject: Subject, pair: Pair, size: int) -> None:
        """When a transfer succeeds, a reader sees all of its bytes, and its source may be overwritten.

        Let a transfer succeed when the other side has its bytes, not when they are sent or queued.
        """
        count = min(8, subject.capabilities.max_blocks, max(1, subject.capabilities.max_bytes // size))
        rows = [(0, 11 + n * size, 0, 13 + n * (size + 5), size) for n in range(count)]
        blocks = pair.blocks(rows)
        pair.fill()
        pair.grant(blocks)
        start = pair.source.starts[0] + 11
        source = (pair.source.worker.arena.path, start, start + count * size)
        ends = blocks.target + blocks.nbytes - np.uint64(1 + pair.target.worker.address)
        target = (pair.target.worker.arena.path, ends)
        order, rounds = pair.order(blocks), 60 if size < 100_000 else 20
        wrong, came = pair.source.worker(_inside.early, order, rounds, source, target, subject.patience)
        if not came:
            found = f"the last byte of a block is wrong, also {_inside.MOMENTS_SECONDS:g} s after its move was done"
            raise Finding(found, PLACE)
        assert not wrong, f"{wrong} of {rounds} moves were reported done before their bytes were there"

    def test_a_transfer_ends_without_a_poll(self, subject: Subject, pair: Pair) -> None:
        """If it declares `ends_unpolled`, the outcome of a transfer is set although nothing polls it.

        Set outcomes from a thread of yours or of the library, or leave `ends_unpolled` False.
        """
        needs(subject.capabilities.ends_unpolled, "its transfers end when they are polled")
        for number, size in enumerate((1, 65537, MIB)):
            pair.fill(number)
            blocks = pair.blocks([(0, 0, 0, 0, size)])
            expected = pair.expected(blocks)
            pair.grant(blocks)
            wrong = pair.source.worker(_inside.unpolled, pair.order(blocks), subject.patience)
            assert not wrong, f"a batch of {size} bytes was submitted, and {wrong}"
            pair.verify(expected)

    def test_a_batch_of_several_rooms(self, subject: Subject, pair: Pair) -> None:
        """If it declares `joins_rooms`, a batch that names no room is moved as any other.

        Do not look at the room of a batch, or leave `joins_rooms` False.
        """
        needs(subject.capabilities.joins_rooms, "each of its batches has one room")
        for number, room in enumerate((0, 7, 0)):
            pair.fill(number)
            blocks = scattered(pair, 16, 4097, 0)
            expected = pair.expected(blocks)
            all_moved(pair.move(blocks, room, room))
            pair.verify(expected, blocks)

    def test_a_target_is_not_touched_after_its_move_is_done(self, pair: Pair) -> None:
        """After a transfer has ended, its target keeps what its owner writes there.

        Let a transfer succeed when nothing of it is in flight, repetitions included.
        """
        blocks = scattered(pair, 64, 65537, 0)
        for number in range(5):
            pair.fill(number)
            pair.grant(blocks)
            all_moved(pair.move(blocks))
            pair.target.memory[:] = 0
            pair.source.worker(_inside.rest, 0.01)
            assert not pair.target.memory.any(), "bytes landed after the move was reported done"

    @pytest.mark.soak
    def test_many_moves_in_a_row(self, lab: Lab) -> None:
        """A thousand batches of every size, one after the other.

        See the shorter ones.
        """
        pair, rng = lab.pair(LAYOUT), np.random.default_rng(0)
        for number in range(1000):
            count = int(2 ** rng.uniform(0, 14))
            pair.fill(number)
            pair.carry(scattered(pair, count, int(rng.integers(1, 8 * MIB // count)), 0, seed=number), number + 1)
