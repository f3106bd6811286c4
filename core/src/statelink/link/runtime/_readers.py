"""The descriptors that wake the control thread: its bell, and those of a backend."""

from __future__ import annotations

import ctypes
import platform
import select
import threading
from collections.abc import Callable, Iterator
from typing import Final

__all__ = ["Readers"]

MOST_DESCRIPTORS: Final = 64
"""Most descriptors that are taken at once; the others are taken the next time."""


class _Event(ctypes.Structure):
    """``struct epoll_event``, which has no padding on x86-64."""

    if platform.machine() == "x86_64":
        _pack_ = 1
    _fields_ = (("events", ctypes.c_uint32), ("descriptor", ctypes.c_int32), ("unused", ctypes.c_uint32))


# This call keeps the interpreter's lock (GIL). A call that releases it may wait up to 5 ms for it while another thread
# computes.
_wait = ctypes.PyDLL(None).epoll_wait
_wait.argtypes = (ctypes.c_int, ctypes.POINTER(_Event), ctypes.c_int, ctypes.c_int)
_wait.restype = ctypes.c_int


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
        found = _wait(self._epoll.fileno(), self._events, MOST_DESCRIPTORS, 0)
        for event in self._events[: max(0, found)]:
            ready = self._ready.get(event.descriptor)
            if ready is not None:
                yield ready

    def close(self) -> None:
        """Watch nothing any more. Control thread."""
        with self._lock:
            self._ready.clear()
            self._epoll.close()
