"""Writers whose process has ended, until what the kernel still held of theirs has landed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from statelink.backend import Fence, Op, Side

if TYPE_CHECKING:
    from statelink.link._context import Context

    from ._prefill_rank import PrefillRank

__all__ = ["LANDING_ROUND", "ProcessExits"]

LANDING_ROUND = 0.05
"""Seconds from one round to the next. After a writer's end, this process must have run for some rounds before the
writer's writes count as landed: the backend declares for how many seconds. Bytes that a killed writer had handed to its
kernel still arrive, and a library's threads put them into memory: a few milliseconds, where that was measured, and
bounded by what socket buffers hold. Rounds of this process's own threads are counted, because a library that is stopped
together with them lands nothing meanwhile."""


class ProcessExits:
    """Tells when nothing of a process that has ended can land any more. Belongs to the control thread.

    Args:
        context: The link's parts.
        landed: Called with each such rank, once.
    """

    def __init__(self, context: Context, landed: Callable[[PrefillRank], None]) -> None:
        self._context = context
        self._landed = landed
        self._waiting: set[str] = set()
        declared = context.backend.capabilities
        # Where not even the mover's end stops a write, there is nothing to wait for.
        self._proves = declared.fences.get((Op.WRITE, Side.TARGET)) is not Fence.NONE
        self._rounds = math.ceil(declared.landing_seconds / LANDING_ROUND)

    def look(self, ranks: Iterable[PrefillRank]) -> None:
        """Look whether the processes of ranks have ended that may still write."""
        for rank in ranks:
            if self._proves and rank.name not in self._waiting and rank.exited:
                self._waiting.add(rank.name)
                self._wait(rank, self._rounds)

    def _wait(self, rank: PrefillRank, rounds: int) -> None:
        if not rounds:
            self._waiting.discard(rank.name)
            self._landed(rank)
            return
        context = self._context

        def polled(_: bool) -> None:
            context.after(LANDING_ROUND, lambda: self._wait(rank, rounds - 1))

        # Some libraries land what arrives only while they are called.
        context.workers.poll(("exit", rank.name), [], polled)
