"""The control thread's loop: messages, timers, and jobs posted by other threads."""

from __future__ import annotations

import ctypes
import heapq
import itertools
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Loop"]

log = logging.getLogger("statelink.link")

# These keep the interpreter. A thread that let go of it might wait for it behind one that computes.
_send, _receive = (getattr(ctypes.PyDLL(None), name) for name in ("send", "recv"))
for _call in (_send, _receive):
    _call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
    _call.restype = ctypes.c_ssize_t
_QUIETLY = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)

BURST = 256
"""Most posted jobs that run before messages and timers get their turn."""


class Loop:
    """Runs everything that changes a link's state, on one thread and one thing at a time.

    No job that runs here may block. The protocol reads the time from `now` alone, so that a test can replace the clock.
    """

    def __init__(self) -> None:
        self._posted: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._waker, self._wakee = socket.socketpair()
        self._bytes = ctypes.create_string_buffer(64)
        # Whether a byte is on its way through the pipe. Any thread that posts sets it; the control thread clears it.
        self._awake = False
        self._stop = False
        self._thread: threading.Thread | None = None
        self._me = 0
        """The control thread's number, once it runs."""

    def now(self) -> float:
        """Seconds on a clock that never goes back. Any thread."""
        return time.monotonic()

    def fileno(self) -> int:
        """A descriptor that becomes readable when a job was posted. The wait for messages watches it too."""
        return self._wakee.fileno()

    def start(self, receive: Callable[[float | None], None], end: Callable[[], None]) -> None:
        """Start the thread.

        Args:
            receive: Called on the thread. Waits for messages for at most this many seconds (``None``: until a message
                or a posted job comes), and handles them.
            end: Called on the thread, after everything else.
        """
        self._thread = threading.Thread(target=self._run, args=(receive, end), name="statelink-control", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # the system has no thread left
            self._thread = None
            self.stop(0)
            raise

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def post(self, job: Callable[[], None]) -> None:
        """Run ``job``, in order of posting. Callable from any thread; never blocks."""
        self._posted.append(job)
        if not self._awake and threading.get_ident() != self._me:  # the control thread looks before it waits
            self._awake = True
            # If the pipe is full, the thread wakes up anyway. If it is closed, the thread has ended.
            _send(self._waker.fileno(), b"\0", 1, _QUIETLY)

    def after(self, seconds: float, job: Callable[[], None]) -> None:
        """Run ``job`` after some time. Control thread only, or before the loop starts."""
        heapq.heappush(self._timers, (self.now() + seconds, next(self._numbers), job))

    def guard(self, job: Callable[..., None], *args: Any) -> None:
        """Run a job, and log what it raises: nothing may end the thread, not even a `SystemExit` of foreign code."""
        try:
            job(*args)
        except BaseException:
            log.exception("a job of the control thread failed")

    def _run(self, receive: Callable[[float | None], None], end: Callable[[], None]) -> None:
        self._me = threading.get_ident()
        while not self._stop:
            timeout = self._timers[0][0] - self.now() if self._timers else None
            self.guard(receive, 0.0 if self._posted else timeout)
            self._take_posted()
            self._take_timers()
        self.guard(end)

    def _take_posted(self) -> None:
        # Drain the pipe before clearing the flag. A thread that posts between the two sends no byte, but its job is
        # already in the queue. A thread that posts later sends a byte. In the other order, this thread could take the
        # byte of a post and leave its flag set: then no later post would send a byte and wake this thread.
        if self._awake:
            _receive(self._wakee.fileno(), self._bytes, len(self._bytes), socket.MSG_DONTWAIT)
            self._awake = False
        for _ in range(min(len(self._posted), BURST)):  # messages and timers have their turn, too
            self.guard(self._posted.popleft())

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
        if self._thread is not None:
            self._thread.join(timeout)
        self._waker.close()
        self._wakee.close()
        return not self.alive
