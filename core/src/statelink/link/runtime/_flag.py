"""A flag that threads can wait for, and that costs little while none does."""

from __future__ import annotations

import threading

__all__ = ["Flag"]


class Flag:
    """As `threading.Event`, but the lock behind it is made only when a thread waits. Each room has several of them.

    Safe to use from any thread, but only one thread at a time may call `set` or `clear`.

    Args:
        raised: Whether it is set at first.
    """

    __slots__ = ("_event", "_raised")

    def __init__(self, raised: bool = False) -> None:
        self._raised = raised
        self._event: threading.Event | None = None

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._raised

    def set(self) -> None:
        """Set it, and wake every thread that waits."""
        self._raised = True  # before the event is read: who waits makes the event first, and looks at this after that
        event = self._event
        if event is not None:
            event.set()

    def clear(self) -> None:
        """Clear it."""
        self._raised = False
        event = self._event
        if event is not None:
            event.clear()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is set, or for ``timeout`` seconds. Returns whether it is set."""
        if not self._raised:
            event = self._event or self._made()
            if not self.is_set():  # another thread may have set it just now, without the event
                event.wait(timeout)
        return self.is_set()

    def _made(self) -> threading.Event:
        with _making:
            if self._event is None:
                self._event = threading.Event()
            return self._event


_making = threading.Lock()
"""Lets two threads that wait for one flag agree on its event."""
