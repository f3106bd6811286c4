"""Base class of backends that keep a ledger of their transfers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from statelink.backend._interface import UNKNOWN, Backend, Transfer

from ._ledger import Ledger, Remote

if TYPE_CHECKING:
    import threading

__all__ = ["PostingBackend"]

RemoteT = TypeVar("RemoteT", bound=Remote)


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
