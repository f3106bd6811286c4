"""What a backend leaves in its process: threads in a library, and sockets that forked children would have."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import threading

__all__ = ["HasDescriptor", "close_in_children", "leave_in_library", "left_in_libraries"]

_threads: list[threading.Thread] = []


class HasDescriptor(Protocol):
    """A socket, or what stands for it."""

    def fileno(self) -> int:
        """Its descriptor; below zero once it is closed."""


_sockets: weakref.WeakSet[HasDescriptor] = weakref.WeakSet()


def close_in_children(socket: HasDescriptor) -> None:
    """Close a socket in each child that is forked from this process. Any thread; never blocks.

    A forked child has its parent's sockets. As long as one process has a socket that listens, its port is in use, and
    the system takes connections for it. So without this, a child that outlives its parent would keep the parent from
    being started again at the same port, and peers would connect to nobody. As long as one process has a connection,
    the other side does not see its end.

    The parent's socket is not changed, and the caller closes it as before. In the child, its number belongs to
    ``/dev/null``: whoever closes that number there, such as a library that does not know of the fork, closes nothing
    else.

    Args:
        socket: The socket. It is not kept alive.
    """
    _sockets.add(socket)


def _close_all() -> None:
    # The child has only the thread that forked, so that nothing else uses the set.
    sockets = [each for each in list(_sockets) if each.fileno() >= 0]
    _sockets.clear()
    if sockets:
        try:
            nothing = os.open(os.devnull, os.O_RDWR)
        except OSError:  # the process has no descriptor left
            os.close(sockets[0].fileno())
            nothing = os.open(os.devnull, os.O_RDWR)
        for each in sockets:
            os.dup2(nothing, each.fileno(), inheritable=False)
        os.close(nothing)


os.register_at_fork(after_in_child=_close_all)


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
