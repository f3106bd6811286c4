"""Clauses on what waits for what: a peer that is stopped, a small batch among large ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from statelink.backend import Side, SubmitMode

from .. import _beside
from .._bench import Pair
from .._lab import Lab, Suite, needs
from .._memory import MIB
from .._saying import all_moved, same
from .._worker import Finding
from ._fencing import STILL_SECONDS, closes, stopped

if TYPE_CHECKING:
    from statelink.backend import Blocks

    from .._bench import Subject

__all__ = ["Stalling"]

SIZE = 48 * MIB
"""Bytes of what is moved to a stopped peer, which no socket buffers."""
OVERTAKING = 4
"""So many times the transfers that are under way at once may overtake a small one: threads that move batches beside
each other do not keep their order."""


class Stalling(Suite):
    """A peer that is stopped holds no call, and nobody else, if that is what the backend declares. Nobody starves."""

    def test_submit_does_not_wait_for_its_peer(self, subject: Subject, lab: Lab) -> None:
        """If it declares `SubmitMode.ASYNC`, `submit` and `poll` return while the peer is stopped.

        This is also so if it declares `stalled_peers=None`. The batches are larger than the buffers of sockets.

        Return a transfer that runs, and let another thread wait for the peer; or declare `SubmitMode.BLOCKING`, and in
        `stalled_peers` how many calls may wait.
        """
        declared = subject.capabilities
        waits = declared.submit_mode is SubmitMode.BLOCKING and declared.stalled_peers is not None
        needs(not waits, "it declares that `submit` may wait for its peer")
        pair, blocks = self._pair(lab)
        mover = pair.source.worker
        with stopped(pair.target.worker):
            mover.start(_beside.submitted, pair.order(blocks))
            in_time = mover.returns(STILL_SECONDS)
        mover.result()
        said = "`SubmitMode.ASYNC`" if declared.submit_mode is SubmitMode.ASYNC else "`stalled_peers=None`"
        if not in_time:
            raise Finding(
                f"`submit` or `poll` did not return within {STILL_SECONDS:g} s of a stopped peer, despite {said}"
            )

    def test_a_stopped_peer_holds_nobody_else(self, subject: Subject, lab: Lab) -> None:
        """While a call waits for a stopped peer, another peer is served, if `stalled_peers` says so.

        Hold no lock, and no thread that other peers need, while you wait for one of them; or declare `stalled_peers=0`.
        """
        needs(subject.capabilities.most_stalled != 0, "it declares that a stopped peer may hold the others")
        pair, blocks = self._pair(lab)
        here = pair.source
        other = Pair(here, lab.end(1, ((100_000,),), side=Side.TARGET).open()).connect()
        other.works_small()
        at = 7
        small = other.blocks([(0, 5, 0, at, 4097)])
        other.grant(small, 2)
        with stopped(pair.target.worker):
            arguments = pair.order(blocks), other.order(small, 2), subject.patience
            here.worker.start(_beside.others, *arguments)
            in_time = here.worker.returns(STILL_SECONDS + _beside.BRIEFLY_SECONDS)
        outcomes = here.worker.result()
        if not in_time:
            raise Finding(
                f"a move to a second peer did not end within {STILL_SECONDS:g} s, while the first peer was stopped"
            )
        all_moved(outcomes)
        same(other.target.arrays[0][at : at + 4097], other.source.arrays[0][5 : 5 + 4097], "the second target")

    def test_large_batches_do_not_starve_a_small_one(self, subject: Subject, lab: Lab) -> None:
        """A small batch ends although large ones to the same peer follow each other without a gap.

        Move the batches of a peer in about the order in which they come, or beside each other. The core gives out small
        requests between the batches of large ones.
        """
        limits = subject.capabilities
        needs(
            limits.max_transfers > 1,
            "it takes one transfer to a peer at a time (`max_transfers`), so a small one waits for the one before it",
        )
        pair = Pair(lab.end(0, ((SIZE,),)).open(), lab.end(1, ((SIZE,),), side=Side.TARGET).open()).connect()
        pair.works_small()
        pair.fill(3)
        large = pair.blocks([(0, at, 0, at, MIB) for at in range(0, SIZE - MIB, MIB)])
        small = pair.blocks([(0, SIZE - 5000, 0, SIZE - 5000, 5000)])
        for blocks, room in ((large, 1), (small, 2)):
            pair.grant(blocks, room)
        most = OVERTAKING * _beside.MOST_TOGETHER
        orders = pair.order(large), pair.order(small, 2)
        overtook = pair.source.worker(_beside.overtaken, *orders, most, subject.patience)
        if overtook >= most:
            raise Finding(f"{overtook} large batches that came after a small one to the same peer had ended before it")
        same(pair.target.arrays[0][-5000:], pair.source.arrays[0][-5000:], "the target")

    @pytest.mark.parametrize("closed", ["mover", "peer"])
    def test_close_does_not_wait_for_a_stopped_peer(self, subject: Subject, lab: Lab, closed: str) -> None:
        """`close` returns while the other side is stopped in the middle of a transfer, on either side.

        Close connections and stop threads without the other side's help, and bound every wait for it.
        """
        declared = subject.capabilities
        held = not declared.thread_safe and declared.submit_mode is SubmitMode.BLOCKING and closed == "mover"
        needs(not held, "its calls are serialised, and `submit` may wait for its peer")
        pair, blocks = self._pair(lab, Side.TARGET if closed == "mover" else Side.SOURCE)
        mover, peer = pair.source, pair.target
        here, there = (mover, peer) if closed == "mover" else (peer, mover)
        if closed == "peer":
            there.worker(_beside.begun, pair.order(blocks))
        with stopped(there.worker):
            if closed == "mover":
                here.worker(_beside.begun, pair.order(blocks))
            closes(here, f"the {closed}")

    def _pair(self, lab: Lab, still: Side = Side.TARGET) -> tuple[Pair, Blocks]:
        """A pair that works, of which the one end that ``still`` names may be stopped, and granted blocks."""
        ends = [
            lab.elsewhere(lab.borrow(), "still", ((SIZE,),), side=side).open()
            if side is still
            else lab.end(0, ((SIZE,),), side=side).open()
            for side in (Side.SOURCE, Side.TARGET)
        ]
        pair = Pair(*ends).connect()
        pair.works_small()
        blocks = pair.blocks([(0, at, 0, at, MIB) for at in range(0, SIZE - MIB, MIB)])
        pair.grant(blocks)
        all_moved(pair.move(blocks))  # a backend may connect anew for large batches, which a stopped peer refuses
        return pair, blocks
