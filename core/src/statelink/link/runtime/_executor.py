"""The threads that may block: bounded, in order per key, and more of them while some are held."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable
from typing import NamedTuple

__all__ = ["HELD_AFTER", "Job", "KeyOrder", "KeyedExecutor"]

log = logging.getLogger("statelink.link")

HELD_AFTER = 0.1
"""Seconds without a sign of life after which a job counts as held: it waits inside a library, for a peer as a rule."""
BRIEF = 1e-3
"""Seconds that a job may wait on its thread while nobody else needs one."""

Job = Callable[[], object]
"""What an executor runs. If it returns a generator, the executor runs that: each ``yield`` is a number of seconds for
which the job waits for something, and gives its thread to others if they need one."""
Steps = Generator[float, None, object]


class KeyOrder:
    """Keeps the jobs of one key in the order in which they were submitted, whichever executor each of them is for.

    The executors of one link share an order. Every method is called with `lock` held.

    Attributes:
        lock: Guards this, and the executors that share it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._lines: dict[Hashable, tuple[KeyedExecutor, deque[tuple[KeyedExecutor, Job]]]] = {}

    def enter(self, executor: KeyedExecutor, key: Hashable, job: Job) -> KeyedExecutor | None:
        """Put a job in line. ``None`` if it may start at once; otherwise the executor of the job that is under way."""
        line = self._lines.get(key)
        if line is None:
            self._lines[key] = executor, deque()
            return None
        line[1].append((executor, job))
        return line[0]

    def leave(self, key: Hashable) -> tuple[KeyedExecutor, Job] | None:
        """The job of a key that is under way has ended; the next one and its executor, which starts it."""
        _, waiting = self._lines[key]
        if not waiting:
            del self._lines[key]
            return None
        executor, job = waiting.popleft()
        self._lines[key] = executor, waiting
        return executor, job

    def waiting(self, executor: KeyedExecutor) -> int:
        """Jobs for an executor that wait for others of their key."""
        lines = [waiting for _, waiting in self._lines.values() if waiting]
        return sum(each is executor for waiting in lines for each, _ in waiting)


class _Parked(NamedTuple):
    """A job that waits without a thread."""

    number: int
    steps: Steps


