"""The connections of this side's backend, made and ended in order with all that is asked of it of a peer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statelink.wire import Handshake

    from ._node import Node

__all__ = ["Connection", "Connections"]


class Connection:
    """One connection to a peer, for as long as somebody here counts on it.

    Attributes:
        card: The peer's.
        users: Who counts on it: one rank may be known under several names or addresses, and the backend sees it once.
        made: Whether the backend reaches the peer. Changed in the peer's line alone; read by any thread.
    """

    __slots__ = ("card", "made", "users")

    def __init__(self, card: Handshake) -> None:
        self.card = card
        self.users = 0
        self.made = False


class Connections:
    """Tells the backend whom to connect to, and whom to forget.

    All calls about one peer, moves included, are in one line, so that a late one is never taken for the next
    connection's. Belongs to the control thread, except for `make`.

    Args:
        node: The link's control thread.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._wanted: dict[str, Connection] = {}
        self._tried: dict[str, Connection] = {}
        """Per peer, the connection that the backend was last asked for. Each belongs to the peer's line."""

    def join(self, card: Handshake) -> Connection:
        """The connection to a peer, which one more counts on. It is made by `make`, in a job that is submitted now."""
        connection = self._wanted.get(card.link)
        if connection is None:
            connection = self._wanted[card.link] = Connection(card)
        connection.users += 1
        return connection

    def make(self, connection: Connection) -> None:
        """Connect, unless that was done. Blocks; for a job in the peer's line.

        Raises:
            StatelinkError: What the backend says.
        """
        if not connection.made:
            self._tried[connection.card.link] = connection
            self._node.connect(connection.card)
            connection.made = True

    def leave(self, connection: Connection) -> None:
        """One less counts on it; after the last one, the backend forgets the peer."""
        connection.users -= 1
        name = connection.card.link
        if not connection.users:
            del self._wanted[name]
            self._node.setup.submit(("peer", name), partial(self._end, connection))

    def _end(self, connection: Connection) -> None:
        """Forget the peer, if it is this connection that the backend has. Runs in the peer's line."""
        connection.made = False
        name = connection.card.link
        if self._tried.get(name) is connection:  # also one that failed: some of it may have been made
            del self._tried[name]
            self._node.backend.disconnect(name)
