"""Clauses on peers that are stopped: what a backend declares of calls that wait holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelink.backend import Op, SubmitMode

from .. import _beside
from .._bench import MOVER, PEER, End, Pair
from .._lab import Lab, Suite, needs
from .._memory import MIB
from .._saying import all_moved, same
from .._worker import Finding
from ._fencing import stopped

if TYPE_CHECKING:
    from statelink.backend import Blocks

    from .._bench import Subject

__all__ = ["Stalling"]

SIZE = 48 * MIB
"""Bytes of what is moved to a stopped peer, which no socket buffers."""
STILL = 8.0
"""Seconds within which a call returns that does not wait. A loaded machine needs a small part of them."""


class Stalling(Suite):
    """A peer that is stopped holds no call, and nobody else, if that is what the backend declares."""

    def test_submit_does_not_wait_for_its_peer(self, subject: Subject, lab: Lab, op: Op) -> None:
        """If it declares `SubmitMode.ASYNC`, `submit` and `poll` return while the peer is stopped.

        This is also so if it declares `stalled_peers=None`. The batches are larger than the buffers of sockets.

        Return a transfer that runs, and let another thread wait for the peer; or declare `SubmitMode.BLOCKING`, and in
        `stalled_peers` how many calls may wait.
        """
        declared = subject.capabilities
        waits = declared.submit_mode is SubmitMode.BLOCKING and declared.stalled_peers is not None
        needs(not waits, "it declares that `submit` may wait for its peer")
        pair, blocks = self._pair(lab, op)
        mover = pair.mover(op).worker
        with stopped(pair.peer(op).worker):
            mover.start(_beside.submitted, pair.order(op, blocks))
            in_time = mover.returns(STILL)
        mover.result()
        said = "`SubmitMode.ASYNC`" if declared.submit_mode is SubmitMode.ASYNC else "`stalled_peers=None`"
        if not in_time:
            raise Finding(f"`submit` or `poll` did not return within {STILL:g} s of a stopped peer, despite {said}")

    def test_a_stopped_peer_holds_nobody_else(self, subject: Subject, lab: Lab, op: Op) -> None:
        """While a call waits for a stopped peer, another peer is served, if `stalled_peers` says so.

        Hold no lock, and no thread that other peers need, while you wait for one of them; or declare `stalled_peers=0`.
        """
        needs(subject.capabilities.most_stalled != 0, "it declares that a stopped peer may hold the others")
        pair, blocks = self._pair(lab, op)
        here = pair.mover(op)
        other = self._flow(op, here, lab.end(1, ((100_000,),), side=PEER[op]).open()).connect()
        other.works_small(op)
        at = 7 if op is Op.WRITE else SIZE - MIB  # where nothing of the other move lands
        small = other.blocks([(0, 5, 0, at, 4097)])
        other.grant(op, small, 2)
        with stopped(pair.peer(op).worker):
            arguments = pair.order(op, blocks), other.order(op, small, 2), subject.patience
            here.worker.start(_beside.others, *arguments)
            in_time = here.worker.returns(STILL + _beside.BRIEFLY)
        outcomes = here.worker.result()
        if not in_time:
            raise Finding(f"a move to a second peer did not end within {STILL:g} s, while the first peer was stopped")
        all_moved(outcomes)
        same(other.target.arrays[0][at : at + 4097], other.source.arrays[0][5 : 5 + 4097], "the second target")

    def _pair(self, lab: Lab, op: Op) -> tuple[Pair, Blocks]:
        """A pair that works, whose peer may be stopped, and granted blocks between its ends."""
        here = lab.end(0, ((SIZE,),), side=MOVER[op]).open()
        pair = self._flow(op, here, lab.elsewhere(lab.borrow(), "still", ((SIZE,),), side=PEER[op]).open()).connect()
        pair.works_small(op)
        blocks = pair.blocks([(0, at, 0, at, MIB) for at in range(0, SIZE - MIB, MIB)])
        pair.grant(op, blocks)
        return pair, blocks

    def _flow(self, op: Op, mover: End, peer: End) -> Pair:
        return Pair(mover, peer) if op is Op.WRITE else Pair(peer, mover)
