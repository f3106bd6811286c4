"""Nothing stays behind."""

from __future__ import annotations

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
"""Bytes by which a process may grow while it does what it has done before: allocators and libraries keep some."""


class Leaking(Suite):
    """Threads, descriptors and memory of one process, over many connections."""

    connects: int = 40
    reopens: int = 3

    def test_connecting_often_leaves_nothing_behind(self, lab: Lab) -> None:
        """A process that connects and disconnects many times has as many threads and descriptors as before."""
        here, there = lab.end(0).open(), lab.end(1).open()
        there.connect(here)
        order = there.link, there.descriptor, there.regions
        here.connect(there)
        here.call(_inside.reconnect, *order, 5)
        before = self._held(here.worker)
        here.call(_inside.reconnect, *order, self.connects)
        self._no_more(here.worker, before, self.connects)

    def test_opening_often_leaves_nothing_behind(self, lab: Lab) -> None:
        """A process that opens and closes backends many times has as many threads and descriptors as before."""
        end = lab.end(0, ((8 * MIB, 8 * MIB),))
        arguments = lab.subject.name, dict(lab.subject.options), end.regions
        end.worker(_inside.reopen, *arguments, 1)
        before = self._held(end.worker)
        end.worker(_inside.reopen, *arguments, self.reopens)
        self._no_more(end.worker, before, self.reopens)

    @pytest.mark.soak
    def test_connecting_a_thousand_times_leaves_nothing_behind(self, lab: Lab) -> None:
        """The same a thousand times, with moves in between."""
        pair = lab.pair()
        self._reconnect(pair, 20)
        before = [self._held(end.worker) for end in (pair.source, pair.target)]
        self._reconnect(pair, 1000)
        for end, held in zip((pair.source, pair.target), before, strict=True):
            self._no_more(end.worker, held, 1000)

    def _reconnect(self, pair: Pair, times: int) -> None:
        for _ in range(times):
            pair.source.disconnect(pair.target)
            pair.connect()
            pair.works()

    def _held(self, worker: Worker) -> Held:
        held: Held = worker(_inside.held)
        return held

    def _no_more(self, worker: Worker, before: Held, times: int) -> None:
        """Threads end a moment after they were told to: look until they have, or time is up."""
        for _ in range(20):
            after = self._held(worker)
            if after.threads <= before.threads and after.files <= before.files:
                break
            worker(_inside.rest, 0.1)
        grown = (after.resident - before.resident) / MIB
        said = f"after {times} times"
        assert after.threads <= before.threads, f"{after.threads - before.threads} threads more {said}"
        assert after.files <= before.files, f"{after.files - before.files} descriptors more {said}"
        assert after.resident - before.resident < ALLOWED, f"{grown:.0f} MiB more {said}"
