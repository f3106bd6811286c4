"""The declared fence holds: for each operation and side, by whom it declares."""

from __future__ import annotations

import math

from statelink.backend import Op, Side
from statelink.link._departed import REST_STEP

from .. import _inside
from .._bench import Pair
from .._lab import Lab, Suite, needs
from .._memory import MIB, POISON

__all__ = ["Fencing", "flood"]

SIZE = 24 * MIB
OpSide = tuple[Op, Side]

SILENCE = 0.25
"""Seconds in which nothing may land that the fence has stopped."""


def flood(pair: Pair, op: Op, room: int = 1, generation: int = 1) -> None:
    """Let the mover fill the target again and again, and return in the middle of that."""
    blocks = pair.blocks([(0, at, 0, at, MIB) for at in range(0, SIZE, MIB)])
    pair.source.memory[:] = 1
    pair.target.memory[:] = POISON
    pair.grant(op, blocks, room, generation)
    pair.mover(op).worker.start(_inside.pump, pair.order(op, blocks, room, generation), pair.subject.patience)
    reached = pair.peer(op).worker if op is Op.WRITE else None
    watcher = reached or pair.source.worker
    for _ in range(int(pair.subject.patience / 0.002)):
        if pair.target.arrays[0][0] == 1:
            return
        watcher(_inside.rest, 0.002)
    raise AssertionError("nothing arrived")


class Fencing(Suite):
    """Who can prove that a transfer touches a side's memory no more."""

    def test_a_revoke_stops_what_is_under_way(self, lab: Lab, fenced_by_owner: OpSide) -> None:
        """An owner's fence: once a revoke is done nothing lands, while the peer goes on writing, and it is told why."""
        op, side = fenced_by_owner
        needs((op, side) == (Op.WRITE, Side.TARGET), "there is no call by which an owner stops this")
        needs(lab.processes > 1, "this backend moves bytes inside one process")
        pair = lab.pair(((SIZE,),))
        flood(pair, op)
        assert pair.revoke().ok
        pair.target.memory[:] = POISON
        pair.target.worker(_inside.rest, SILENCE)
        pair.untouched()
        _, reason = pair.mover(op).worker.result()
        assert reason
        pair.untouched()
        pair.works_small(op)

    def test_a_revoke_does_not_wait_for_the_peer(self, lab: Lab, fenced_by_owner: OpSide) -> None:
        """An owner's fence needs nobody else: it holds against a peer that stands still in the middle of a transfer."""
        op, side = fenced_by_owner
        needs((op, side) == (Op.WRITE, Side.TARGET), "there is no call by which an owner stops this")
        worker = lab.borrow()
        pair = Pair(lab.elsewhere(worker, "still", ((SIZE,),)).open(), lab.end(1, ((SIZE,),)).open()).connect()
        flood(pair, op)
        worker.stop()
        try:
            assert pair.revoke().ok
            pair.target.memory[:] = POISON
            pair.target.worker(_inside.rest, SILENCE)
            pair.untouched()
        finally:
            worker.go_on()
        assert worker.result()[1]
        pair.untouched()

    def test_memory_is_quiet_once_its_mover_has_ended(self, lab: Lab, fenced_by_mover: OpSide) -> None:
        """A mover's fence: nothing lands any more once its process has ended and the declared time has passed."""
        op, side = fenced_by_mover
        needs(side is Side.TARGET and op is Op.WRITE, "this memory is read only, or ends with its mover")
        worker = lab.borrow()
        pair = Pair(lab.elsewhere(worker, "mortal", ((SIZE,),)).open(), lab.end(1, ((SIZE,),)).open()).connect()
        flood(pair, op)
        worker.kill()
        rounds = math.ceil(pair.subject.capabilities.landing_seconds / REST_STEP)
        for _ in range(rounds):  # what its kernel still held lands: the core gives memory back no earlier
            pair.target.call(_inside.poll_nothing)
            pair.target.worker(_inside.rest, REST_STEP)
        pair.target.memory[:] = POISON
        pair.target.worker(_inside.rest, SILENCE)
        pair.untouched()

    def test_what_is_settled_has_stopped(self, lab: Lab, op: Op) -> None:
        """A transfer that is called settled at a side, here after a disconnect, touches that side no more."""
        pair = lab.pair(((SIZE,),))
        blocks = pair.blocks([(0, 0, 0, 0, SIZE)])
        pair.source.memory[:] = 1
        pair.grant(op, blocks)
        outcomes = pair.mover(op).worker(_inside.leave, pair.order(op, blocks), pair.subject.patience)
        assert all(outcome.ok or outcome.reason for outcome in outcomes)
        settled = set(Side).difference(*(outcome.unsettled for outcome in outcomes))
        needs(bool(settled), "it does not call such a transfer settled on any side")
        if Side.TARGET in settled:
            pair.target.memory[:] = POISON
        pair.source.memory[:] = 2
        pair.mover(op).worker(_inside.rest, SILENCE)
        if Side.TARGET in settled:
            pair.untouched()
        if Side.SOURCE in settled:
            assert not (pair.target.memory == 2).any(), "the source was read after that was called settled"
        pair.connect()
        pair.works_small(op)
