"""Which job of a key is next, over all lanes of a link."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._lanes import Lane

__all__ = ["Job", "Order"]

Job = Callable[[], object]
"""What a lane runs. If it returns a generator, the lane runs that: each ``yield`` is a number of seconds for which the
job waits for something, and gives its thread to others if they need one."""


class Order:
    """Keeps the jobs of one key in the order in which they were submitted, whatever lane each of them is in.

    Lanes of one link share an order. Every method is called with `lock` held.

    Attributes:
        lock: Guards this, and the lanes that share it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._lines: dict[Hashable, tuple[Lane, deque[tuple[Lane, Job]]]] = {}

    def enter(self, lane: Lane, key: Hashable, job: Job) -> Lane | None:
        """Put a job in line. ``None`` if it may start at once; otherwise the lane of the job that is under way."""
        line = self._lines.get(key)
        if line is None:
            self._lines[key] = lane, deque()
            return None
        line[1].append((lane, job))
        return line[0]

    def leave(self, key: Hashable) -> tuple[Lane, Job] | None:
        """The job of a key that is under way has ended; the next one and its lane, which starts it."""
        _, waiting = self._lines[key]
        if not waiting:
            del self._lines[key]
            return None
        lane, job = waiting.popleft()
        self._lines[key] = lane, waiting
        return lane, job

    def waiting(self, lane: Lane) -> int:
        """Jobs for a lane that wait for others of their key."""
        lines = [waiting for _, waiting in self._lines.values() if waiting]
        return sum(each is lane for waiting in lines for each, _ in waiting)
