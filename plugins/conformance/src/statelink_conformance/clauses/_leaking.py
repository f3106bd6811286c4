"""Nothing stays behind."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest

from statelink.backend import Side

from .. import _inside, _kept
from .._bench import NOISE, Pair
from .._lab import Lab, Suite
from .._memory import MIB
from .._saying import all_moved, same
from .._worker import Finding
from ._refusing import not_moved

if TYPE_CHECKING:
    from .._inside import Held
    from .._kept import Kept
    from .._workers import Worker

__all__ = ["Leaking"]

ALLOWED = 24 * MIB
"""Bytes by which a process may grow while it repeats something, because allocators and libraries keep some."""

A_FEW = 32
"""Transfers and batches that may be alive after all have ended, because a library may keep the last ones."""
LINGERS_SECONDS = 2.0
"""Seconds for which a backend may keep what belongs to a transfer after its end, because its library still uses it."""
PER_TRANSFER = 128
"""Bytes of Python's that a process may keep of each transfer, on average: rounded up, what caches and tables take."""


class Leaking(Suite):
    """Threads, descriptors, memory and files of shared memory, over many connections and many transfers.

    Attributes:
        connects: How often the clauses connect.
        reopens: How often they open.
        moves: How many batches they move over one connection.
    """

    connects: int = 40
    reopens: int = 3
    moves: int = 300

    def test_connecting_often_leaves_nothing_behind(self, lab: Lab) -> None:
        """A process that connects and disconnects many times has as much as before.

        That is: threads, descriptors, memory, and files in /dev/shm. Files in other folders are not looked for.

        Let `disconnect` end the threads, and close and unlink the files, that `connect` made.
        """
        here, there = lab.end(0).open(), lab.end(1).open()
        there.connect(here)
        order = there.link, there.descriptor, there.regions
        here.connect(there)
        here.call(_inside.reconnect, *order, 5)
        self._no_more([here.worker], self.connects, lambda: here.call(_inside.reconnect, *order, self.connects))

    def test_connecting_again_leaves_nothing_behind(self, lab: Lab) -> None:
        """Both processes have as many threads and descriptors as before, after peers that were connected were again.

        Between two connects, no peer is disconnected, and a few bytes move. Memory and files in /dev/shm are looked
        for, too.

        Let `connect` end what an earlier `connect` to the same peer made: its threads, descriptors and mappings.
        """
        pair = lab.pair(((100_000,),))
        self._again(pair, 3)
        workers = [pair.source.worker, pair.target.worker]
        self._no_more(workers, self.connects // 2, lambda: self._again(pair, self.connects // 2))

    def test_closing_leaves_nothing_to_a_peer_that_stays(self, lab: Lab) -> None:
        """A backend that is closed is reached no more by a peer that stays connected, and keeps nothing for it.

        A move to it, or from it, is refused or fails, and changes no byte. Its process has as many threads and
        descriptors as before it opened, though the peer has not disconnected.

        Let `close` end inbound connections, and the threads that serve them, as it ends your own.
        """
        here, apart = lab.end(0, ((100_000,),), side=Side.SOURCE).open(), lab.processes > 1
        worker = lab.borrow() if apart else lab.workers[0]
        for number in range(2):  # what a library keeps for as long as its process, it has after the first time
            before = self._held(worker)
            if apart:
                there = lab.elsewhere(worker, f"closed-{number}", ((100_000,),), side=Side.TARGET).open()
            else:
                there = lab.end(1, ((100_000,),), side=Side.TARGET).open()
            pair = Pair(here, there).connect()
            pair.works_small()
            blocks = pair.blocks([(0, 3, 0, 5, 50_000)])
            pair.fill(number)
            pair.grant(blocks, 2)
            there.call(_inside.close)
            after = self._after(worker, before, 1)
            not_moved(pair, blocks, 2, what="a move to a backend that was closed")
            pair.untouched("bytes were written after a backend was closed")
        if apart:
            self._as_before(before, after, "after a backend was closed whose peer stays connected")

    def test_opening_often_leaves_nothing_behind(self, lab: Lab) -> None:
        """A process that opens and closes backends many times has as much as before.

        That is: threads, descriptors, memory, and files in /dev/shm. Files in other folders are not looked for.

        Let `close` end the threads, and close and unlink the files, that the backend made.
        """
        end = lab.end(0, ((8 * MIB, 8 * MIB),))
        arguments = lab.subject.name, dict(lab.subject.options), end.regions
        end.worker(_inside.reopen, *arguments, 1)
        self._no_more([end.worker], self.reopens, lambda: end.worker(_inside.reopen, *arguments, self.reopens))

    def test_moving_often_leaves_no_memory_behind(self, lab: Lab) -> None:
        """Both processes have as much memory as before, after hundreds of batches of 1 MiB over one connection.

        That is their resident memory. Threads and descriptors are counted, too. Less than 24 MiB more is allowed.

        Free what you allocate for a batch, such as its bytes, handles and mappings, when its transfer has ended.
        """
        pair = lab.pair(((2 * MIB,),))
        self._repeat(pair, MIB, 1, self.moves // 4)
        workers = [pair.source.worker, pair.target.worker]
        self._no_more(workers, self.moves, lambda: self._repeat(pair, MIB, self.moves, self.moves))

    def test_moving_often_leaves_no_objects_behind(self, lab: Lab) -> None:
        """Nothing is kept in Python of transfers that have ended, each of its own room, over one connection.

        The side that submits keeps at most a few of their `Transfer`, `Batch` and `Blocks`. Each process keeps less
        than 128 bytes for each of them, of what Python and numpy allocate. A backend has two seconds, and some more
        transfers, to forget the others.

        Forget a transfer when it has ended, and a room when it is revoked. Lists and dicts by transfer, batch or room
        need an end.
        """
        pair = lab.pair(((2 * MIB,),))
        sides = {"the source": pair.source.worker, "the target": pair.target.worker}
        for worker in set(sides.values()):
            worker(_kept.trace)
        try:
            self._repeat(pair, 100, 1, self.moves // 2)
            before = {side: self._kept(worker) for side, worker in sides.items()}
            self._repeat(pair, 100, self.moves, self.moves)
            time.sleep(LINGERS_SECONDS)
            self._repeat(pair, 100, 2 * self.moves, 5)
            after = {side: self._kept(worker) for side, worker in sides.items()}
        finally:
            for worker in set(sides.values()):
                worker(_kept.trace_no_more)
        mover = "the source" if pair.source is pair.source else "the target"
        for name, count in after[mover].alive.items():
            more = count - before[mover].alive.get(name, 0)
            if more > A_FEW:
                raise Finding(f"{more} objects of type {name} more are alive after {self.moves} transfers have ended")
        for side in sides:
            grown = after[side].nbytes - before[side].nbytes
            if grown > PER_TRANSFER * self.moves:
                objects = after[side].objects - before[side].objects
                each = f"{grown / self.moves:.0f} bytes for each of {self.moves} transfers that have ended"
                raise Finding(f"{side} keeps {each}, and {objects} objects more in all")

    @pytest.mark.soak
    def test_connecting_a_thousand_times_leaves_nothing_behind(self, lab: Lab) -> None:
        """The same a thousand times, with moves in between.

        See the shorter one.
        """
        pair = lab.pair()
        self._reconnect(pair, 20)
        self._no_more([pair.source.worker, pair.target.worker], 1000, lambda: self._reconnect(pair, 1000))

    def _reconnect(self, pair: Pair, times: int) -> None:
        for _ in range(times):
            pair.source.disconnect(pair.target)
            pair.connect()
            pair.works()

    def _again(self, pair: Pair, times: int) -> None:
        """Connect both sides again and again without a disconnect, and move a little each time."""
        for _ in range(times):
            pair.connect()
            pair.works_small()

    def _repeat(self, pair: Pair, nbytes: int, first: int, times: int) -> None:
        """Move one block many times, each time for another room and with other bytes, and look at them."""
        blocks = pair.blocks([(0, 3, 0, 5, nbytes)])
        source, target = pair.source.arrays[0], pair.target.arrays[0]
        for number, room in enumerate(range(first, first + times)):
            sent = NOISE[:nbytes] + np.uint8(room % 256)  # each byte is another one than before
            source[3 : 3 + nbytes] = sent
            pair.grant(blocks, room)
            all_moved(pair.move(blocks, room))
            if pair.needs_grants():
                pair.take_back(room)
            same(target[5 : 5 + nbytes], sent, f"the target of batch {number + 1} in a row")

    def _kept(self, worker: Worker) -> Kept:
        kept: Kept = worker(_kept.kept)
        return kept

    def _held(self, worker: Worker) -> Held:
        held: Held = worker(_inside.held)
        return held

    def _no_more(self, workers: Sequence[Worker], times: int, action: Callable[[], object]) -> None:
        """Repeat something, and check that the resources are the same as before.

        Other processes have files of shared memory, too. So only files that appear with every repetition count.
        """
        before = [self._held(worker) for worker in workers]
        action()
        for worker, held in zip(workers, before, strict=True):
            after = self._after(worker, held, times)
            said = f"after {times} times"
            self._as_before(held, after, said)
            grown = after.resident - held.resident
            assert grown < ALLOWED, f"{grown / MIB:.0f} MiB more {said}"
        if len(after.shared - held.shared) < times:
            return
        held = self._held(workers[0])
        action()
        left = sorted(self._after(workers[0], held, times).shared - held.shared)
        assert len(left) < times, f"{len(left)} files more in {_inside.SHARED} {said}, such as {', '.join(left[:3])}"

    def _as_before(self, held: Held, after: Held, said: str) -> None:
        """Check that a process has no more threads and no more descriptors."""
        assert after.threads <= held.threads, f"{after.threads - held.threads} threads more {said}"
        more, files = len(after.files) - len(held.files), Counter(after.files) - Counter(held.files)
        named = ", ".join(f"{count} of {name}" for name, count in files.most_common(3))
        assert more <= 0, f"{more} descriptors more {said}: {named}"

    def _after(self, worker: Worker, before: Held, times: int) -> Held:
        """The resources after a pause, because threads end a moment after they were told to."""
        for _ in range(20):
            after = self._held(worker)
            left = after.shared - before.shared
            if after.threads <= before.threads and len(after.files) <= len(before.files) and len(left) < times:
                break
            worker(_inside.rest, 0.1)
        return after
