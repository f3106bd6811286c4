"""Transfers of a library that cannot cancel: kept until they ended, and their peers until the last one did."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from statelink.backend._interface import UNKNOWN, Transfer
from statelink.errors import TransferError

if TYPE_CHECKING:
    from statelink.backend._regions import RegionTable

__all__ = ["Ledger", "Posted", "Remote"]


class Remote:
    """A peer. A backend subclasses it for what its library needs to know of one.

    Attributes:
        name: The name of its link.
        table: Its region table.
        lost: Why its connection is dead, where the library repairs none; empty as long as it is not.
        leaving: Whether it was disconnected, and only waits for its last transfer.
        transport: The word for what carries its bytes, as in `Transports`.
    """

    __slots__ = ("leaving", "lost", "name", "table", "transport")

    def __init__(self, name: str, table: RegionTable, transport: str = UNKNOWN) -> None:
        self.name = name
        self.table = table
        self.transport = transport
        self.lost = ""
        self.leaving = False


RemoteT = TypeVar("RemoteT", bound=Remote)


class Posted(Transfer, Generic[RemoteT]):
    """A batch, and those of the library's handles for it that have not ended.

    Attributes:
        peer: To whom or from whom it goes.
        handles: What the library calls its parts; a backend adds them.
    """

    __slots__ = ("handles", "peer")

    def __init__(self, peer: RemoteT) -> None:
        super().__init__()
        self.peer = peer
        self.handles: list[Any] = []

    def ended(self) -> None:
        """Nothing of it is in progress any more: it succeeded, unless it has failed or its peer was disconnected."""
        if self.outcome is None and self.peer.leaving:
            self.fail("the peer was disconnected while the transfer was in progress", settled=True)
        elif self.outcome is None:
            self.succeed()


class Ledger(Generic[RemoteT]):
    """The peers of a backend, and what is posted to them. Not thread-safe, never blocks: call it under one lock.

    Args:
        backend: Name of the backend, for messages.
        ended: Whether a handle of a transfer has ended; it fails the transfer where the handle failed.
        forget: Makes the library forget a peer to which nothing is posted any more.

    Attributes:
        posted: Transfers with handles that have not ended.
    """

    def __init__(
        self, backend: str, ended: Callable[[Posted[RemoteT], Any], bool], forget: Callable[[RemoteT], None]
    ) -> None:
        self.posted: list[Posted[RemoteT]] = []
        self._backend = backend
        self._ended = ended
        self._forget = forget
        self._peers: dict[str, RemoteT] = {}

    def get(self, peer: str) -> RemoteT | None:
        """A peer, whatever its state."""
        return self._peers.get(peer)

    def usable(self, peer: str) -> RemoteT:
        """A peer to which something can be posted.

        Raises:
            TransferError: It is not connected, or lost.
        """
        known = self._peers.get(peer)
        if known is None or known.leaving:
            raise TransferError("the peer is not connected", backend=self._backend, peer=peer)
        if known.lost:
            raise TransferError("the peer is lost", cause=known.lost, backend=self._backend, peer=peer)
        return known

    def make_room(self, peer: str) -> None:
        """Forget an earlier connection to a peer.

        Raises:
            TransferError: Something that was posted over it has not ended.
        """
        self.sweep()
        known = self._peers.get(peer)
        if known is None:
            return
        if self._busy(known):
            raise TransferError(
                "a peer cannot be connected again",
                cause="transfers of its earlier connection have not ended",
                hint="try again once it answers or has died",
                backend=self._backend,
                peer=peer,
            )
        self.remove(known)

    def add(self, remote: RemoteT) -> None:
        """Know a peer from now on."""
        self._peers[remote.name] = remote

    def remove(self, remote: RemoteT) -> None:
        """Forget a peer at once."""
        del self._peers[remote.name]
        self._forget(remote)

    def leave(self, peer: str) -> None:
        """Forget a peer once nothing is posted to it any more. What ended before this succeeded."""
        self.sweep()
        known = self._peers.get(peer)
        if known is not None:
            known.leaving = True
            self.sweep()

    def sweep(self) -> None:
        """See what ended, and forget what nothing holds any more."""
        for work in list(self.posted):
            for handle in list(work.handles):
                if self._ended(work, handle):  # gone at once: the library may raise for the next one
                    work.handles.remove(handle)
            if not work.handles:
                work.ended()
                self.posted.remove(work)
        for known in [known for known in self._peers.values() if known.leaving and not self._busy(known)]:
            self.remove(known)

    def close(self) -> tuple[list[Any], list[RemoteT]]:
        """Fail what has not ended, and know nobody any more: the handles that are left, and the peers."""
        self.sweep()
        works, self.posted = self.posted, []
        peers, self._peers = list(self._peers.values()), {}
        for work in works:
            if work.outcome is None:
                work.fail("the backend was closed while the transfer was in progress", settled=False)
        return [handle for work in works for handle in work.handles], peers

    def _busy(self, known: RemoteT) -> bool:
        return any(work.peer is known for work in self.posted)
