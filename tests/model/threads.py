"""A process's threads, run by the world one small step at a time: the control thread's loop, and the executors."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from greenlet import getcurrent, greenlet

from statelink.link.runtime import KeyedExecutor, Loop

if TYPE_CHECKING:
    from statelink.link.runtime import Job, KeyOrder

    from .process import Process

__all__ = ["Defect", "SimExecutor", "SimLoop", "give_way"]


class Defect(AssertionError):
    """Something that must never happen has happened."""


def give_way(says: object = None) -> None:
    """Let others run: what a sleep is to a data thread; ``says`` may be until when it is stuck, in world time."""
    parent = getcurrent().parent
    if parent is not None:
        parent.switch(says)


class SimLoop(Loop):
    """The control thread's loop without a thread, on the world's clock."""

    def __init__(self, process: Process) -> None:
        # Without the sockets and the thread of a real one.
        self._posted: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._process = process
        self._count = 0
        self.asleep = True
        self.receive: Callable[[float | None], None] = lambda timeout: None

    def now(self) -> float:
        return self._process.now()

    def fileno(self) -> int:
        return -1

    def start(self, receive: Callable[[float | None], None], end: Callable[[], None]) -> None:
        def handle(timeout: float | None) -> None:
            receive(timeout)
            self.wake()

        self.receive = handle

    @property
    def alive(self) -> bool:
        return True

    def stop(self, timeout: float) -> bool:
        """There is no thread to end."""
        return True

    def wake(self) -> None:
        """Messages and timers wake it, too: then it takes everything that is posted."""
        self.asleep = not self._posted

    def after(self, seconds: float, job: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._timers, (self.now() + seconds, self._count, job))

    def guard(self, job: Callable[..., object], *args: Any) -> None:
        try:
            job(*args)
        except Exception as error:
            raise Defect(f"the control thread of {self._process.name} would have logged: {error!r}") from error

    # What the world asks.

    def can_run(self) -> bool:
        """Whether it takes a posted job. One that was posted quietly does not wake it."""
        return bool(self._posted) and not self.asleep

    def run_posted(self) -> None:
        job, given = self._posted.popleft()
        self.guard(job, *given)
        self.wake()

    def next_timer(self) -> float | None:
        """World time of the next timer."""
        return self._timers[0][0] - self._process.skew if self._timers else None

    def timer_due(self) -> bool:
        return bool(self._timers) and self._timers[0][0] <= self.now()

    def run_timer(self) -> None:
        self.guard(heapq.heappop(self._timers)[2])
        self.wake()


class _Coming:
    """A job that is submitted after a while."""


class SimExecutor(KeyedExecutor):
    """An executor whose jobs are greenlets: each runs until it sleeps, and goes on when the world lets it.

    The order of the jobs of a key is that of the real executors.
    """

    def __init__(self, process: Process, name: str, width: int, spare: int, order: KeyOrder) -> None:
        self._process = process
        self._name = name
        self._width = width + spare
        self._order = order
        self._due: dict[Hashable, Job] = {}
        self._running: dict[Hashable, greenlet] = {}
        self._coming: dict[_Coming, tuple[Hashable, Job]] = {}
        """Jobs that are submitted after a while: whenever the world wants."""
        self._stuck: dict[Hashable, float] = {}
        """Keys whose jobs are stuck in the library, and until when."""
        process.executors.append(self)

    def submit_job(self, key: Hashable, job: Job) -> None:
        if self._order.enter(self, key, job):
            self.start(key, job)

    def submit_after(self, key: Hashable, job: Job, seconds: float) -> None:
        self._coming[_Coming()] = key, job

    def run_here(self, key: Hashable, job: Job, *, alone: bool = False) -> bool:
        if self._process.world.rng.random() < 0.2:  # sometimes all threads are taken
            return False
        if alone and self._stuck:
            return False
        if not self._order.enter_alone(key):
            return False
        job()
        self._leave_key(key)
        return True

    def run_beside(self, key: Hashable, job: Job) -> bool:
        return self.run_here(key, job)  # so that a job that never blocks waits for its turn, sometimes

    def revive(self) -> None:
        """A world never lacks threads."""

    def start(self, key: Hashable, job: Any) -> None:
        self._due[key] = job

    def _leave_key(self, key: Hashable) -> None:
        following = self._order.leave(key)
        if following is not None:
            executor, next_job = following
            executor.start(key, next_job)

    def close(self, timeout: float) -> bool:
        return True

    @property
    def waiting(self) -> int:
        return len(self._due) + self._order.waiting(self)

    # What the world asks.

    def choices(self) -> list[Hashable]:
        """Keys of which a job may start or go on, and jobs that may be submitted."""
        now = self._process.world.time
        free = [key for key in self._running if self._stuck.get(key, now) <= now]
        return [*free, *self._coming, *(self._due if len(self._running) < self._width else ())]

    def next_free(self) -> float | None:
        """World time at which the next job that is stuck goes on."""
        return min(self._stuck.values(), default=None)

    def step(self, key: Hashable) -> None:
        """Start or go on with the job of a key, or submit one."""
        if isinstance(key, _Coming):
            self.submit_job(*self._coming.pop(key))
            return
        job = self._running.get(key)
        if job is None:
            job = self._running[key] = greenlet(self._guarded(self._due.pop(key)))
        self._stuck.pop(key, None)
        said = job.switch()
        if isinstance(said, float):
            self._stuck[key] = said
        if job.dead:
            del self._running[key]
            self._leave_key(key)

    def _guarded(self, job: Job) -> Callable[[], None]:
        def run() -> None:
            try:
                job()
            except Exception as error:
                raise Defect(f"executor {self._name} of {self._process.name} would have logged: {error!r}") from error

        return run

    def kill(self) -> None:
        """The process has ended in the middle of whatever it did."""
        for job in self._running.values():
            job.throw()
        self._running.clear()
        self._stuck.clear()
        self._coming.clear()
        self._due.clear()
