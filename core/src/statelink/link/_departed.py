"""Peers whose process has ended, until what the kernel still held of theirs has landed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from statelink.backend import Fence, Op, Side

if TYPE_CHECKING:
    from ._instance import Source
    from ._node import Node

__all__ = ["Departed"]

REST_STEPS, REST_STEP = 20, 0.05
"""How often, and how many seconds apart, this process must have run after a writer's end before its writes count as
landed. Bytes that a killed writer had handed to its kernel still arrive, and a library's threads put them into memory:
a few milliseconds, where that was measured, and bounded by what socket buffers hold. It is counted in rounds of this
process's own threads, because a library that is stopped or starved together with them lands nothing meanwhile."""


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
        # Where not even the mover's end stops a write, there is nothing to wait for.
        self._proves = node.backend.capabilities.fences.get((Op.WRITE, Side.TARGET)) is not Fence.NONE

    def look(self, sources: Iterable[Source]) -> None:
        """Look for the end of ranks that may still write."""
        for source in sources:
            if self._proves and source.name not in self._resting and source.ended:
                self._resting.add(source.name)
                self._rest(source, REST_STEPS)

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
