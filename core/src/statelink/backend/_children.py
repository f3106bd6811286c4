"""Keeps sockets of a process out of the children that are forked from it."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["HasDescriptor", "close_in_children"]


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
