"""Wakes the control thread, which waits for descriptors."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from functools import partial

from statelink._holding import into

__all__ = ["Bell"]

WIDTH = 8
"""Bytes of an eventfd's counter, which are written and read at once."""
ONE = (1).to_bytes(WIDTH, sys.byteorder)

# These calls keep the interpreter's lock (GIL). A call that releases it may wait up to 5 ms for it while another thread
# computes.
_write, _read = (getattr(ctypes.PyDLL(None), name) for name in ("write", "read"))
for _call in (_write, _read):
    _call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
    _call.restype = ctypes.c_ssize_t


class Bell:
    """A descriptor that is readable from a ring on, until the thread that waits for it silences it. Never blocks.

    Attributes:
        rung: Whether it was rung since `silence` was called last.
    """

    def __init__(self) -> None:
        made: list[int] = []
        self._end = weakref.finalize(self, _close_all, made)
        """Closes the descriptor, once, also if the opening of a link fails and nobody calls `close`."""
        self._end.atexit = False
        into(made, partial(os.eventfd, 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._descriptor = made[0]
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


def _close_all(descriptors: list[int]) -> None:
    for each in descriptors:
        os.close(each)
