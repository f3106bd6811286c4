"""Tells prefill that decode gave up requests for which it never had memory. While the link is suspended, this waits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from statelink.errors import StatelinkError

if TYPE_CHECKING:
    from statelink import Link

__all__ = ["Declines"]


class _Decline(NamedTuple):
    room: int
    addresses: Sequence[str]
    why: str


class Declines:
    """Declines rooms at prefill. Keeps them while the link is suspended. Does not block. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held while a room is declined, so that the link is not suspended at the same time."""
        self._kept: list[_Decline] | None = None
        """Rooms that wait for the link to resume; ``None`` while it is not suspended."""

    def keep(self) -> None:
        """The link is about to be suspended: keep rooms from now on."""
        with self._lock:
            self._kept = self._kept or []

    def send(self, link: Link) -> None:
        """The link has resumed: decline the rooms that were kept."""
        with self._lock:
            kept, self._kept = self._kept or [], None
            for each in kept:
                _tell(link, each)

    def decline(self, link: Link, room: int, addresses: Sequence[str], why: str) -> None:
        """Tell a prefill instance that decode gives up a request of that instance."""
        with self._lock:
            if self._kept is None:
                _tell(link, _Decline(room, addresses, why))
            else:
                self._kept.append(_Decline(room, addresses, why))


def _tell(link: Link, declined: _Decline) -> None:
    # If the id is not valid, or an earlier use of it has not ended, prefill has no room of this request either.
    with contextlib.suppress(StatelinkError):
        link.decline(*declined)
