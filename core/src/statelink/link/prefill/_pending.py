"""Requests that no room of prefill has taken: it is not open, or not every rank of their instance has asked for it."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from statelink.link._header import RoomKey
    from statelink.wire import Request

__all__ = ["Asked", "PendingRequests", "key_of"]


class Asked(NamedTuple):
    """A request.

    Attributes:
        request: What was asked.
        at: When it came.
    """

    request: Request
    at: float


def key_of(request: Request) -> RoomKey:
    """The room and the attempt that a request is about."""
    return request.room, request.attempt


OF_A_REQUEST, OF_AN_ENTRY = 1024, 256
"""Bytes of memory that a request takes, and each name in it, beside what it carries."""


class PendingRequests:
    """Keeps requests by room, attempt and who asked. Belongs to the control thread.

    When there are too many, the oldest requests of the peer that has the most bytes here are dropped: a peer that asks
    for much does not push out what others asked for.

    Args:
        most: Most requests.
        nbytes: Most bytes of memory that the requests take together, about.
    """

    def __init__(self, most: int, nbytes: int) -> None:
        self._most = most
        self._limit = nbytes
        self._rooms: dict[int, dict[int, dict[str, Asked]]] = {}
        self._of_peer: dict[str, OrderedDict[RoomKey, int]] = {}
        self._held: dict[str, int] = {}
        self._count = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return self._count

    def put(self, peer: str, request: Request, at: float = 0.0) -> list[tuple[str, Request]]:
        """Keep a request, in place of an earlier one of the same peer; returns those that were dropped for it."""
        key, size = key_of(request), _size(request)
        self.drop(key, peer)
        self._rooms.setdefault(key[0], {}).setdefault(key[1], {})[peer] = Asked(request, at)
        self._of_peer.setdefault(peer, OrderedDict())[key] = size
        self._held[peer] = self._held.get(peer, 0) + size
        self.nbytes += size
        self._count += 1
        dropped: list[tuple[str, Request]] = []
        while self._count > self._most or self.nbytes > self._limit:
            largest = max(self._held, key=self._held.__getitem__)
            gone = self.drop(next(iter(self._of_peer[largest])), largest)
            if gone is not None:
                dropped.append((largest, gone))
        return dropped

    def get(self, key: RoomKey, peer: str) -> Request | None:
        """What a peer asked of a room."""
        asked = self.of(key).get(peer)
        return asked.request if asked is not None else None

    def of(self, key: RoomKey) -> dict[str, Asked]:
        """What was asked of a room, by who asked; not to be changed."""
        return self._rooms.get(key[0], {}).get(key[1], {})

    def attempts(self, room: int) -> list[int]:
        """Attempts of a room that were asked for."""
        return list(self._rooms.get(room, ()))

    def drop(self, key: RoomKey, peer: str) -> Request | None:
        """Take out what a peer asked of a room."""
        attempts = self._rooms.get(key[0], {})
        asked = attempts.get(key[1], {}).pop(peer, None)
        if asked is None:
            return None
        if not attempts[key[1]]:
            del attempts[key[1]]
        if not attempts:
            del self._rooms[key[0]]
        size = self._of_peer[peer].pop(key)
        self._held[peer] -= size
        self.nbytes -= size
        self._count -= 1
        if not self._of_peer[peer]:
            del self._of_peer[peer], self._held[peer]
        return asked.request

    def forget(self, peer: str) -> None:
        """Drop everything that a peer asked."""
        for key in list(self._of_peer.get(peer, ())):
            self.drop(key, peer)


def _size(request: Request) -> int:
    names = [*request.items, *request.prepared, *request.elsewhere]
    carried = sum(len(each.ids) for each in request.items.values()) + sum(map(len, request.prepared.values()))
    return OF_A_REQUEST + OF_AN_ENTRY * (len(names) + len(request.unmet)) + sum(map(len, names)) + carried
