"""A bounded pool of threads for jobs that may block. It keeps the jobs of one key in order.

While some jobs are held inside a library, the pool starts more threads for the others.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable
from types import GeneratorType
from typing import NamedTuple

from statelink._logs import logger

__all__ = ["HELD_AFTER_SECONDS", "Job", "KeyOrder", "KeyedExecutor"]

log = logger("statelink.link")

HELD_AFTER_SECONDS = 0.1
"""Seconds without a sign of life after which a job counts as held: as a rule it waits for a peer, inside a library."""
BRIEF = 1e-3
"""Longest pause, in seconds, for which a job keeps its thread while no other job needs one."""

Job = Callable[[], object]
"""What an executor runs. If it returns a generator, the executor runs the generator. Each ``yield`` is a pause in
seconds, in which the job waits for something; other jobs may have its thread meanwhile."""
Pauses = Generator[float, None, object]


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
        self._lines: dict[Hashable, tuple[KeyedExecutor, deque[tuple[KeyedExecutor, Job]]]] = {}

    def enter(self, executor: KeyedExecutor, key: Hashable, job: Job) -> KeyedExecutor | None:
        """Queue a job. ``None`` if it may start at once; otherwise the executor of the key's job that is under way."""
        line = self._lines.get(key)
        if line is None:
            self._lines[key] = executor, deque()
            return None
        line[1].append((executor, job))
        return line[0]

    def enter_alone(self, executor: KeyedExecutor, key: Hashable) -> bool:
        """Note that a job starts at once, unless one of its key is under way or queued. Returns whether it may."""
        if key in self._lines:
            return False
        self._lines[key] = executor, deque()
        return True

    def leave(self, key: Hashable) -> tuple[KeyedExecutor, Job] | None:
        """End the job of a key that is under way. Returns the key's next job, and the executor that has to start it."""
        _, waiting = self._lines[key]
        if not waiting:
            del self._lines[key]
            return None
        executor, job = waiting.popleft()
        self._lines[key] = executor, waiting
        return executor, job

    @property
    def idle(self) -> bool:
        """Whether no job of any key is under way or queued."""
        return not self._lines

    def waiting(self, executor: KeyedExecutor) -> int:
        """Jobs for an executor that wait for others of their key."""
        lines = [waiting for _, waiting in self._lines.values() if waiting]
        return sum(each is executor for waiting in lines for each, _ in waiting)


class _Parked(NamedTuple):
    """A job that waits without a thread. ``number`` tells this pause from others of the same key."""

    number: int
    steps: Pauses


