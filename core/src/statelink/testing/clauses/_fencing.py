"""Clauses on fences: for each operation and side, the declared fence holds."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from statelink.backend import Op, Side
from statelink.link import LANDING_ROUND

from .. import _inside, _stream
from .._bench import MOVER, PEER, Pair
from .._lab import Lab, Suite, needs
from .._memory import MIB, POISON
from .._saying import given_reason

if TYPE_CHECKING:
    from .._process import Worker
    from .._stream import Left

__all__ = ["Fencing", "flood"]

SIZE = 24 * MIB
OpSide = tuple[Op, Side]

SILENCE = 0.25
"""Seconds for which memory is watched after bytes must have stopped."""
LATE = 3.5
"""Seconds for which a target is watched after its mover has ended, because a library may put bytes in place late."""
BLOCKED = 0.3
"""Seconds in which a mover fills all buffers on the way to a stopped target."""


@contextlib.contextmanager
def stopped(worker: Worker, really: bool = True) -> Iterator[None]:
    """Stop a process for a while."""
    if really:
        worker.stop()
    try:
        yield
    finally:
        if really:
            worker.go_on()


def stream(pair: Pair, op: Op) -> None:
    """Let the mover fill the target repeatedly on a thread, and return in the middle."""
    blocks = pair.blocks([(0, at, 0, at, MIB) for at in range(0, SIZE, MIB)])
    pair.source.memory[:] = 1
    pair.target.memory[:] = POISON
    pair.grant(op, blocks)
    pair.mover(op).worker(_stream.start, pair.order(op, blocks))
    until = time.monotonic() + pair.subject.patience
    while pair.target.arrays[0][0] != 1:
        left: Left = pair.mover(op).worker(_stream.look, 0.002)
        assert not left.ended, f"a move failed: {left}"
        assert time.monotonic() < until, "nothing arrived"


def flood(pair: Pair, op: Op, room: int = 1, generation: int = 1) -> None:
    """Let the mover fill the target repeatedly, and return in the middle."""
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
    """Who can prove that a transfer has stopped touching a side's memory.

    Attributes:
        still: Seconds for which a peer is stopped: more than a time-out of the library, if it has one.
    """

    still: float = 1.0

    def test_a_revoke_stops_what_is_under_way(self, lab: Lab, fenced_by_owner: OpSide) -> None:
        """An owner's fence: nothing lands after a revoke is done, although the peer writes on; the peer learns why.

        Let the transfer of `revoke` succeed only when the last byte has landed, and check each range against grants.
        """
        op, side = fenced_by_owner
        needs((op, side) == (Op.WRITE, Side.TARGET), "there is no call by which an owner stops this")
        needs(lab.processes > 1, "this backend moves bytes inside one process")
        pair = lab.pair(((SIZE,),))
        flood(pair, op)
        pair.take_back()
        pair.target.memory[:] = POISON
        pair.target.worker(_inside.rest, SILENCE)
        pair.untouched()
        _, reason = pair.mover(op).worker.result()
        assert reason, "the mover was not told why it was stopped"
        pair.untouched()
        pair.works_small(op)

    def test_a_revoke_does_not_wait_for_the_peer(self, lab: Lab, fenced_by_owner: OpSide) -> None:
        """An owner's fence needs no other process: it holds against a peer that is stopped in the middle of a transfer.

        Close the connection, or discard what comes, without an answer of the peer. Or declare `Fence.MOVER`.
        """
        op, side = fenced_by_owner
        needs((op, side) == (Op.WRITE, Side.TARGET), "there is no call by which an owner stops this")
        worker = lab.borrow()
        pair = Pair(lab.elsewhere(worker, "still", ((SIZE,),)).open(), lab.end(1, ((SIZE,),)).open()).connect()
        flood(pair, op)
        with stopped(worker):
            pair.take_back()
            pair.target.memory[:] = POISON
            pair.target.worker(_inside.rest, SILENCE)
            pair.untouched()
        assert worker.result()[1], "the mover was not told why it was stopped"
        pair.untouched()

    @pytest.mark.parametrize("target", ["running", "stopped"])
    def test_nothing_lands_once_its_mover_has_ended(self, lab: Lab, fenced_by_mover: OpSide, target: str) -> None:
        """A mover's fence: nothing lands after its process has ended and the declared time has passed.

        If the target was stopped in the middle of the write, that time begins when it continues.

        If the library puts bytes in place for longer, declare longer `landing_seconds`, or `Fence.NONE` for the target.
        """
        op, side = fenced_by_mover
        needs(side is Side.TARGET and op is Op.WRITE, "this memory is read only, or ends with its mover")
        worker, there = lab.borrow(), lab.borrow()
        pair = Pair(
            lab.elsewhere(worker, "mortal", ((SIZE,),)).open(),
            lab.elsewhere(there, "owner", ((SIZE,),), side=Side.TARGET).open(),
        ).connect()
        flood(pair, op)
        with stopped(there, target == "stopped"):
            time.sleep(BLOCKED if target == "stopped" else 0.0)
            worker.kill()
        landing = pair.subject.capabilities.landing_seconds
        for _ in range(math.ceil(landing / LANDING_ROUND)):  # the core gives memory back only after this time
            pair.target.call(_inside.poll_nothing)
            pair.target.worker(_inside.rest, LANDING_ROUND)
        pair.target.memory[:] = POISON
        until = time.monotonic() + max(LATE - landing, SILENCE)
        while time.monotonic() < until:
            pair.target.worker(_inside.rest, SILENCE)
            pair.untouched(f"bytes landed more than {landing:g} s after the process that moved them had ended")

    @pytest.mark.parametrize("trouble", ["a disconnect", "the peer's disconnect", "a stopped peer"])
    def test_what_is_settled_has_stopped(self, lab: Lab, op: Op, trouble: str) -> None:
        """A transfer that is settled at a side does not touch that side.

        This also holds after a disconnect in the middle of the transfer, and after a peer that was stopped in the
        middle runs again.

        Say `settled=False`, or name the one side on which its bytes have certainly stopped.
        """
        if trouble == "a stopped peer":
            needs(lab.subject.memory == "dram", "memory of a device is looked at through the stopped process")
            here, there = lab.end(0, ((SIZE,),), side=MOVER[op]).open(), lab.borrow()
            other = lab.elsewhere(there, "still", ((SIZE,),), side=PEER[op]).open()
            pair = (Pair(here, other) if op is Op.WRITE else Pair(other, here)).connect()
        else:
            pair = lab.pair(((SIZE,),))
        mover, peer = pair.mover(op), pair.peer(op)
        stream(pair, op)
        with stopped(peer.worker, trouble == "a stopped peer"):
            if trouble == "the peer's disconnect":
                peer.disconnect(mover)
                mover.worker(_stream.look, SILENCE)
            elif trouble == "a disconnect" or not mover.worker(_stream.look, self.still).ended:
                mover.disconnect(peer)
            left: Left = mover.worker(_stream.look, SILENCE, True)
            for outcome in left.outcomes:
                if not outcome.ok:
                    given_reason(outcome.reason, "a transfer failed")
            settled = set(Side).difference(*(outcome.unsettled for outcome in left.outcomes)) if left.ended else set()
            if Side.TARGET in settled:
                pair.target.memory[:] = POISON
            pair.source.memory[:] = 2
        mover.worker(_inside.rest, SILENCE)
        if Side.TARGET in settled:
            pair.untouched(f"bytes landed after {trouble}, and after their transfer was called settled at the target")
        if Side.SOURCE in settled:
            read = (pair.target.memory == 2).any()
            assert not read, f"the source was read after {trouble}, and after its transfer was called settled there"
        mover.worker(_stream.look, pair.subject.patience, True, True)
        if trouble != "a stopped peer":
            mover.worker(_stream.settle, LATE)  # what failed may still land, and is to be over before the next move
            pair.connect()
            pair.works_small(op)
        needs(bool(settled), "it does not call such a transfer settled on any side")
