"""Peers whose process has ended, until what the kernel still held of theirs has landed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from statelink.backend import Fence, Op, Side

if TYPE_CHECKING:
    from ._instance import Source
    from ._node import Node

__all__ = ["REST_STEP", "Departed"]

REST_STEP = 0.05
"""Seconds from one round to the next. After a writer's end, this process must have run for some rounds before the
writer's writes count as landed: the backend declares for how many seconds. Bytes that a killed writer had handed to its
kernel still arrive, and a library's threads put them into memory: a few milliseconds, where that was measured, and
bounded by what socket buffers hold. Rounds of this process's own threads are counted, because a library that is stopped
together with them lands nothing meanwhile."""


class Departed:
    """Tells when nothing of a process that has ended can land any more. Belongs to the control thread.

    Args:
        node: The link's control thread.
        rested: Called with each such rank, once.
    """

    def __init__(self, node: Node, rested: Callable[[Source], None]) -> None:
        self._node = node
        self._rested = rested
        self._resting: set[str] = set()
        declared = node.backend.capabilities
        # Where not even the mover's end stops a write, there is nothing to wait for.
        self._proves = declared.fences.get((Op.WRITE, Side.TARGET)) is not Fence.NONE
        self._rounds = math.ceil(declared.landing_seconds / REST_STEP)

    def look(self, sources: Iterable[Source]) -> None:
        """Look for the end of ranks that may still write."""
        for source in sources:
            if self._proves and source.name not in self._resting and source.ended:
                self._resting.add(source.name)
                self._rest(source, self._rounds)

    def _rest(self, source: Source, left: int) -> None:
        if not left:
            self._resting.discard(source.name)
            self._rested(source)
            return
        node = self._node

        def job() -> None:
            with contextlib.suppress(Exception):  # it says nothing about the bytes of others
                node.backend.poll(())  # some libraries land what arrives only while they are called
            node.post(lambda: node.after(REST_STEP, lambda: self._rest(source, left - 1)))

        node.fences.submit(("departed", source.name), job)
