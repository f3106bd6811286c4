"""Closes a process's links before its interpreter ends.

The threads of a link are daemon threads, which nobody waits for. When the interpreter ends, it stops each of them where
it next takes the interpreter's lock (GIL): before Python 3.14, by unwinding its stack. If such a thread is in a call of
a C++ library, the unwinding meets frames that allow no exception, and the process aborts instead of exiting. So no
thread of a link may be in a library when the interpreter ends.

`atexit` is the place for it. Its functions run when the main thread and all other threads that are not daemons have
ended, so that no such thread needs a link any more. They also run before the interpreter stops the daemon threads.

A backend may have left a thread in its library when it was closed, with or without a link. The exit waits for it, too.
A library may hold a thread for longer than an exit waits. Then `_leave_threads` sees to it that such a thread neither
aborts the process nor changes its exit status.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator

from statelink._logs import logger
from statelink.backend._process import left_in_libraries
from statelink.errors import ClosedError

__all__ = ["AtExit", "opening"]

log = logger("statelink.link")

TIMEOUT_SECONDS = 5.0
"""Seconds that an exit waits, about, for all links together, and for what backends have left in libraries."""

_changed = threading.Condition()
"""Guards what follows."""
_noted: list[AtExit] = []
_opening = 0
"""Calls that open a link at this moment."""
_ending = False
"""Whether the interpreter is about to end."""
_process = os.getpid()
"""The process that `_close_all` is registered in: `multiprocessing` drops what its forked children inherit of that."""


@contextlib.contextmanager
def opening() -> Iterator[None]:
    """A link is opened meanwhile. Any thread.

    Raises:
        ClosedError: The interpreter is about to end.
    """
    global _opening, _process
    with _changed:
        if _ending:
            raise ClosedError("no link can be opened", cause="the interpreter is about to end", code="closed.exit")
        if _process != os.getpid():
            _process = os.getpid()
            atexit.unregister(_close_all)
            atexit.register(_close_all)
        _opening += 1
    try:
        yield
    finally:
        with _changed:
            _opening -= 1
            _changed.notify_all()


class AtExit:
    """What the exit of the interpreter does with one link. Any thread.

    Args:
        begin: Begins to close the link. Returns at once. Called once.
        end: Closes the link within about so many seconds. Called after ``begin``. Returns whether its threads have
            ended.
    """

    def __init__(self, begin: Callable[[], object], end: Callable[[float], bool]) -> None:
        self.begin = begin
        self.end = end

    def note(self) -> None:
        """The link is open: close it when the interpreter ends."""
        with _changed:
            _noted.append(self)

    def forget(self) -> None:
        """The link is closed, and its threads have ended. May be called twice."""
        with _changed:
            if self in _noted:
                _noted.remove(self)


def _close_all() -> None:
    """Close the links that are open. The main thread, in `atexit`."""
    global _ending
    until = time.monotonic() + TIMEOUT_SECONDS
    left = True
    try:
        with _changed:
            _ending = True
            # Not for ever, because a daemon thread may be in a library while it opens one.
            left = not _changed.wait_for(lambda: not _opening, TIMEOUT_SECONDS)
            links = list(_noted)
        for link in links:  # all of them, before this waits for the first
            link.begin()
        for link in links:
            left |= not _end(link, until)
        for thread in left_in_libraries():  # those of the links that were closed just now, and of any backend before
            thread.join(max(0.5, until - time.monotonic()))
            if thread.is_alive():
                left = True
                log.warning("the process ends while the thread %s is in a library", thread.name)
    except BaseException:  # an interrupt: somebody wants the process to end at once
        left = True
        raise
    finally:
        if left:
            _leave_threads()


def _end(link: AtExit, until: float) -> bool:
    try:
        return link.end(max(0.5, until - time.monotonic()))
    except Exception:
        log.exception("a link was not closed at the exit")
        return False


def _leave_threads() -> None:
    """Let the process exit with its status although threads are in libraries. They end with the process.

    A thread that comes back from a C++ library meanwhile waits instead of aborting the process. The exit does not run
    what C and C++ libraries have registered for it, because their threads may use what that would destroy.
    """
    libc = ctypes.CDLL(None)

    def address(name: str) -> ctypes.c_void_p:
        return ctypes.cast(getattr(libc, name), ctypes.c_void_p)

    with contextlib.suppress(AttributeError):  # other libraries than glibc do not have all of these
        libc.on_exit(address("_exit"), None)  # called with the exit status, as the last: it ends the process
        libc.on_exit(address("fcloseall"), None)  # called before that: it writes what C code has printed
    with contextlib.suppress(OSError, AttributeError):  # no library of this process is written in C++
        loaded = ctypes.CDLL("libstdc++.so.6", mode=os.RTLD_NOLOAD)
        loaded._ZSt13set_terminatePFvvE(address("pause"))


def _start_anew() -> None:
    """In a forked child, where only the thread that forked runs, and which has none of the parent's links."""
    global _changed, _opening, _noted
    _changed, _opening, _noted = threading.Condition(), 0, []


os.register_at_fork(after_in_child=_start_anew)
atexit.register(_close_all)
