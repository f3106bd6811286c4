"""For backends that hear of the ends of transfers at file descriptors: they need no thread to wait for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

__all__ = ["EventDriven", "EventLoop"]


class EventLoop(Protocol):
    """The control thread of a link, which waits for file descriptors beside its messages. Thread-safe; never blocks."""

    def add_reader(self, descriptor: int, ready: Callable[[], object]) -> None:
        """Call ``ready`` on the control thread whenever something new can be read from a descriptor.

        It is called once for what has come, not again for what was left unread (``EPOLLET``). So it reads until nothing
        is left, or has another thread do so.

        Args:
            descriptor: A socket, a pipe, an ``eventfd`` or whatever else ``epoll`` takes. The backend owns it, and
                calls `remove_reader` before it closes it.
            ready: Must not block. It may also be called without a cause. What it raises is logged.

        Raises:
            OSError: The descriptor cannot be watched.
        """

    def remove_reader(self, descriptor: int) -> None:
        """Watch a descriptor no longer; does nothing if it is not watched. A call of ``ready`` may still run."""


@runtime_checkable
class EventDriven(Protocol):
    """Implemented by a backend that can have the control thread wait for its descriptors.

    That saves a change of threads for each transfer. Beside an engine that computes, it also saves up to 5 ms, because
    a thread of the backend would wait for the interpreter, and the control thread after it.
    """

    def use_loop(self, loop: EventLoop) -> None:
        """Take the control thread of the link. Called once, before ``connect``. Nobody calls it without a link."""
