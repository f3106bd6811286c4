"""Clauses on fences: at each side, the declared fence holds."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from statelink.backend import Blocks, Fence, Side
from statelink.link import LANDING_ROUND_SECONDS

from .. import _beside, _inside, _stream
from .._bench import End, Pair
from .._lab import Lab, Suite, needs
from .._memory import MIB, POISON
from .._saying import all_moved
from .._worker import Finding

if TYPE_CHECKING:
    from statelink.backend import Capabilities

    from .._stream import Left
    from .._workers import Worker

__all__ = ["STILL_SECONDS", "Fencing", "closes", "flood", "stopped"]

SIZE = 24 * MIB

SILENCE_SECONDS = 0.25
"""Seconds for which memory is watched after bytes must have stopped."""
WATCHED_SECONDS = 3.5
"""Seconds for which a target is watched after its mover has ended, because a library may put bytes in place late."""
STILL_SECONDS = 8.0
"""Seconds within which a call returns that does not wait. A loaded machine needs a small part of them."""
CLOSES = (
    "Let `close` return whatever the other side does: close connections without its help, and bound every wait for it."
)
LANDED = (
    "Count the bytes of each batch that is in place under a grant, call once they are as many as were asked for, and "
    "forget it all when the grant is revoked."
)
BLOCKED_SECONDS = 0.3
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


def closes(end: End, whose: str) -> None:
    """Check that a backend can be closed, for example while a peer is stopped. ``whose`` says which side it is."""
    within = max(STILL_SECONDS, end.subject.patience)
    end.worker.start(_beside.close, end.link)
    if not end.worker.returns(within):
        raise Finding(f"`close` of {whose} did not return within {within:g} s of a stopped process", CLOSES)
    end.worker.result()


def stream(pair: Pair) -> None:
    """Let the mover fill the target part by part on a thread, repeatedly, and return in the middle."""
    moves = [
        pair.blocks([(0, at, 0, at, min(MIB, end - at)) for at in range(start, end, MIB)])
        for start, end in parts(pair.subject.capabilities)
    ]
    pair.source.memory[:] = 1
    pair.target.memory[:] = POISON
    pair.grant(Blocks.concatenate(moves))
    pair.source.worker(_stream.start, [pair.order(blocks) for blocks in moves])
    until = time.monotonic() + pair.subject.patience
    while pair.target.arrays[0][0] != 1:
        left: Left = pair.source.worker(_stream.look, 0.002)
        assert not left.ended, f"a move failed: {left}"
        assert time.monotonic() < until, "nothing arrived"


def parts(limits: Capabilities) -> list[tuple[int, int]]:
    """Where parts of the memory begin and end: a batch each, and more of them than may be under way at once."""
    count = max(limits.max_transfers + 1, math.ceil(SIZE / limits.max_bytes), math.ceil(SIZE / MIB / limits.max_blocks))
    size = SIZE // count
    return [(number * size, (number + 1) * size) for number in range(count)]


def flood(pair: Pair, room: int = 1, generation: int = 1) -> None:
    """Let the mover fill the target repeatedly, and return in the middle."""
    blocks = pair.blocks([(0, at, 0, at, MIB) for at in range(0, SIZE, MIB)])
    pair.source.memory[:] = 1
    pair.target.memory[:] = POISON
    pair.grant(blocks, room, generation)
    pair.source.worker.start(_inside.pump, pair.order(blocks, room, generation), pair.subject.patience)
    for _ in range(int(pair.subject.patience / 0.002)):
        if pair.target.arrays[0][0] == 1:
            return
        pair.target.worker(_inside.rest, 0.002)
    raise AssertionError("nothing arrived")


class Fencing(Suite):
    """Who can prove that a transfer has stopped touching a side's memory.

    Attributes:
        still: Seconds for which a peer is stopped: more than a time-out of the library, if it has one.
    """

    still: float = 1.0

    def test_a_revoke_stops_what_is_under_way(self, lab: Lab) -> None:
        """An owner's fence: nothing lands after a revoke is done, although the peer writes on; the peer learns why.

        Let the transfer of `revoke` succeed only when the last byte has landed, and check each range against grants.
        """
        needs(lab.subject.capabilities.target is Fence.OWNER, "no owner's fence is declared")
        needs(lab.processes > 1, "this backend moves bytes inside one process")
        pair = lab.pair(((SIZE,),))
        flood(pair)
        pair.take_back()
        pair.target.memory[:] = POISON
        pair.target.worker(_inside.rest, SILENCE_SECONDS)
        pair.untouched()
        _, reason = pair.source.worker.result()
        assert reason, "the mover was not told why it was stopped"
        pair.untouched()
        pair.works_small()

    def test_the_target_is_told_when_its_bytes_have_landed(self, lab: Lab) -> None:
        """`when_landed` calls with the last byte of all batches, not before; at once if they are there; then no more.

        Count the bytes of each batch that is in place under a grant, and forget them when the grant is revoked.
        """
        pair = lab.pair(((SIZE,),))
        needs(pair.target.call(_inside.is_landing), "it has no `when_landed`, which is optional")
        pair.fill()
        halves = [pair.blocks([(0, at, 0, at, SIZE // 2)]) for at in (0, SIZE // 2)]
        whole = Blocks.concatenate(halves)
        expected = pair.expected(whole)
        ask = _inside.expect, pair.source.link, 1, 1, SIZE
        for early in (True, False):
            pair.target.memory[:] = POISON
            pair.grant(whole)
            if early:
                pair.target.call(*ask)
            all_moved(pair.move(halves[0]))
            if early and pair.target.call(_inside.told, SILENCE_SECONDS):
                raise Finding("`when_landed` called after half of the bytes", LANDED)
            all_moved(pair.move(halves[1]))
            if not early:
                pair.target.call(*ask)
            calls = pair.target.call(_inside.told, pair.subject.patience)
            pair.verify(expected, whole)
            if calls != 1:
                raise Finding(f"`when_landed` called {calls} times once all bytes had landed", LANDED)
            pair.take_back()
        pair.grant(whole)
        pair.target.call(*ask)
        pair.take_back()
        pair.grant(whole)
        all_moved(pair.move(whole))
        if pair.target.call(_inside.told, SILENCE_SECONDS):
            raise Finding("`when_landed` called for a grant that was revoked", LANDED)
        pair.take_back()

    def test_a_revoke_does_not_wait_for_the_peer(self, lab: Lab) -> None:
        """An owner's fence needs no other process: it holds against a peer that is stopped in the middle of a transfer.

        Close the connection, or discard what comes, without an answer of the peer. Or declare `Fence.MOVER`.
        """
        needs(lab.subject.capabilities.target is Fence.OWNER, "no owner's fence is declared")
        worker = lab.borrow()
        pair = Pair(lab.elsewhere(worker, "still", ((SIZE,),)).open(), lab.end(1, ((SIZE,),)).open()).connect()
        flood(pair)
        with stopped(worker):
            pair.take_back()
            pair.target.memory[:] = POISON
            pair.target.worker(_inside.rest, SILENCE_SECONDS)
            pair.untouched()
        assert worker.result()[1], "the mover was not told why it was stopped"
        pair.untouched()

    @pytest.mark.parametrize("target", ["running", "stopped"])
    def test_nothing_lands_once_its_mover_has_ended(self, lab: Lab, target: str) -> None:
        """A mover's fence: nothing lands after its process has ended and the declared time has passed.

        If the target was stopped in the middle of the write, that time begins when it continues.

        If the library puts bytes in place for longer, declare longer `landing_seconds`, or `Fence.NONE` for the target.
        """
        needs(lab.subject.capabilities.target is Fence.MOVER, "no mover's fence is declared")
        worker, there = lab.borrow(), lab.borrow()
        pair = Pair(
            lab.elsewhere(worker, "mortal", ((SIZE,),)).open(),
            lab.elsewhere(there, "owner", ((SIZE,),), side=Side.TARGET).open(),
        ).connect()
        flood(pair)
        with stopped(there, target == "stopped"):
            time.sleep(BLOCKED_SECONDS if target == "stopped" else 0.0)
            worker.kill()
        landing = pair.subject.capabilities.landing_seconds
        for _ in range(math.ceil(landing / LANDING_ROUND_SECONDS)):  # the core gives memory back only after this time
            pair.target.call(_inside.poll_nothing)
            pair.target.worker(_inside.rest, LANDING_ROUND_SECONDS)
        pair.target.memory[:] = POISON
        until = time.monotonic() + max(WATCHED_SECONDS - landing, SILENCE_SECONDS)
        while time.monotonic() < until:
            pair.target.worker(_inside.rest, SILENCE_SECONDS)
            pair.untouched(f"bytes landed more than {landing:g} s after the process that moved them had ended")

    @pytest.mark.parametrize("trouble", ["a disconnect", "the peer's disconnect", "a stopped peer", "a close"])
    def test_what_is_settled_has_stopped(self, lab: Lab, trouble: str) -> None:
        """A transfer that is settled at a side does not touch that side.

        This also holds after a disconnect in the middle of the transfer, and after a peer that was stopped in the
        middle runs again, while this side was disconnected or closed. It holds for each transfer that says so, when it
        fails or later, by `settle`.

        Say `settled=False`, or name the one side on which its bytes have certainly stopped. Call `settle` only when
        you have learnt that they have.
        """
        still = trouble in ("a stopped peer", "a close")
        if still:
            needs(lab.subject.memory == "dram", "memory of a device is looked at through the stopped process")
            here, there = lab.end(0, ((SIZE,),), side=Side.SOURCE).open(), lab.borrow()
            other = lab.elsewhere(there, "still", ((SIZE,),), side=Side.TARGET).open()
            pair = Pair(here, other).connect()
        else:
            pair = lab.pair(((SIZE,),))
        mover, peer = pair.source, pair.target
        stream(pair)
        with stopped(peer.worker, still):
            if trouble == "the peer's disconnect":
                peer.disconnect(mover)
                mover.worker(_stream.look, SILENCE_SECONDS)
            elif trouble == "a close":
                mover.worker(_stream.look, BLOCKED_SECONDS)
                closes(mover, "the mover")
            elif trouble == "a disconnect" or not mover.worker(_stream.look, self.still).ended:
                mover.disconnect(peer)
            mover.worker(_stream.look, SILENCE_SECONDS, True)
            mover.worker(_stream.settle, SILENCE_SECONDS)
            left: Left = mover.worker(_stream.look, 0.0, True)
            claims = list(zip(parts(pair.subject.capabilities), left.settled, strict=True))
            for (start, end), sides in claims:
                if Side.TARGET in sides:
                    pair.target.arrays[0][start:end] = POISON
                if Side.SOURCE in sides:
                    pair.source.arrays[0][start:end] = 2
        mover.worker(_inside.rest, SILENCE_SECONDS)
        for (start, end), sides in claims:
            found, after = pair.target.arrays[0][start:end], f"after {trouble}, and after"
            if Side.TARGET in sides:
                landed = (found != POISON).any()
                assert not landed, f"bytes landed {after} their transfer was called settled at the target"
            if Side.SOURCE in sides:
                read = (found == 2).any()
                assert not read, f"the source was read {after} its transfer was called settled there"
        mover.worker(_stream.look, pair.subject.patience, True, True)
        if not still:
            mover.worker(_stream.settle, WATCHED_SECONDS)  # what failed may still land
            pair.connect()
            pair.works_small()
        none_failed = left.ended and not left.failed
        some = none_failed or any(outcome.unsettled != frozenset(Side) for outcome in left.failed)
        needs(some, "it does not call such a transfer settled on any side")
