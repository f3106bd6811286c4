"""The control thread's loop: messages, timers, and jobs posted by other threads."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from statelink._background import Background
from statelink._logs import logger

from ._bell import Bell
from ._readers import Readers

__all__ = ["Loop"]

log = logger("statelink.link")

BURST_JOBS = 256
"""Most posted jobs that run before messages and timers get their turn."""


class Loop:
    """Runs everything that changes a link's state, on one thread and one thing at a time.

    No job that runs here may block. The protocol reads the time from `now` alone, so that a test can replace the clock.

    Attributes:
        now: Seconds on a clock that never goes back. Any thread.
        readers: Descriptors of a backend that the thread watches. Any thread adds and removes them.
        asleep: Whether the thread waits, or is about to. Only then, a thread that posts a job has to wake it, and sets
            this to false. The control thread itself sets it to false as soon as it handles a message.
    """

    now: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self._posted: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._bell = Bell()
        self.readers = Readers(self._bell.fileno())
        self.asleep = False
        self._stop = False
        self._thread: Background | None = None

    def fileno(self) -> int:
        """A descriptor that becomes readable when a job was posted, or one of `readers` has something new.

        The wait for messages watches it, too.
        """
        return self.readers.fileno()

    def start(self, receive: Callable[[float | None], None], end: Callable[[], None]) -> None:
        """Start the thread.

        If this raises, or something that follows it, call `stop`.

        Args:
            receive: Called on the thread. Waits for messages for at most this many seconds (``None``: until a message
                or a posted job comes), and handles them.
            end: Called on the thread, after everything else.
        """
        self._thread = Background(partial(self._run, receive, end), "statelink-control")
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """Whether the thread waits, or is about to, and no posted job waits for it. Any thread; never blocks."""
        return self.asleep and not self._posted

    def post(self, job: Callable[[], None]) -> None:
        """Run ``job``, in order of posting. Callable from any thread; never blocks."""
        self._posted.append(job)
        if self.asleep:
            self.wake()

    def post_quietly(self, job: Callable[[], None]) -> None:
        """As `post`, but let the thread sleep on: the job runs once something else wakes it. A heartbeat does.

        If the job must run at once in some case, look for that case after this call, and then call `wake`. A look
        before this call could miss what the control thread notes in between. Callable from any thread; never blocks.
        """
        self._posted.append(job)

    def wake(self) -> None:
        """Have posted jobs run soon. Callable from any thread; never blocks."""
        if self.asleep:
            self.asleep = False  # so that others need not wake it, too
            self._bell.ring()

    def after(self, seconds: float, job: Callable[[], None]) -> None:
        """Run ``job`` when ``seconds`` have passed. Control thread only, or before the loop starts."""
        heapq.heappush(self._timers, (self.now() + seconds, next(self._numbers), job))

    def guard(self, job: Callable[..., object], *args: Any) -> None:
        """Run a job, and log what it raises: nothing may end the thread, not even a `SystemExit` of foreign code."""
        try:
            job(*args)
        except BaseException:
            log.exception("a job of the control thread failed")

    def _run(self, receive: Callable[[float | None], None], end: Callable[[], None]) -> None:
        while not self._stop:
            # This is set before the loop looks at the queue. A thread that posts after that look then finds it set,
            # and wakes the loop, because `post` adds the job first and reads this afterwards.
            self.asleep = True
            timeout = self._timers[0][0] - self.now() if self._timers else None
            if self._posted:
                self.asleep, timeout = False, 0.0
            self.guard(receive, timeout)
            self.asleep = False
            if self._bell.rung:
                self._bell.silence()
            for ready in self.readers.take():
                self.guard(ready)
            if self._posted:
                self._take_posted()
            if self._timers and self._timers[0][0] <= self.now():
                self._take_timers()
        self.guard(end)
        self._close()  # only here nobody waits for it any more

    def _close(self) -> None:
        self.readers.close()
        self._bell.close()

    def _take_posted(self) -> None:
        left = len(self._posted)  # what these jobs post, messages and timers have their turn, too
        if left > BURST_JOBS:
            left = BURST_JOBS
        while left:
            try:
                while left:
                    left -= 1
                    self._posted.popleft()()
            except BaseException:  # as in `guard`
                log.exception("a job of the control thread failed")

    def _take_timers(self) -> None:
        now = self.now()
        while self._timers and self._timers[0][0] <= now:
            self.guard(heapq.heappop(self._timers)[2])

    def stop(self, timeout: float) -> bool:
        """Run the posted jobs, then end the thread. Returns whether it ended within ``timeout`` seconds.

        Blocks. Any thread but the control thread.
        """

        def last() -> None:
            self._stop = True

        self.post(last)
        if self._thread is None or self._thread.cancel():
            self._close()
        else:
            self._thread.join(timeout)
        return not self.alive
