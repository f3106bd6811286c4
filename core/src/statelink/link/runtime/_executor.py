"""A bounded pool of threads for jobs that may block. It keeps the jobs of one key in order.

While some jobs are held inside a library, the pool starts more threads for the others.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from statelink._logs import logger

__all__ = ["HELD_AFTER_SECONDS", "Job", "KeyOrder", "KeyedExecutor"]

log = logger("statelink.link")

HELD_AFTER_SECONDS = 0.1
"""Seconds after which a job counts as held: as a rule it waits for a peer, inside a library."""

Job = Callable[[], object]
"""What an executor runs. What it returns is not looked at."""


class KeyOrder:
    """Keeps the jobs of one key in the order in which they were submitted, even if they are for different executors.

    The executors of one link share an order. Every method is called with `lock` held.

    Attributes:
        lock: Guards this, and the executors that share it.
    """

    def __init__(self) -> None:
        # A thread that holds it may run code of the engine: a handler of what it logs, or a ``__del__``. That code may
        # call the link.
        self.lock = threading.RLock()
        self._lines: dict[Hashable, deque[tuple[KeyedExecutor, Job]]] = {}
        """Per key of which a job is under way, the jobs that wait for it, each with its executor."""

    def enter(self, executor: KeyedExecutor, key: Hashable, job: Job) -> bool:
        """Queue a job. Returns whether it may start at once."""
        waiting = self._lines.get(key)
        if waiting is None:
            self._lines[key] = deque()
            return True
        waiting.append((executor, job))
        return False

    def enter_alone(self, key: Hashable) -> bool:
        """Note that a job starts at once, unless one of its key is under way or queued. Returns whether it may."""
        if key in self._lines:
            return False
        self._lines[key] = deque()
        return True

    def leave(self, key: Hashable) -> tuple[KeyedExecutor, Job] | None:
        """End the job of a key that is under way. Returns the key's next job, and the executor that has to start it."""
        waiting = self._lines[key]
        if not waiting:
            del self._lines[key]
            return None
        return waiting.popleft()

    @property
    def idle(self) -> bool:
        """Whether no job of any key is under way or queued."""
        return not self._lines

    def waiting(self, executor: KeyedExecutor) -> int:
        """Jobs for an executor that wait for others of their key."""
        return sum(each is executor for waiting in self._lines.values() for each, _ in waiting)


class _Later(NamedTuple):
    """A job that is submitted at some time. ``number`` keeps those of one time in order."""

    due: float
    number: int
    key: Hashable
    job: Job


