"""Clauses on the death of a peer: a reason in bounded time, and no harm to other peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from statelink.backend import Side
from statelink.errors import BackendError

from .. import _inside
from .._bench import End, Pair
from .._lab import Lab, Suite, needs
from .._saying import given_reason, refused
from ._fencing import BLOCKED_SECONDS, SIZE, flood, stopped

if TYPE_CHECKING:
    from statelink.backend import Outcome

    from .._inside import Move

__all__ = ["Dying"]

DEAD = "a move to a dead peer failed"
TIMES = 3
"""Moves to a peer that is dead: the first may find out, and those after it must not forget it."""


class Dying(Suite):
    """Peers that are killed without warning."""

    @pytest.mark.parametrize("moment", ["before", "after"])
    def test_a_move_to_a_dead_peer_fails(self, lab: Lab, moment: str) -> None:
        """A peer that died before a move, or after an earlier one: every move fails with a reason; others are served.

        Fail the transfer with the library's words, and never let it succeed before the peer has its bytes. If the
        library never gives up, look for the end of the connection.
        """
        worker = lab.borrow()
        here = lab.end(0, side=Side.SOURCE).open()
        there = lab.elsewhere(worker, "mortal", side=Side.TARGET).open()
        pair = Pair(here, there).connect()
        if moment == "after":
            pair.works()
        worker.kill()
        order = pair.order(pair.blocks([(0, 0, 0, 0, 1 << 20)]))
        self._fails(lab, here, order)
        self._healthy(lab, here)
        here.call(_inside.disconnect, "mortal")
        with refused("a move to a dead peer that was disconnected", BackendError):
            here.worker(_inside.move, order, lab.subject.patience)
        self._healthy(lab, here)

    def test_a_move_fails_when_its_peer_dies(self, lab: Lab) -> None:
        """A peer that dies during a move: it fails with a reason and is never reported done; others are served.

        Set an outcome with `ok=False`, a reason, and where its bytes have certainly stopped.
        """
        worker = lab.borrow()
        here = lab.end(0, ((SIZE,),), side=Side.SOURCE).open()
        pair = Pair(here, lab.elsewhere(worker, "mortal", ((SIZE,),), side=Side.TARGET).open()).connect()
        flood(pair)
        worker.kill()
        _, reason = here.worker.result()
        given_reason(reason, DEAD)
        self._fails(lab, here, pair.order(pair.blocks([(0, 0, 0, 0, 1 << 20)])))
        self._healthy(lab, here)

    def test_a_move_is_done_only_if_its_peer_has_taken_part(self, lab: Lab) -> None:
        """A peer that stands still when a move begins, and is then killed: what is reported done has moved.

        Take no end of a connection for an answer: only bytes that are at their place are a success.
        """
        needs(lab.subject.memory == "dram", "memory of a device ends with its process")
        worker = lab.borrow()
        here = lab.end(0, side=Side.SOURCE).open()
        pair = Pair(here, lab.elsewhere(worker, "mortal", side=Side.TARGET).open()).connect()
        pair.works()
        pair.fill(1)
        blocks = pair.blocks([(0, 1000 * n, 0, 2000 * n, 999) for n in range(8)])
        pair.grant(blocks)
        expected = pair.expected(blocks)
        with stopped(worker):
            here.worker.start(_inside.tried, pair.order(blocks), lab.subject.patience)
            here.worker.returns(BLOCKED_SECONDS)
            worker.kill()
        outcomes: list[Outcome] = here.worker.result()
        if outcomes and all(outcome.ok for outcome in outcomes):
            missing = (pair.target.memory != expected).sum()
            assert not missing, f"a move was reported done, and its peer was killed with {missing} bytes missing"
        self._healthy(lab, here)

    def test_memory_outlives_its_mover(self, lab: Lab) -> None:
        """The side that does not move survives the death of the one that does, and serves others.

        Let nothing of an inbound connection end the process, or hold what other peers need.
        """
        worker = lab.borrow()
        here = lab.end(0, ((SIZE,),), side=Side.TARGET).open()
        mortal = lab.elsewhere(worker, "mortal", ((SIZE,),), side=Side.SOURCE).open()
        pair = Pair(mortal, here).connect()
        flood(pair)
        worker.kill()
        here.call(_inside.disconnect, "mortal")
        other = lab.end(1, ((SIZE,),), side=Side.SOURCE).open()
        Pair(other, here).connect().works_small()

    def test_a_dead_peer_cannot_be_connected_or_fails_later(self, lab: Lab) -> None:
        """Connecting to a peer that has died is refused in time, or every move to it fails.

        Bound the time of a first contact, in `connect` or in `submit`.
        """
        worker = lab.borrow()
        here = lab.end(0, side=Side.SOURCE).open()
        there = lab.elsewhere(worker, "mortal", side=Side.TARGET).open()
        worker.kill()
        pair = Pair(here, there)
        order = pair.order(pair.blocks([(0, 0, 0, 0, 1 << 20)]))
        try:
            here.connect(there)
        except BackendError as error:
            given_reason(str(error), DEAD)
        else:
            self._fails(lab, here, order)
        self._healthy(lab, here)

    def _fails(self, lab: Lab, here: End, order: Move) -> None:
        """Check that no move to a dead peer is reported done, and that each has a reason."""
        for reason in here.worker(_inside.vain, order, TIMES, lab.subject.patience):
            given_reason(reason, DEAD)

    def _healthy(self, lab: Lab, here: End) -> None:
        """Check that the surviving side serves another peer."""
        other = lab.end(1, ((100_000,),), side=Side.TARGET).open()
        Pair(here, other).connect().works_small()
