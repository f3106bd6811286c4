"""Nothing stays behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest

from .. import _inside
from .._lab import Lab, Suite
from .._memory import MIB

if TYPE_CHECKING:
    from .._bench import Pair
    from .._inside import Held
    from .._process import Worker

__all__ = ["Leaking"]

ALLOWED = 24 * MIB
"""Bytes by which a process may grow while it repeats something, because allocators and libraries keep some."""


class Leaking(Suite):
    """Threads, descriptors, memory and files of shared memory, over many connections."""

    connects: int = 40
    reopens: int = 3

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

    def test_opening_often_leaves_nothing_behind(self, lab: Lab) -> None:
        """A process that opens and closes backends many times has as much as before.

        That is: threads, descriptors, memory, and files in /dev/shm. Files in other folders are not looked for.

        Let `close` end the threads, and close and unlink the files, that the backend made.
        """
        end = lab.end(0, ((8 * MIB, 8 * MIB),))
        arguments = lab.subject.name, dict(lab.subject.options), end.regions
        end.worker(_inside.reopen, *arguments, 1)
        self._no_more([end.worker], self.reopens, lambda: end.worker(_inside.reopen, *arguments, self.reopens))

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
            assert after.threads <= held.threads, f"{after.threads - held.threads} threads more {said}"
            more, files = len(after.files) - len(held.files), Counter(after.files) - Counter(held.files)
            named = ", ".join(f"{count} of {name}" for name, count in files.most_common(3))
            assert more <= 0, f"{more} descriptors more {said}: {named}"
            grown = after.resident - held.resident
            assert grown < ALLOWED, f"{grown / MIB:.0f} MiB more {said}"
        if len(after.shared - held.shared) < times:
            return
        held = self._held(workers[0])
        action()
        left = sorted(self._after(workers[0], held, times).shared - held.shared)
        assert len(left) < times, f"{len(left)} files more in {_inside.SHARED} {said}, such as {', '.join(left[:3])}"

    def _after(self, worker: Worker, before: Held, times: int) -> Held:
        """The resources after a pause, because threads end a moment after they were told to."""
        for _ in range(20):
            after = self._held(worker)
            left = after.shared - before.shared
            if after.threads <= before.threads and len(after.files) <= len(before.files) and len(left) < times:
                break
            worker(_inside.rest, 0.1)
        return after
