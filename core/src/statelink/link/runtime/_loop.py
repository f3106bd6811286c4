"""The control thread's loop: messages, timers and posted jobs; and what threads wait for: descriptors and flags."""

from __future__ import annotations

import ctypes
import heapq
import itertools
import os
import platform
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from statelink._logs import logger

__all__ = ["Bell", "Flag", "Loop", "Readers"]

log = logger("statelink.link")

BURST_JOBS = 256
"""Most posted jobs that run before messages and timers get their turn."""
MOST_DESCRIPTORS: Final = 64
"""Most descriptors that are taken at once; the others are taken the next time."""
WIDTH = 8
"""Bytes of an eventfd's counter, which are written and read at once."""
ONE = (1).to_bytes(WIDTH, sys.byteorder)


class _Event(ctypes.Structure):
    """``struct epoll_event``, which has no padding on x86-64."""

    if platform.machine() == "x86_64":
        _pack_ = 1
    _fields_ = (("events", ctypes.c_uint32), ("descriptor", ctypes.c_int32), ("unused", ctypes.c_uint32))


# These calls keep the interpreter's lock (GIL). A call that releases it may wait up to 5 ms for it while another thread
# computes.
_write, _read = (getattr(ctypes.PyDLL(None), name) for name in ("write", "read"))
for _call in (_write, _read):
    _call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
    _call.restype = ctypes.c_ssize_t
_epoll_wait = ctypes.PyDLL(None).epoll_wait
_epoll_wait.argtypes = (ctypes.c_int, ctypes.POINTER(_Event), ctypes.c_int, ctypes.c_int)
_epoll_wait.restype = ctypes.c_int


class Loop:
    """Runs everything that changes a link's state, on one thread and one thing at a time.

    No job that runs here may block. The protocol reads the time from `now` alone, so that a test can replace the clock.

    Args:
        begin: The thread calls it first.

    Attributes:
        now: Seconds on a clock that never goes back. Any thread.
        readers: Descriptors of a backend that the thread watches. Any thread adds and removes them.
        asleep: Whether the thread waits, or is about to. Only then, a thread that posts a job has to wake it, and sets
            this to false. The control thread itself sets it to false as soon as it handles a message.
    """

    now: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, begin: Callable[[], None] = lambda: None) -> None:
        self._begin = begin
        self._posted: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._bell = Bell()
        self.readers = Readers(self._bell.fileno())
        self.asleep = False
        self._stop = False
        self._thread: threading.Thread | None = None

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
        thread = threading.Thread(target=self._run, args=(receive, end), name="statelink-control", daemon=True)
        thread.start()
        self._thread = thread  # not before it runs: `stop` waits for it

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """Whether the thread waits, or is about to, and no posted job waits for it. Any thread; never blocks."""
        return self.asleep and not self._posted

    def post_job(self, job: Callable[..., object], *given: Any) -> None:
        """Run ``job`` with what is given, in order of posting. Callable from any thread; never blocks."""
        self._posted.append((job, given))
        if self.asleep:
            self.wake()

    def post_quietly(self, job: Callable[[], None]) -> None:
        """As `post_job`, but let the thread sleep on: the job runs once something else wakes it. A heartbeat does.

        If the job must run at once in some case, look for that case after this call, and then call `wake`. A look
        before this call could miss what the control thread notes in between. Callable from any thread; never blocks.
        """
        self._posted.append((job, ()))

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
        self.guard(self._begin)
        while not self._stop:
            # This is set before the loop looks at the queue. A thread that posts after that look then finds it set,
            # and wakes the loop, because `post_job` adds the job first and reads this afterwards.
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
                    job, given = self._posted.popleft()
                    job(*given)
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

        self.post_job(last)
        if self._thread is None:
            self._close()
        else:
            self._thread.join(timeout)
        return not self.alive


