"""Clauses on errors. A refused call must write nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from statelink.backend import Blocks, Fence, Outcome, Side
from statelink.errors import BackendError, TransferError

from .. import _inside
from .._bench import Pair, Row, Subject, blocks_of
from .._lab import Lab, Suite, needs
from .._saying import all_moved, given_reason, refused, same
from .._worker import Finding

__all__ = ["Refusing"]

SIZES = (4 << 10, 100_000)
GOOD: Row = (3, 10, 3, 20, 100)
TOP = 1 << 64

OUTSIDE: dict[str, Callable[[int, int], tuple[int, int, int]]] = {
    "one byte past the end": lambda start, size: (3, size - 99, 100),
    "one byte before the start": lambda start, size: (3, -1, 100),
    "across the border to another region": lambda start, size: (0, -50, 100),
    "in another region than it says": lambda start, size: (2, -200_000, 100),
    "far away": lambda start, size: (3, 1 << 40, 100),
    "where addresses end": lambda start, size: (3, TOP - 1 - start, 1),
    "longer than the address space": lambda start, size: (3, 0, TOP - 1),
    "in a region that there is not": lambda start, size: (4, 0, 100),
}
"""Bad blocks: region, offset and length, from the start and the size of the last region."""


def not_moved(pair: Pair, blocks: Blocks, room: int = 1, generation: int = 1, what: str = "it") -> str:
    """Check that a move is refused or fails. Returns the reason. ``what`` names the move."""
    try:
        outcomes: list[Outcome] = pair.move(blocks, room, generation)
    except BackendError as error:
        return str(error)
    failed = [outcome for outcome in outcomes if not outcome.ok]
    assert failed, f"{what} was reported done"
    given_reason(failed[0].reason, f"{what} failed")
    return failed[0].reason


class Refusing(Suite):
    """Every one of these is an error with a reason, nothing is written, and the next move works."""

    @pytest.mark.parametrize("case", OUTSIDE)
    @pytest.mark.parametrize("side", list(Side), ids=lambda side: side.value)
    def test_a_block_outside_registered_memory_is_refused(self, pair: Pair, side: Side, case: str) -> None:
        """A block that is not inside the region it names, at either side, is refused with all of its batch.

        Check both ends before the first byte moves: `statelink.backend.Ends.of` does it against two `RegionTable`s.
        """
        end = pair.source if side is Side.SOURCE else pair.target
        region, offset, nbytes = OUTSIDE[case](end.regions[3].address, end.regions[3].nbytes)
        tables = ([*pair.source.regions, pair.source.regions[0]], [*pair.target.regions, pair.target.regions[0]])
        if case.startswith("across"):
            offset = end.regions[0].nbytes - 50
        good = blocks_of(*tables, [GOOD, (3, 500, 3, 600, 100)])
        bad = blocks_of(*tables, [GOOD])
        addresses, regions = (bad.source, bad.source_region) if side is Side.SOURCE else (bad.target, bad.target_region)
        addresses[0] = (int(tables[side is Side.TARGET][region].address) + offset) % TOP
        regions[0], bad.nbytes[0] = region, nbytes
        pair.fill(1)
        pair.grant(good)
        before = pair.source.memory.copy()
        not_moved(pair, Blocks.concatenate([good[1:], bad]))
        pair.untouched()
        same(pair.source.memory, before, "the source")
        pair.works()

    def test_an_unknown_peer_is_refused(self, pair: Pair) -> None:
        """A move to a peer that was never connected is refused.

        Let `submit` raise a `TransferError` where the peer is not connected.
        """
        order = pair.order(pair.blocks([GOOD]))._replace(peer="nobody")
        pair.fill()
        with refused("a move to a peer that was never connected", TransferError):
            pair.source.worker(_inside.move, order, pair.subject.patience)
        pair.untouched()
        pair.works()

    def test_a_closed_backend_refuses(self, lab: Lab) -> None:
        """What is asked of a backend that was closed is refused; a disconnect and a poll are ignored.

        Let `submit` and `connect` raise a `TransferError` after `close`, and let `disconnect` and `poll` return.
        """
        pair = lab.pair(((100_000,),))
        pair.works_small()
        pair.source.call(_inside.close)
        pair.fill()
        with refused("a move of a backend that was closed", TransferError):
            pair.move(pair.blocks([(0, 0, 0, 0, 100)]))
        with refused("a connect of a backend that was closed", TransferError):
            pair.source.connect(pair.target)
        pair.source.disconnect(pair.target)
        pair.source.call(_inside.poll_nothing)
        pair.untouched()

    def test_a_backend_can_be_closed_twice(self, lab: Lab) -> None:
        """Closing twice is closing once, whether it was ever used or not.

        Let `close` return where there is nothing to close.
        """
        used = lab.pair()
        used.works()
        fresh = lab.end(0, ((4096,),))
        fresh.construct()
        for end in (used.source, used.target, fresh):
            end.call(_inside.close, 2)

    # Memory that was not granted. These clauses are for backends that declare an owner's fence.

    @pytest.mark.parametrize(
        "case", ["nothing", "another room", "another generation", "another peer", "what was revoked"]
    )
    def test_a_room_that_was_not_granted_is_refused(self, subject: Subject, pair: Pair, case: str) -> None:
        """A peer writes only for uses of rooms that were granted to it.

        Look grants up by peer, room and generation, on the side that owns the memory.
        """
        needs(subject.capabilities.target is Fence.OWNER, "no owner's fence is declared")
        blocks = pair.blocks([GOOD])
        pair.fill()
        grants = {"another room": (11, 1), "another generation": (12, 2)}
        if case in grants:
            pair.grant(blocks, *grants[case])
        if case == "another peer":
            order = np.argsort(blocks.target)
            pair.target.call(_inside.grant, "somebody else", 12, 1, blocks.target[order], blocks.nbytes[order])
        if case == "what was revoked":
            pair.grant(blocks, 12, 1)
            pair.take_back(12, 1)
            pair.take_back(12, 1)
        not_moved(pair, blocks, room=12)
        pair.untouched()
        pair.works()

    @pytest.mark.parametrize("offset", [-1, 1, 100, 50_000])
    def test_memory_that_was_not_granted_is_refused(self, subject: Subject, pair: Pair, offset: int) -> None:
        """A block that is not wholly inside what was granted is refused, and so is all of its batch.

        Check the whole batch against what is granted before the first byte lands.
        """
        needs(subject.capabilities.target is Fence.OWNER, "no owner's fence is declared")
        granted = pair.blocks([(3, 0, 3, 1000, 100), (3, 0, 3, 5000, 3000)])
        pair.fill()
        pair.grant(granted, 21)
        not_moved(pair, pair.blocks([(3, 0, 3, 5000, 1000), (3, 0, 3, 1000 + offset, 100)]), 21)
        pair.untouched()
        pair.carry(granted, 21)

    def test_memory_that_is_not_registered_cannot_be_granted(self, subject: Subject, pair: Pair) -> None:
        """A grant of ranges that are not inside registered memory is refused.

        Let `grant` raise a `TransferError` for ranges outside the region table.
        """
        needs(subject.capabilities.target is Fence.OWNER, "no owner's fence is declared")
        last = pair.target.regions[3]
        for start, nbytes in ((last.address - 1, 2), (last.address, last.nbytes + 1), (1 << 50, 1)):
            ranges = np.array([start], np.uint64), np.array([nbytes], np.uint64)
            with refused(f"a grant of {nbytes} bytes at {start:#x}, outside registered memory", TransferError):
                pair.target.call(_inside.grant, pair.source.link, 31, 1, *ranges)
        pair.works()

    def test_a_grant_may_span_adjacent_regions(self, subject: Subject, pair: Pair) -> None:
        """One range of a grant may begin in a region and end in the next, if the two are side by side.

        Look for a range in all registered memory together: `statelink.backend.Ranges` joins adjacent regions.
        """
        needs(subject.capabilities.target is Fence.OWNER, "no owner's fence is declared")
        first = pair.target.regions[0]
        blocks = pair.blocks([(3, 0, 0, first.nbytes - 50, 50), (3, 100, 1, 0, 70)])
        pair.fill()
        ranges = np.array([first.address + first.nbytes - 50], np.uint64), np.array([120], np.uint64)
        try:
            pair.target.call(_inside.grant, pair.source.link, 51, 1, *ranges)
        except BackendError as error:
            raise Finding(f"a grant over the border of two adjacent regions was refused: {error}") from error
        expected = pair.expected(blocks)
        all_moved(pair.move(blocks, 51))
        pair.take_back(51)
        pair.verify(expected, blocks)

    def test_grants_of_one_room_add_up(self, subject: Subject, pair: Pair) -> None:
        """Several grants for one use of a room hold together, until one revoke takes them all.

        Add the ranges of a `grant` to those that there are, and let one `revoke` forget them all.
        """
        needs(subject.capabilities.target is Fence.OWNER, "no owner's fence is declared")
        parts = [pair.blocks([(3, 0, 3, at, 100)]) for at in (0, 500, 1000)]
        pair.fill()
        for part in parts:
            pair.grant(part, 41)
        expected = pair.expected(Blocks.concatenate(parts))
        failed = [outcome.reason for outcome in pair.move(Blocks.concatenate(parts), 41) if not outcome.ok]
        assert not failed, f"what several calls had granted was refused: {failed[0]}"
        pair.verify(expected)
        pair.take_back(41)
        pair.fill()
        for part in parts:
            not_moved(pair, part, 41)
        pair.untouched()
