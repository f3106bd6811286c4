"""The connections of this side's backend. All calls of the backend about one peer are jobs of one key, in order."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from statelink.errors import TransferError

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

    from statelink.backend import Backend
    from statelink.link.runtime import Workers
    from statelink.wire import Handshake

__all__ = ["Connection", "Connections"]


class Connection:
    """The backend's connection to one peer. It counts its users, which are this link's roles.

    Attributes:
        handshake: The peer's handshake.
        made: Whether the backend reaches the peer. Jobs with the peer's key change it; any thread reads it.
    """

    __slots__ = ("_users", "handshake", "made")

    def __init__(self, handshake: Handshake) -> None:
        self.handshake = handshake
        self.made = False
        self._users = 0

    def join(self) -> None:
        """Add a user. Control thread."""
        self._users += 1

    def leave(self) -> bool:
        """Remove a user. Returns whether that was the last one. Control thread."""
        self._users -= 1
        return not self._users


class Connections:
    """Tells the backend which peers to connect to, and which to forget.

    A link has one of these, since both of its roles may use one connection to a peer. All calls about one peer, moves
    included, are jobs of one key: no late call for an ended connection reaches the backend after the next connection
    was made. Belongs to the control thread, except for `make`.

    Args:
        backend: The backend.
        workers: Run the backend's calls.
        explained: A context manager that adds to an error about memory which allocator setting may be the cause.
    """

    def __init__(
        self,
        backend: Backend,
        workers: Workers,
        explained: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._backend = backend
        self._workers = workers
        self._explained = explained
        self._wanted: dict[str, Connection] = {}
        self._tried: dict[str, Connection] = {}
        """Per peer, the connection that the backend was last asked to make. Jobs with the peer's key use its entry."""

    def use(self, backend: Backend) -> None:
        """Call another object of the same backend from now on. While there is no connection."""
        self._backend = backend

    def join(self, handshake: Handshake) -> Connection:
        """Become a user of the connection to a peer. The caller then submits a job that calls `make`."""
        connection = self._wanted.get(handshake.link)
        if connection is None:
            connection = self._wanted[handshake.link] = Connection(handshake)
        connection.join()
        return connection

    def make(self, connection: Connection) -> None:
        """Connect, unless that was done. Blocks; for a job with the peer's key.

        Raises:
            StatelinkError: The backend's error. Some libraries register memory only here: if one refuses the memory,
                the error also names the allocator setting that may be the cause.
        """
        if connection.made:
            return
        handshake = connection.handshake
        self._tried[handshake.link] = connection
        try:
            self._backend.connect(handshake.link, handshake.descriptor, handshake.inventory.regions)
        except TransferError as error:
            if error.reason.code != "backend.memory":
                raise
            with self._explained():
                raise
        connection.made = True

    def leave(self, connection: Connection) -> None:
        """End a use of the connection. After the last use, the backend forgets the peer."""
        name = connection.handshake.link
        if connection.leave():
            del self._wanted[name]
            self._workers.setups.submit(("peer", name), partial(self._end, connection))

    def _end(self, connection: Connection) -> None:
        """Forget the peer, if the backend has this connection to it. A job with the peer's key."""
        connection.made = False
        name = connection.handshake.link
        if self._tried.get(name) is connection:  # also one that failed: parts of it may exist
            del self._tried[name]
            self._backend.disconnect(name)
