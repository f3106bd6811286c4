"""Clauses on the death of a peer: a reason in bounded time, and no harm to other peers."""

from __future__ import annotations

import pytest

from statelink.backend import Op
from statelink.errors import BackendError

from .. import _inside
from .._bench import MOVER, PEER, End, Pair
from .._lab import Lab, Suite
from .._saying import given_reason, refused
from ._fencing import SIZE, flood

__all__ = ["Dying"]

DEAD = "a move to a dead peer failed"


class Dying(Suite):
    """Peers that are killed without warning."""

    @pytest.mark.parametrize("moment", ["before", "after"])
    def test_a_move_to_a_dead_peer_fails(self, lab: Lab, op: Op, moment: str) -> None:
        """A peer that died before a move, or after an earlier one: the move fails with a reason; others are served.

        Fail the transfer with the library's words, and never let it succeed before the peer has its bytes. If the
        library never gives up, look for the end of the connection.
        """
        worker = lab.borrow()
        here = lab.end(0, side=MOVER[op]).open()
        there = lab.elsewhere(worker, "mortal", side=PEER[op]).open()
        pair = self._flow(op, here, there).connect()
        if moment == "after":
            pair.works(op)
        worker.kill()
        order = pair.order(op, pair.blocks([(0, 0, 0, 0, 1 << 20)]))
        _, reason = here.worker(_inside.pump, order, lab.subject.patience)
        given_reason(reason, DEAD)
        self._healthy(lab, here, op)
        here.call(_inside.disconnect, "mortal")
        with refused("a move to a dead peer that was disconnected", BackendError):
            here.worker(_inside.move, order, lab.subject.patience)
        self._healthy(lab, here, op)

    def test_a_move_fails_when_its_peer_dies(self, lab: Lab, op: Op) -> None:
        """A peer that dies during a move: it fails with a reason and is never reported done; others are served.

        Set an outcome with `ok=False`, a reason, and where its bytes have certainly stopped.
        """
        worker = lab.borrow()
        here = lab.end(0, ((SIZE,),), side=MOVER[op]).open()
        pair = self._flow(op, here, lab.elsewhere(worker, "mortal", ((SIZE,),), side=PEER[op]).open()).connect()
        flood(pair, op)
        worker.kill()
        _, reason = here.worker.result()
        given_reason(reason, DEAD)
        self._healthy(lab, here, op)

    def test_memory_outlives_its_mover(self, lab: Lab, op: Op) -> None:
        """The side that does not move survives the death of the one that does, and serves others.

        Let nothing of an inbound connection end the process, or hold what other peers need.
        """
        worker = lab.borrow()
        here = lab.end(0, ((SIZE,),), side=PEER[op]).open()
        mortal = lab.elsewhere(worker, "mortal", ((SIZE,),), side=MOVER[op]).open()
        pair = self._flow(op, mortal, here).connect()
        flood(pair, op)
        worker.kill()
        here.call(_inside.disconnect, "mortal")
        other = lab.end(1, ((SIZE,),), side=MOVER[op]).open()
        self._flow(op, other, here).connect().works_small(op)

    def test_a_dead_peer_cannot_be_connected_or_fails_later(self, lab: Lab, op: Op) -> None:
        """Connecting to a peer that has died is refused in time, or the first move to it fails.

        Bound the time of a first contact, in `connect` or in `submit`.
        """
        worker = lab.borrow()
        here = lab.end(0, side=MOVER[op]).open()
        there = lab.elsewhere(worker, "mortal", side=PEER[op]).open()
        worker.kill()
        pair = self._flow(op, here, there)
        order = pair.order(op, pair.blocks([(0, 0, 0, 0, 1 << 20)]))
        try:
            here.connect(there)
            _, reason = here.worker(_inside.pump, order, lab.subject.patience)
        except BackendError as error:
            reason = str(error)
        given_reason(reason, DEAD)
        self._healthy(lab, here, op)

    def _flow(self, op: Op, mover: End, peer: End) -> Pair:
        return Pair(mover, peer) if op is Op.WRITE else Pair(peer, mover)

    def _healthy(self, lab: Lab, here: End, op: Op) -> None:
        """Check that the surviving side serves another peer."""
        other = lab.end(1, ((100_000,),), side=PEER[op]).open()
        self._flow(op, here, other).connect().works_small(op)
