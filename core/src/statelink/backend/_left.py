"""Threads that a closed backend has left in its library."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading

__all__ = ["leave_in_library", "left_in_libraries"]

_threads: list[threading.Thread] = []


def leave_in_library(thread: threading.Thread) -> None:
    """Note a daemon thread that may still be in a call of a library when its backend has been closed. Any thread.

    When the interpreter ends, it stops such a thread as it comes back from the library, which aborts the process if the
    library is written in C++. So the exit of the process waits a few seconds for the thread. If the thread does not
    end, the exit says its name, and ends the process without what libraries would do at its end.

    Args:
        thread: The thread, which was started. It is kept until it has ended.
    """
    _threads[:] = [*left_in_libraries(), thread]


def left_in_libraries() -> list[threading.Thread]:
    """The threads that have not ended. Any thread."""
    return [thread for thread in list(_threads) if thread.is_alive()]
