"""What decode tells prefill of requests for which it never had memory. While the link is suspended, it has to wait."""

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
    """Declines rooms at prefill, or keeps that until the link is back. Does not block. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held while a room is declined, so that none is declined at a link that goes away meanwhile."""
        self._kept: list[_Decline] | None = None
        """What waits for the link; ``None`` while the link is there."""

    def keep(self) -> None:
        """The link goes away."""
        with self._lock:
            self._kept = self._kept or []

    def send(self, link: Link) -> None:
        """The link is there again: tell prefill what was kept."""
        with self._lock:
            kept, self._kept = self._kept or [], None
            for each in kept:
                _tell(link, each)

    def decline(self, link: Link, room: int, addresses: Sequence[str], why: str) -> None:
        """Tell a prefill instance that a request of its is given up."""
        with self._lock:
            if self._kept is None:
                _tell(link, _Decline(room, addresses, why))
            else:
                self._kept.append(_Decline(room, addresses, why))


def _tell(link: Link, declined: _Decline) -> None:
    # An id that is no room's, or whose earlier use has not ended, has no room of this request on prefill either.
    with contextlib.suppress(StatelinkError):
        link.decline(*declined)