class KeyedExecutor:
    """A pool of threads. It runs the jobs of one key in order, and one at a time.

    At most ``width`` jobs run at once. A job that has run for `HELD_AFTER_SECONDS` is held. Up to ``spare``
    held jobs do not count against ``width``, so that they delay other jobs no longer than that. A job that has much to
    do does a part, and submits another job for the rest, so that the jobs of other keys have their turn.

    Threads start when they are needed. A job that raises is a defect; it is logged, and ends no thread.

    Args:
        name: For thread names.
        width: Most jobs that run at once and are not held.
        spare: Most jobs that may be held beside them.
        order: The order of the jobs of each key, shared with other executors; this one's own if not given.
        begin: Each thread calls it first.

    Attributes:
        lack: Why no thread could be started, while none is there; empty otherwise. Any thread.
    """

    lack = ""

    def __init__(
        self,
        name: str,
        width: int,
        spare: int = 0,
        order: KeyOrder | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._width = width
        self._most = width + spare
        self._order = order or KeyOrder()
        self._begin = begin
        # Everything below is guarded by the lock of the order.
        self._changed = threading.Condition(self._order.lock)
        self._ready: deque[tuple[Hashable, Job]] = deque()
        self._later: list[_Later] = []
        """A heap."""
        self._numbers = itertools.count()
        self._watched = math.inf
        """When the first idle thread wakes to look at `_later`."""
        self._lively: dict[int, float] = {}
        """Per thread that runs a job, when that job began."""
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit_job(self, key: Hashable, job: Job) -> None:
        """Run ``job`` after every earlier job of the same key. After `close`, jobs are dropped. Any thread."""
        with self._order.lock:
            if self._closed:
                return
            if self._order.enter(self, key, job):
                self.start(key, job)

    def submit_after(self, key: Hashable, job: Job, seconds: float) -> None:
        """As `submit_job`, once so many seconds have passed. Called by a job of this executor."""
        with self._order.lock:
            if not self._closed:
                heapq.heappush(self._later, _Later(time.monotonic() + seconds, next(self._numbers), key, job))

    def run_here(self, key: Hashable, job: Job, *, alone: bool = False) -> bool:
        """Run a short job on this thread, if no earlier job of its key and no lack of threads stands before it.

        Returns whether it was run. If not, nothing happened: use `submit_job`. Any thread.

        Args:
            key: The key.
            job: The job.
            alone: Do not run it while any job of this executor runs: it may have to wait for that one.
        """
        me = threading.get_ident()
        with self._order.lock:
            now = time.monotonic()
            if self._closed or self._ready or (self._lively and (alone or self._free_in(now) > 0)):
                return False
            if not self._order.enter_alone(key):
                return False
            self._lively[me] = now
        self._run(job)
        with self._order.lock:
            self._leave(me, key)
            if self._ready or self._unwatched:
                self._call()  # a thread of the pool takes what waited for this job, or what comes later
        return True

    def run_beside(self, key: Hashable, job: Job) -> bool:
        """As `run_here`, whatever other jobs of this executor run: the job does not count among them."""
        with self._order.lock:
            if self._closed or not self._order.enter_alone(key):
                return False
        self._run(job)
        with self._order.lock:
            following = self._order.leave(key)
            if following is not None:
                executor, waiting = following
                executor.start(key, waiting)
        return True

    def submit_promptly(self, key: Hashable, job: Job, *, alone: bool = False) -> None:
        """As `submit_job`, for a short job that never blocks: it runs here, unless something stands before it.

        ``alone`` is as for `run_here`.
        """
        if not self.run_here(key, job, alone=alone):
            self.submit_job(key, job)

    def revive(self) -> None:
        """Start a thread if jobs are ready and no thread is there. Any thread; called now and then."""
        if self._ready and not self._threads:  # read without the lock: a wrong answer is corrected by the next call
            with self._order.lock:
                if self._ready and not self._threads:
                    self._call()

    @property
    def waiting(self) -> int:
        """Jobs that have not started. Any thread."""
        with self._order.lock:
            return len(self._ready) + self._order.waiting(self)

    def close(self, timeout: float) -> bool:
        """Run what is queued, then end the threads. Blocks. Returns whether all ended within ``timeout`` seconds."""
        with self._order.lock:
            self._closed = True
            self._release(math.inf)
            self._changed.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:  # once closed, no thread is removed; one that is added is joined, too
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # With the lock held.

    def start(self, key: Hashable, job: Job) -> None:
        """Queue a job whose turn it is. Called with the lock of the order held."""
        self._ready.append((key, job))
        self._call()

    def _call(self) -> None:
        """Wake or start a thread, if one is left. It takes a ready job, or waits until the next one is due."""
        if self._idle:
            self._changed.notify()
        elif len(self._threads) < self._most:
            taken = {thread.name for thread in self._threads}
            name = next(name for number in itertools.count() if (name := f"{self._name}-{number}") not in taken)
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # The system has no thread left. This may run on a thread of another executor, which must not end. The
                # threads that run go on without this one. If there is none, `revive` or the next job tries again.
                if not self._threads:
                    self.lack = str(error)
                    log.error("jobs of %s wait: %s", self._name, error)
            else:
                self.lack = ""
                self._threads.append(thread)

    def _take(self) -> tuple[Hashable, Job] | None:
        """Wait for a job that may run. ``None`` if this thread has to end: after `close`, or if enough others wait."""
        if self._idle > self._width:
            return None  # this thread stood in for a held one, which is back
        self._idle += 1
        try:
            while True:
                now = time.monotonic()
                self._release(now)
                wait = math.inf
                if self._ready:
                    wait = self._free_in(now)
                    if wait <= 0:
                        break
                elif self._closed:
                    return None
                self._wait(now, wait)
        finally:
            self._idle -= 1
        taken = self._ready.popleft()
        if self._ready or self._unwatched:
            self._call()
        return taken

    @property
    def _unwatched(self) -> bool:
        """Whether no idle thread wakes when the next job is due."""
        return bool(self._later) and self._later[0].due < self._watched

    def _wait(self, now: float, most: float) -> None:
        """Wait for a call, or until the next job is due, unless another thread wakes for that one."""
        watches = self._unwatched
        due = self._later[0].due if watches else math.inf
        if watches:
            self._watched = due
            most = min(most, due - now)
        self._changed.wait(None if most == math.inf else most)
        if watches and self._watched == due:
            self._watched = math.inf

    def _free_in(self, now: float) -> float:
        """Seconds until one more job may run, if none ends until then; 0 if it may run at once."""
        if len(self._lively) >= self._most:
            return (
                HELD_AFTER_SECONDS  # no more jobs at once, even if all are held: the next one that ends wakes a thread
            )
        lively = sorted(seen for seen in self._lively.values() if seen > now - HELD_AFTER_SECONDS)
        if len(lively) < self._width:
            return 0.0
        return lively[len(lively) - self._width] + HELD_AFTER_SECONDS - now

    def _release(self, now: float) -> None:
        """Submit the jobs that are due."""
        while self._later and self._later[0].due <= now:
            later = heapq.heappop(self._later)
            if self._order.enter(self, later.key, later.job):
                self._ready.append((later.key, later.job))

    def _leave(self, me: int, key: Hashable) -> None:
        """A job that a thread ran has ended."""
        del self._lively[me]
        following = self._order.leave(key)
        if following is not None:  # the next job of its key, on that one's own executor
            executor, job = following
            if executor is self:
                self._ready.append((key, job))  # who called this takes it, or calls somebody who does
            else:
                executor.start(key, job)

    # The threads.

    def _work(self) -> None:
        me = threading.get_ident()
        self._begin()
        while True:
            with self._order.lock:
                taken = self._take()
                if taken is None:
                    if not self._closed:
                        self._threads.remove(threading.current_thread())
                        self._changed.notify()  # another thread takes what is ready
                    return
                self._lively[me] = time.monotonic()
            key, job = taken
            self._run(job)
            with self._order.lock:
                self._leave(me, key)

    def _run(self, job: Job) -> None:
        try:
            job()
        except BaseException:
            log.exception("a job of %s failed", self._name)