class KeyedExecutor:
    """A pool of threads that runs jobs in order per key, and one key at a time.

    At most ``width`` jobs run at once. A job that is inside one call for `HELD_AFTER` seconds is held, and does not
    count: it delays the others no longer than that. At most ``spare`` jobs are held; beyond that, the others wait. A
    job that returns a generator gives its thread back at each ``yield``, if others need it, and keeps its place in the
    line of its key.

    Threads start when they are needed. A job that raises is a defect; it is logged, and ends no thread.

    Args:
        name: For thread names.
        width: Most jobs that run at once and are not held.
        spare: Most jobs that may be held beside them.
        order: The order of the jobs of each key, shared with other executors; this one's own if not given.
    """

    def __init__(self, name: str, width: int, spare: int = 0, order: KeyOrder | None = None) -> None:
        self._name = name
        self._width = width
        self._most = width + spare
        self._order = order or KeyOrder()
        # Everything below is guarded by the lock of the order.
        self._changed = threading.Condition(self._order.lock)
        self._ready: deque[tuple[Hashable, Job | Steps]] = deque()
        self._parked: dict[Hashable, _Parked] = {}
        self._times: list[tuple[float, int, Hashable]] = []
        self._numbers = itertools.count()
        self._lively: dict[int, float] = {}
        """Threads that run a job, and when it last gave a sign of life. A thread notes its own without the lock."""
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, key: Hashable, job: Job) -> None:
        """Run ``job`` after every earlier job of the same key. After `close`, jobs are dropped. Any thread."""
        with self._order.lock:
            if self._closed:
                return
            busy = self._order.enter(self, key, job)
            if busy is None:
                self.start(key, job)
            else:
                busy.hurry(key)

    @property
    def waiting(self) -> int:
        """Jobs that have not started. Any thread."""
        with self._order.lock:
            return len(self._ready) + self._order.waiting(self)

    def close(self, timeout: float) -> bool:
        """Run what is queued, then end the threads; whether all ended within ``timeout`` seconds."""
        with self._order.lock:
            self._closed = True
            for key in self._parked:
                self.hurry(key)
            self._changed.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:  # from now on none is removed, and those that are added are joined, too
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # With the lock held.

    def start(self, key: Hashable, job: Job | Steps) -> None:
        """It is the turn of a job. Called with the lock of the order held."""
        self._ready.append((key, job))
        self._call()

    def hurry(self, key: Hashable) -> None:
        """Another job waits behind one: if that one is parked, it looks at once whether it can go on."""
        parked = self._parked.get(key)
        if parked is not None:
            heapq.heappush(self._times, (0.0, parked.number, key))
            self._call()

    def _call(self) -> None:
        """See to it that a thread looks at what is ready, or watches until something is."""
        if self._idle:
            self._changed.notify()
        elif len(self._threads) < self._most:
            taken = {thread.name for thread in self._threads}
            name = next(name for number in itertools.count() if (name := f"{self._name}-{number}") not in taken)
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no thread left: those that there are do what they can
                if not self._threads:
                    raise
            else:
                self._threads.append(thread)

    def _take(self) -> tuple[Hashable, Job | Steps] | None:
        """Wait for a job that may run; ``None`` once there will be none, or there are threads enough."""
        if self._idle > self._width:
            return None  # it stood in for one that was held
        self._idle += 1
        try:
            while True:
                now = time.monotonic()
                self._unpark(now)
                wait = self._times[0][0] - now if self._times else None
                if self._ready:
                    free = self._free_in(now)
                    if free <= 0:
                        break
                    wait = free if wait is None else min(wait, free)
                elif self._closed and not self._parked:
                    return None
                self._changed.wait(wait)
        finally:
            self._idle -= 1
        taken = self._ready.popleft()
        if self._ready or self._parked:
            self._call()
        return taken

    def _free_in(self, now: float) -> float:
        """Seconds until one more job may run, as things stand; 0 if it may now."""
        lively = sorted(seen for seen in self._lively.values() if seen > now - HELD_AFTER)
        if len(lively) < self._width:
            return 0.0
        return lively[len(lively) - self._width] + HELD_AFTER - now

    def _unpark(self, now: float) -> None:
        while self._times and self._times[0][0] <= now:
            _, number, key = heapq.heappop(self._times)
            parked = self._parked.get(key)
            if parked is not None and parked.number == number:  # else it was hurried, and has gone on since
                del self._parked[key]
                self._ready.append((key, parked.steps))

    def _park(self, key: Hashable, steps: Steps, pause: float) -> None:
        number = next(self._numbers)
        self._parked[key] = _Parked(number, steps)
        due = 0.0 if self._closed else time.monotonic() + pause
        heapq.heappush(self._times, (due, number, key))

    def _end(self, key: Hashable) -> None:
        """A job has ended: the next of its key is somebody's turn."""
        following = self._order.leave(key)
        if following is not None:
            executor, job = following
            executor.start(key, job)

    # The threads.

    def _work(self) -> None:
        me = threading.get_ident()
        while True:
            with self._order.lock:
                taken = self._take()
                if taken is None:
                    if not self._closed:
                        self._threads.remove(threading.current_thread())
                        self._changed.notify()  # of what is ready, if anything is
                    return
                self._lively[me] = time.monotonic()
            key, job = taken
            paused = self._run(me, job)
            with self._order.lock:
                del self._lively[me]
                if paused is None:
                    self._end(key)
                else:
                    self._park(key, *paused)

    def _run(self, me: int, job: Job | Steps) -> tuple[Steps, float] | None:
        """Run a job until it ends, or has to wait for longer than this thread has time."""
        try:
            steps = job if isinstance(job, Generator) else job()
            if not isinstance(steps, Generator):
                return None
            while True:
                pause = next(steps)
                if pause > BRIEF or (pause and self._ready):
                    return steps, pause
                if pause:
                    time.sleep(pause)
                self._lively[me] = time.monotonic()
        except StopIteration:
            pass
        except BaseException:
            log.exception("a job of %s failed", self._name)
        return None
