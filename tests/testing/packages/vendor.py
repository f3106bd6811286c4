"""Stands for a library that plugins import. Its queue copies bytes on a thread of its own, and cannot cancel."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Sequence

__version__ = "1.0"

TURN = threading.Lock()
"""Held while a job copies. A test that holds it keeps all jobs waiting."""

Rows = Sequence[tuple[int, int, int]]


class Job:
    """A posted batch. Its state is ``queued``, ``done`` or ``failed``."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.state = "queued"
        self.error = ""


class Queue:
    """Copies one job after the other."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="vendor", daemon=True)
        self._thread.start()

    def post(self, rows: Rows) -> Job:
        """Queue a batch: rows of target address, source address and length. Returns at once."""
        if self._jobs.qsize() >= self._depth:
            raise OverflowError(f"{self._depth} jobs wait already")
        job = Job(rows)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """Wait for what is queued, and end. May be called twice."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            with TURN:
                for target, source, nbytes in job.rows:
                    ctypes.memmove(target, source, nbytes)
            job.state = "done"
