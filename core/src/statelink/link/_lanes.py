"""The threads that may block: bounded, and in order per key."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable

__all__ = ["Lane"]

log = logging.getLogger("statelink.link")

Job = Callable[[], None]


class Lane:
    """A pool of at most ``width`` threads that runs jobs in order per key, and one key at a time.

    Threads start when they are needed. A job that raises is a defect; it is logged, and ends no thread.

    Args:
        name: For thread names.
        width: Most threads.
    """

    def __init__(self, name: str, width: int) -> None:
        self._name = name
        self._width = width
        self._lock = threading.Condition()
        self._queues: dict[Hashable, deque[Job]] = {}
        self._ready: deque[Hashable] = deque()
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, key: Hashable, job: Job) -> None:
        """Run ``job`` after every earlier job of the same key. After `close`, jobs are dropped."""
        with self._lock:
            if self._closed:
                return
            queue = self._queues.get(key)
            if queue is not None:
                queue.append(job)  # the key is in line or running; its jobs follow one another
                return
            self._queues[key] = deque([job])
            self._ready.append(key)
            if self._idle < len(self._ready) and len(self._threads) < self._width:
                thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            else:
                self._lock.notify()

    @property
    def waiting(self) -> int:
        """Jobs that have not started. Any thread."""
        with self._lock:
            return sum(map(len, self._queues.values()))

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
                while not self._ready and not self._closed:
                    self._lock.wait()
                self._idle -= 1
                if not self._ready:
                    return
                key = self._ready.popleft()
                job = self._queues[key].popleft()
            try:
                job()
            except Exception:
                log.exception("a job on lane %s failed", self._name)
            with self._lock:
                if self._queues[key]:
                    self._ready.append(key)
                    self._lock.notify()
                else:
                    del self._queues[key]

    def close(self, timeout: float) -> bool:
        """Run what is queued, then end the threads; whether all ended within ``timeout`` seconds."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
