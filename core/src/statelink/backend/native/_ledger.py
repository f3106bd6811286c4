"""Keeps the transfers of a library that cannot cancel until they have ended, and a peer until its last one has.

Also the base class of backends that keep such a ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from statelink.backend._interface import UNKNOWN, Backend, Transfer
from statelink.errors import TransferError

if TYPE_CHECKING:
    import threading

    from statelink.plan import RegionTable

__all__ = ["Ledger", "Posted", "PostingBackend", "Remote"]


class Remote:
    """A peer. A backend subclasses it to add what its library needs to know.

    Attributes:
        name: The name of its link.
        table: Its region table.
        lost: Why its connection is dead, for a library that does not repair connections; empty while it works.
        leaving: Whether it was disconnected, and only waits for its last transfer.
        transport: The transport that carries its bytes, as in `Transports`.
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
    """A batch, and the library's handles for it that have not ended.

    Attributes:
        peer: The peer to or from which its bytes go.
        handles: The library's handles for its parts. The backend adds them.
    """

    __slots__ = ("handles", "peer")

    def __init__(self, peer: RemoteT) -> None:
        super().__init__()
        self.peer = peer
        self.handles: list[Any] = []

    def ended(self) -> None:
        """All handles have ended: the batch succeeds, unless it has failed or its peer was disconnected."""
        if self.outcome is None and self.peer.leaving:
            self.fail("the peer was disconnected while the transfer was in progress", settled=True)
        elif self.outcome is None:
            self.succeed()


class Ledger(Generic[RemoteT]):
    """The peers of a backend, and the transfers to them. Not thread-safe: call it under one lock. Never blocks.

    Args:
        backend: Name of the backend, for messages.
        ended: Tells whether a handle of a transfer has ended. If the handle failed, it fails the transfer.
        forget: Makes the library forget a peer without transfers.

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
        """The peer of that name, in any state."""
        return self._peers.get(peer)

    def peers(self) -> list[RemoteT]:
        """All peers, in any state."""
        return list(self._peers.values())

    def usable(self, peer: str) -> RemoteT:
        """The peer of that name, if something can be posted to it.

        Raises:
            TransferError: The peer is not connected, or it is lost.
        """
        known = self._peers.get(peer)
        if known is None or known.leaving:
            raise TransferError("the peer is not connected", backend=self._backend, peer=peer)
        if known.lost:
            raise TransferError("the peer is lost", cause=known.lost, backend=self._backend, peer=peer)
        return known

    def make_room(self, peer: str) -> None:
        """Forget an earlier connection to a peer, so that a new one can be made.

        Raises:
            TransferError: A transfer over the earlier connection has not ended.
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
        """Add a peer."""
        self._peers[remote.name] = remote

    def remove(self, remote: RemoteT) -> None:
        """Forget a peer at once."""
        del self._peers[remote.name]
        self._forget(remote)

    def leave(self, peer: str) -> None:
        """Forget a peer once its last transfer has ended. Transfers that have already ended succeed."""
        self.sweep()
        known = self._peers.get(peer)
        if known is not None:
            known.leaving = True
            self.sweep()

    def sweep(self) -> None:
        """Find transfers that have ended, and forget peers that left and have no transfers."""
        for work in list(self.posted):
            for handle in list(work.handles):
                if self._ended(work, handle):  # removed before the next one is asked, because that may raise
                    work.handles.remove(handle)
            if not work.handles:
                work.ended()
                self.posted.remove(work)
        for known in [known for known in self._peers.values() if known.leaving and not self._busy(known)]:
            self.remove(known)

    def close(self) -> tuple[list[Any], list[RemoteT]]:
        """Fail all transfers that have not ended, and forget all peers. Return the open handles and the peers."""
        self.sweep()
        works, self.posted = self.posted, []
        peers, self._peers = self.peers(), {}
        for work in works:
            if work.outcome is None:
                work.fail("the backend was closed while the transfer was in progress", settled=False)
        return [handle for work in works for handle in work.handles], peers

    def _busy(self, known: RemoteT) -> bool:
        return any(work.peer is known for work in self.posted)


class PostingBackend(Backend, Generic[RemoteT]):
    """Base of a backend whose transfers go on after ``submit``. It makes every call to its library under one lock.

    Attributes:
        _lock: That lock. Nothing waits for a transfer under it.
        _ledger: Peers, and transfers to them. Its methods are called under the lock.
    """

    _lock: threading.Lock
    _ledger: Ledger[RemoteT]

    def transport(self, peer: str) -> str:
        """The transport that was found when the peer was connected."""
        known = self._ledger.get(peer)
        return known.transport if known is not None else UNKNOWN

    def poll(self, transfers: Sequence[Transfer]) -> None:
        """Look at all transfers.

        Does nothing if another thread is in the library, because that one looks at the end.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._lock.release()

    def disconnect(self, peer: str) -> None:
        """Forget a peer once its last transfer has ended.

        Its transfers fail when the library ends them. Only then is it known that their bytes have stopped.
        """
        with self._lock:
            self._ledger.leave(peer)

    def _sweep(self) -> None:
        """Find transfers that have ended. The caller holds the lock."""
        self._ledger.sweep()
