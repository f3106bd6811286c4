"""Pending requests: their room is not open here, or not every rank of their instance has asked for it yet."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from statelink.wire import Request

__all__ = ["Asked", "PendingRequests"]


class Asked(NamedTuple):
    """A pending request.

    Attributes:
        request: The message.
        at: When it came.
    """

    request: Request
    at: float


OF_A_REQUEST, OF_AN_ENTRY = 1024, 256
"""Bytes of memory that are counted for each request, and for each name in it, besides the bytes that it carries."""


class PendingRequests:
    """Keeps requests by room and peer. Belongs to the control thread.

    When there are too many, the oldest requests of the peer with the most bytes here are dropped. So a peer that asks
    for much does not displace the requests of others.

    Args:
        most: Most requests.
        nbytes: Most bytes of memory that all requests together take, about.

    Attributes:
        nbytes: Bytes that they take.
    """

    def __init__(self, most: int, nbytes: int) -> None:
        self._most = most
        self._limit = nbytes
        self._rooms: dict[int, dict[str, Asked]] = {}
        self._of_peer: dict[str, OrderedDict[int, int]] = {}
        self._held: dict[str, int] = {}
        self._count = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return self._count

    def put(self, peer: str, request: Request, at: float) -> list[tuple[str, Request]]:
        """Keep a request, in place of an earlier one of the same peer. Returns peers and requests that were dropped."""
        room, size = request.room, _size(request)
        if room in self._rooms:
            self.drop(room, peer)
        self._rooms.setdefault(room, {})[peer] = Asked(request, at)
        self._of_peer.setdefault(peer, OrderedDict())[room] = size
        self._held[peer] = self._held.get(peer, 0) + size
        self.nbytes += size
        self._count += 1
        dropped: list[tuple[str, Request]] = []
        while self._count > self._most or self.nbytes > self._limit:
            largest = max(self._held, key=self._held.__getitem__)
            oldest = self.drop(next(iter(self._of_peer[largest])), largest)
            if oldest is not None:
                dropped.append((largest, oldest))
        return dropped

    def get(self, room: int, peer: str) -> Request | None:
        """A peer's request for a room."""
        asked = self.of(room).get(peer)
        return asked.request if asked is not None else None

    def of(self, room: int) -> dict[str, Asked]:
        """The requests for a room, by peer. The caller must not change the result."""
        return self._rooms.get(room, {})

    def asked_for(self, room: int) -> bool:
        """Whether there is a request for a room. Any thread."""
        return room in self._rooms

    def first(self) -> list[Request]:
        """For each room, the request that came first."""
        return [next(iter(asked.values())).request for asked in self._rooms.values()]

    def rooms(self, most: int) -> list[str]:
        """Some of the rooms for which there are requests, each with the peer that asked last."""
        found = itertools.islice(self._rooms.items(), most)
        return [f"{room} (of {next(reversed(asked))})" for room, asked in found]

    def drop(self, room: int, peer: str) -> Request | None:
        """Drop a peer's request for a room, and return it; ``None`` if there is none."""
        asked = self.of(room).pop(peer, None)
        if asked is None:
            return None
        if not self._rooms[room]:
            del self._rooms[room]
        size = self._of_peer[peer].pop(room)
        self._held[peer] -= size
        self.nbytes -= size
        self._count -= 1
        if not self._of_peer[peer]:
            del self._of_peer[peer], self._held[peer]
        return asked.request

    def take(self, peer: str) -> list[Request]:
        """Drop all requests of a peer, and return them, the oldest first."""
        dropped = [self.drop(room, peer) for room in list(self._of_peer.get(peer, ()))]
        return [request for request in dropped if request is not None]


def _size(request: Request) -> int:
    size = OF_A_REQUEST + OF_AN_ENTRY * len(request.unmet)
    for name, listed in request.items.items():
        size += OF_AN_ENTRY + len(name) + len(listed.ids)
    for name, prepared in request.prepared.items():
        size += OF_AN_ENTRY + len(name) + len(prepared)
    for name in request.elsewhere:
        size += OF_AN_ENTRY + len(name)
    return size
