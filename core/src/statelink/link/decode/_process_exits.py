"""Process exit watch: notices that a writer's process has ended, and waits until nothing of it can land any more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from statelink.backend import Fence

from ._in_flight import Proof

if TYPE_CHECKING:
    from statelink.backend import Capabilities
    from statelink.link.runtime import Loop, Workers

    from ._prefill_rank import PrefillRank

__all__ = ["LANDING_ROUND_SECONDS", "ProcessExits"]

LANDING_ROUND_SECONDS = 0.05
"""Seconds from one round to the next.

After a writer's process has ended, decode waits for some rounds. Only then nothing of the writer counts as in flight.
`Capabilities.landing_seconds` says how long all rounds take together. During the rounds, bytes that a killed writer
gave to its kernel still arrive, and threads of a library in this process write them to memory. Measurements found that
this takes a few milliseconds. The size of socket buffers bounds it. This class counts rounds and not elapsed time,
because a process that is stopped also stops the library's threads, and they write nothing."""
POLL_BROKEN_SECONDS = 1.0
"""Seconds to the next round after ``poll`` raised."""


class ProcessExits:
    """Waits, for each prefill rank whose process has ended, until nothing of it can land. Control thread.

    Args:
        loop: The control thread's loop.
        workers: The data threads, which poll the backend.
        declared: What the backend declares.
        landed: Called with each such rank, and the proof, once the wait is over.
    """

    def __init__(
        self, loop: Loop, workers: Workers, declared: Capabilities, landed: Callable[[PrefillRank, Proof], None]
    ) -> None:
        self._loop = loop
        self._workers = workers
        self._landed = landed
        self._waiting: set[str] = set()
        # If a write can land at any time after its mover's end, no wait proves anything.
        self._proves = declared.target is not Fence.NONE
        self._rounds = math.ceil(declared.landing_seconds / LANDING_ROUND_SECONDS)

    def look(self, ranks: Iterable[PrefillRank]) -> None:
        """Look whether the processes of undrained ranks have ended. Called with every heartbeat."""
        for rank in ranks:
            if self._proves and rank.name not in self._waiting and rank.exited:
                self._waiting.add(rank.name)
                self._wait(rank, self._rounds)

    def _wait(self, rank: PrefillRank, rounds: int) -> None:
        if not rounds:
            self._waiting.discard(rank.name)
            self._landed(rank, Proof.EXITED)
            return

        # Runs on the control thread after a data thread has polled. So both threads have run in this round. If the
        # poll raised, the library may have written nothing to memory, and the round does not count.
        def polled(ok: bool) -> None:
            if ok:
                self._loop.after(LANDING_ROUND_SECONDS, lambda: self._wait(rank, rounds - 1))
            else:
                self._loop.after(POLL_BROKEN_SECONDS, lambda: self._wait(rank, rounds))

        # Some libraries write what arrives to memory only while they are called.
        self._workers.poll(("exit", rank.name), [], polled)
