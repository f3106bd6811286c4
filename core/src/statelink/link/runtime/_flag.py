"""A flag that threads can wait for, and that costs little while none does."""

from __future__ import annotations

import threading

import msgspec

__all__ = ["Flag"]


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