class Bell:
    """A descriptor that is readable from a ring on, until the thread that waits for it silences it. Never blocks.

    Attributes:
        rung: Whether it was rung since `silence` was called last.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._end = weakref.finalize(self, os.close, self._descriptor)
        """Closes the descriptor, once, also if the opening of a link fails and nobody calls `close`."""
        self._end.atexit = False
        self._bytes = ctypes.create_string_buffer(WIDTH)
        self.rung = False
        self._lock = threading.RLock()
        """Guards the descriptor: once it is closed, its number may belong to another file. The code of a signal handler
        or of a ``__del__`` may run on a thread that holds it, and ring."""

    def fileno(self) -> int:
        """The descriptor, or -1 once it is closed."""
        return self._descriptor

    def ring(self) -> None:
        """Make the descriptor readable. Any thread; does nothing after `close`."""
        with self._lock:
            if self._descriptor >= 0:
                _write(self._descriptor, ONE, WIDTH)
                self.rung = True  # after the write: `silence` leaves no ring unread

    def silence(self) -> None:
        """Make the descriptor unreadable, if it was rung. Only the thread that waits for it."""
        if self.rung:
            self.rung = False  # before the read: a ring that comes between them is read, or is noted again
            _read(self._descriptor, self._bytes, WIDTH)

    def close(self) -> None:
        """Close the descriptor. Any thread, once nobody waits for it."""
        with self._lock:
            self._descriptor = -1
        self._end()


class Readers:
    """Finds out which descriptors have become readable. Implements `statelink.backend.EventLoop`.

    Any thread adds and removes; the control thread takes.

    Args:
        bell: A descriptor that `fileno` covers, too, for as long as it can be read. Nothing is called for it.
    """

    def __init__(self, bell: int) -> None:
        self._epoll = select.epoll()
        self._epoll.register(bell, select.EPOLLIN)
        self._ready: dict[int, Callable[[], object]] = {}
        self._events = (_Event * MOST_DESCRIPTORS)()
        self._lock = threading.Lock()
        """Guards the descriptor: once it is closed, its number may belong to another file."""

    def fileno(self) -> int:
        """A descriptor that is readable while the bell rings or another one has something new; -1 once it is closed."""
        return -1 if self._epoll.closed else self._epoll.fileno()

    def add_reader(self, descriptor: int, ready: Callable[[], object]) -> None:
        """See `statelink.backend.EventLoop`. Does nothing after `close`."""
        with self._lock:
            if not self._epoll.closed:
                self._ready[descriptor] = ready
                try:
                    self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
                except OSError:
                    del self._ready[descriptor]
                    raise

    def remove_reader(self, descriptor: int) -> None:
        """See `statelink.backend.EventLoop`. May be called after `close`."""
        with self._lock:
            if self._ready.pop(descriptor, None) is not None:
                self._epoll.unregister(descriptor)

    def take(self) -> Iterator[Callable[[], object]]:
        """What to call for the descriptors that have something new. Control thread; never blocks."""
        if not self._ready:
            return
        found = _epoll_wait(self._epoll.fileno(), self._events, MOST_DESCRIPTORS, 0)
        for event in self._events[: max(0, found)]:
            ready = self._ready.get(event.descriptor)
            if ready is not None:
                yield ready

    def close(self) -> None:
        """Watch nothing any more. Control thread."""
        with self._lock:
            self._ready.clear()
            self._epoll.close()


class Flag(msgspec.Struct):
    """As `threading.Event`, but the lock behind it is made only when a thread waits. Each room has several of them.

    Safe to use from any thread, but only one thread at a time may call `set` or `clear`.

    Attributes:
        raised: Whether it is set.
        event: What threads wait for; ``None`` before the first one waits. Only this class uses it.
    """

    raised: bool = False
    event: threading.Event | None = None

    def is_set(self) -> bool:
        """Whether it is set."""
        return self.raised

    def set(self) -> None:
        """Set it, and wake every thread that waits."""
        self.raised = True  # before the event is read: who waits makes the event first, and looks at this after that
        event = self.event
        if event is not None:
            event.set()

    def clear(self) -> None:
        """Clear it."""
        self.raised = False
        event = self.event
        if event is not None:
            event.clear()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is set, or for ``timeout`` seconds. Returns whether it is set."""
        if not self.raised:
            event = self.event or self._made()
            if not self.is_set():  # another thread may have set it just now, without the event
                event.wait(timeout)
        return self.is_set()

    def _made(self) -> threading.Event:
        with _making:
            if self.event is None:
                self.event = threading.Event()
            return self.event


_making = threading.Lock()
"""Lets two threads that wait for one flag agree on its event."""
