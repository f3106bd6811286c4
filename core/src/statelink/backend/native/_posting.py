"""What backends with a ledger of their transfers do alike, whatever their library."""

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
    """Base of a backend whose transfers go on after ``submit``: every call into its library is made under one lock.

    Attributes:
        _lock: That lock. Nothing waits for a transfer under it.
        _ledger: Peers, and what is posted to them; its methods are called under the lock.
    """

    _lock: threading.Lock
    _ledger: Ledger[RemoteT]

    def transport(self, peer: str) -> str:
        """What was found when the peer was connected."""
        known = self._ledger.get(peer)
        return known.transport if known is not None else UNKNOWN

    def poll(self, transfers: Sequence[Transfer]) -> None:
        """Look at all that is posted, unless another thread is in the library: it looks before it leaves."""
        if self._lock.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._lock.release()

    def disconnect(self, peer: str) -> None:
        """Forget a peer, once nothing is posted to it any more.

        Its transfers fail when the library ends them: then, and not before, their memory is known to be quiet.
        """
        with self._lock:
            self._ledger.leave(peer)

    def _sweep(self) -> None:
        """See what ended. Called with the lock held."""
        self._ledger.sweep()