class KeyedExecutor:
    """A pool of threads. It runs the jobs of one key in order, and one at a time.

    At most ``width`` jobs run at once. A job that is inside one call for `HELD_AFTER_SECONDS` is held. Up to ``spare``
    held jobs do not count against ``width``, so that they delay other jobs no longer than that. A job that returns a
    generator gives its thread back where it yields a long pause, and where other jobs need the thread. The next job of
    its key starts only after its end.

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
        self._ready: deque[tuple[Hashable, Job | Pauses]] = deque()
        self._parked: dict[Hashable, _Parked] = {}
        self._times: list[tuple[float, int, Hashable]] = []
        """A heap: when which parked job goes on. An entry whose number is not that of the parked job is ignored."""
        self._numbers = itertools.count()
        self._lively: dict[int, float] = {}
        """Per thread that runs a job, when that job last gave a sign of life. A thread updates its own entry without
        the lock: the entry is there already, so that the dictionary keeps its size."""
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

    def run_here(self, key: Hashable, job: Job, *, alone: bool = False) -> bool:
        """Run a short job on this thread, if no earlier job of its key and no lack of threads stands before it.

        Returns whether it was run. If not, nothing happened: use `submit`. A generator gives this thread back at its
        first pause, and goes on as if it had been submitted. Any thread.

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
            if not self._order.enter_alone(self, key):
                return False
            self._lively[me] = now
        paused = self._run(me, job, brief=0.0)
        with self._order.lock:
            self._leave(me, key, paused)
            if paused is not None or self._ready:
                self._call()  # a thread of the pool goes on with it, or takes what waited for this job
        return True

    def submit_promptly(self, key: Hashable, job: Job, *, alone: bool = False) -> None:
        """As `submit`, for a short job that never blocks: it runs on this thread, unless something stands before it.

        ``alone`` is as for `run_here`.
        """
        if not self.run_here(key, job, alone=alone):
            self.submit(key, job)

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
            for key in self._parked:
                self.hurry(key)
            self._changed.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:  # once closed, no thread is removed; one that is added is joined, too
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # With the lock held.

    def start(self, key: Hashable, job: Job | Pauses) -> None:
        """Queue a job whose turn it is. Called with the lock of the order held."""
        self._ready.append((key, job))
        self._call()

    def hurry(self, key: Hashable) -> None:
        """Let a key's parked job go on at once, since another job of the key waits for its end."""
        parked = self._parked.get(key)
        if parked is not None:
            heapq.heappush(self._times, (0.0, parked.number, key))
            self._call()

    def _call(self) -> None:
        """Wake or start a thread, if one is left. It takes a ready job, or waits until a parked one goes on."""
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

    def _take(self) -> tuple[Hashable, Job | Pauses] | None:
        """Wait for a job that may run. ``None`` if this thread has to end: after `close`, or if enough others wait."""
        if self._idle > self._width:
            return None  # this thread stood in for a held one, which is back
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
        """Seconds until one more job may run, if no job gives a sign of life until then; 0 if it may run at once."""
        if len(self._lively) >= self._most:
            return (
                HELD_AFTER_SECONDS  # no more jobs at once, even if all are held: the next one that ends wakes a thread
            )
        lively = sorted(seen for seen in self._lively.values() if seen > now - HELD_AFTER_SECONDS)
        if len(lively) < self._width:
            return 0.0
        return lively[len(lively) - self._width] + HELD_AFTER_SECONDS - now

    def _unpark(self, now: float) -> None:
        """Queue the parked jobs whose pause is over."""
        while self._times and self._times[0][0] <= now:
            _, number, key = heapq.heappop(self._times)
            parked = self._parked.get(key)
            if parked is not None and parked.number == number:  # if not, `hurry` let it go on before
                del self._parked[key]
                self._ready.append((key, parked.steps))

    def _park(self, key: Hashable, steps: Pauses, pause: float) -> None:
        number = next(self._numbers)
        self._parked[key] = _Parked(number, steps)
        due = 0.0 if self._closed else time.monotonic() + pause
        heapq.heappush(self._times, (due, number, key))

    def _leave(self, me: int, key: Hashable, paused: tuple[Pauses, float] | None) -> None:
        """A job that a thread ran has ended, or gave the thread back."""
        del self._lively[me]
        if paused is not None:
            self._park(key, *paused)
            return
        following = self._order.leave(key)
        if following is not None:  # the next job of its key, on that one's own executor
            executor, job = following
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
            paused = self._run(me, job, BRIEF)
            with self._order.lock:
                self._leave(me, key, paused)

    def _run(self, me: int, job: Job | Pauses, brief: float) -> tuple[Pauses, float] | None:
        """Run a job until it ends, or gives this thread back. Returns its rest and its pause; ``None`` at its end.

        Args:
            me: This thread.
            job: The job.
            brief: The longest pause for which it keeps this thread while no other job needs one.
        """
        try:
            steps = job() if callable(job) else job
            if not isinstance(steps, GeneratorType):
                return None
            while True:
                pause = next(steps)
                # Read without the lock: a job that becomes ready just now waits for BRIEF at most.
                if pause > brief or (pause and self._ready):
                    return steps, pause
                if pause:
                    time.sleep(pause)
                self._lively[me] = time.monotonic()
        except StopIteration:
            pass
        except BaseException:
            log.exception("a job of %s failed", self._name)
        return None
