"""The connections of this side's backend, made and ended in order with all that is asked of it of a peer."""

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
    """One connection to a peer, for as long as anybody here counts on it.

    Attributes:
        handshake: The peer's.
        made: Whether the backend reaches the peer. Jobs with the peer's key change it; any thread reads it.
    """

    __slots__ = ("_users", "handshake", "made")

    def __init__(self, handshake: Handshake) -> None:
        self.handshake = handshake
        self.made = False
        self._users = 0

    def join(self) -> None:
        """One more counts on it. Control thread."""
        self._users += 1

    def leave(self) -> bool:
        """One less counts on it; whether nobody does any more. Control thread."""
        self._users -= 1
        return not self._users

    def note(self, made: bool) -> None:
        """Whether the backend reaches the peer. For jobs with the peer's key."""
        self.made = made


class Connections:
    """Tells the backend which peers to connect to, and which to forget.

    A link has one of these: both of its roles may count on one connection to a peer. All calls about one peer, moves
    included, are jobs of one key, so that a late call is never taken for the next connection's. Belongs to the control
    thread, except for `make`.

    Args:
        backend: The backend.
        workers: Run its calls.
        explained: Adds to an error about memory which setting of its allocator may be the cause.
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
        """Per peer, the connection that the backend was last asked for. Each belongs to jobs with the peer's key."""

    def join(self, handshake: Handshake) -> Connection:
        """The connection to a peer, which one more counts on. It is made by `make`, in a job that is submitted next."""
        connection = self._wanted.get(handshake.link)
        if connection is None:
            connection = self._wanted[handshake.link] = Connection(handshake)
        connection.join()
        return connection

    def make(self, connection: Connection) -> None:
        """Connect, unless that was done. Blocks; for a job with the peer's key.

        Raises:
            StatelinkError: What the backend says. Where its library registers memory no earlier, and refuses it, with
                the setting that may be the cause.
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
        connection.note(made=True)

    def leave(self, connection: Connection) -> None:
        """One less counts on it; after the last one, the backend forgets the peer."""
        name = connection.handshake.link
        if connection.leave():
            del self._wanted[name]
            self._workers.setups.submit(("peer", name), partial(self._end, connection))

    def _end(self, connection: Connection) -> None:
        """Forget the peer, if the backend has this connection to it. A job with the peer's key."""
        connection.note(made=False)
        name = connection.handshake.link
        if self._tried.get(name) is connection:  # also one that failed: some of it may have been made
            del self._tried[name]
            self._backend.disconnect(name)
