"""A process's threads, run by the world one small step at a time: the control thread's loop, and the lanes."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from greenlet import getcurrent, greenlet

from statelink.link._lanes import Lane
from statelink.link._loop import Loop

if TYPE_CHECKING:
    from .process import Process

__all__ = ["Defect", "SimLane", "SimLoop", "give_way"]

Job = Callable[[], None]


class Defect(AssertionError):
    """Something that must never happen has happened."""


def give_way(seconds: float = 0.0) -> None:
    """Let others run: what a sleep is to a data thread."""
    parent = getcurrent().parent
    if parent is not None:
        parent.switch()


class SimLoop(Loop):
    """The control thread's loop without a thread, on the world's clock."""

    def __init__(self, process: Process) -> None:
        # Without the sockets and the thread of a real one.
        self._posted: deque[Job] = deque()
        self._timers: list[tuple[float, int, Job]] = []
        self._process = process
        self._count = 0
        self.receive: Callable[[float | None], None] = lambda timeout: None

    def now(self) -> float:
        return self._process.now()

    def fileno(self) -> int:
        return -1

    def start(self, receive: Callable[[float | None], None], end: Callable[[], None]) -> None:
        self.receive = receive

    @property
    def alive(self) -> bool:
        return True

    def post(self, job: Job) -> None:
        self._posted.append(job)

    def after(self, seconds: float, job: Job) -> None:
        self._count += 1
        heapq.heappush(self._timers, (self.now() + seconds, self._count, job))

    def guard(self, job: Callable[..., None], *args: Any) -> None:
        try:
            job(*args)
        except Exception as error:
            raise Defect(f"the control thread of {self._process.name} would have logged: {error!r}") from error

    # What the world asks.

    def can_run(self) -> bool:
        return bool(self._posted)

    def run_posted(self) -> None:
        self.guard(self._posted.popleft())

    def next_timer(self) -> float | None:
        """World time of the next timer."""
        return self._timers[0][0] - self._process.skew if self._timers else None

    def timer_due(self) -> bool:
        return bool(self._timers) and self._timers[0][0] <= self.now()

    def run_timer(self) -> None:
        self.guard(heapq.heappop(self._timers)[2])


class SimLane(Lane):
    """A lane whose jobs are greenlets: each runs until it sleeps, and goes on when the world lets it."""

    def __init__(self, process: Process, name: str, width: int) -> None:
        self._process = process
        self._name = name
        self._width = width
        self._queues: dict[Hashable, deque[Job]] = {}
        self._running: dict[Hashable, greenlet] = {}
        process.lanes.append(self)

    def submit(self, key: Hashable, job: Job) -> None:
        self._queues.setdefault(key, deque()).append(job)

    def close(self, timeout: float) -> bool:
        return True

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    # What the world asks.

    def choices(self) -> list[Hashable]:
        """Keys of which a job may start or go on."""
        found = list(self._running)
        if len(self._running) < self._width:
            found += [key for key in self._queues if key not in self._running]
        return found

    def step(self, key: Hashable) -> None:
        """Start or go on with the job of a key."""
        job = self._running.get(key)
        if job is None:
            waiting = self._queues[key]
            job = self._running[key] = greenlet(self._guarded(waiting.popleft()))
            if not waiting:
                del self._queues[key]
        job.switch()
        if job.dead:
            del self._running[key]

    def _guarded(self, job: Job) -> Job:
        def run() -> None:
            try:
                job()
            except Exception as error:
                raise Defect(f"lane {self._name} of {self._process.name} would have logged: {error!r}") from error

        return run

    def kill(self) -> None:
        """The process has ended in the middle of whatever it did."""
        for job in self._running.values():
            job.throw()
        self._running.clear()
        self._queues.clear()
