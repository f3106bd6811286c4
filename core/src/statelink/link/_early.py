"""Requests that came before prefill's engine opened their rooms."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statelink.wire import Request

__all__ = ["Early"]


OF_A_REQUEST, OF_AN_ENTRY = 1024, 256
"""Bytes of memory that a request takes, and each name in it, beside what it carries."""


class Early:
    """Keeps requests by room and by who asked. Where there are too many, the peer with the most bytes gives way.

    Args:
        most: Most requests.
        nbytes: Most bytes of memory that the requests take together, about.
    """

    def __init__(self, most: int, nbytes: int) -> None:
        self._most = most
        self._limit = nbytes
        self._rooms: dict[int, dict[str, Request]] = {}
        self._peers: dict[str, OrderedDict[int, int]] = {}  # rooms and sizes of what each asked, the oldest first
        self._held: Counter[str] = Counter()
        self._count = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._rooms)

    def put(self, peer: str, request: Request) -> list[tuple[str, Request]]:
        """Keep a request, in place of an earlier one of the same peer; what had to give way for it."""
        self._drop(peer, request.room)
        size = _size(request)
        self._rooms.setdefault(request.room, {})[peer] = request
        self._peers.setdefault(peer, OrderedDict())[request.room] = size
        self._count += 1
        self._held[peer] += size
        self.nbytes += size
        dropped: list[tuple[str, Request]] = []
        while self._count > self._most or self.nbytes > self._limit:
            who = max(self._held, key=self._held.__getitem__)
            gone = self._drop(who, next(iter(self._peers[who])))
            dropped += [(who, gone)] if gone is not None else []
        return dropped

    def _drop(self, peer: str, room: int) -> Request | None:
        asked = self._rooms.get(room, {})
        gone = asked.pop(peer, None)
        if gone is None:
            return None
        if not asked:
            del self._rooms[room]
        size = self._peers[peer].pop(room)
        self._count -= 1
        self._held[peer] -= size
        self.nbytes -= size
        if not self._peers[peer]:
            del self._peers[peer], self._held[peer]
        return gone

    def get(self, room: int, peer: str) -> Request | None:
        """What a peer asked of a room."""
        return self._rooms.get(room, {}).get(peer)

    def take(self, room: int) -> dict[str, Request]:
        """Take out what was asked of a room, by who asked."""
        found = dict(self._rooms.get(room, {}))
        for peer in found:
            self._drop(peer, room)
        return found

    def forget(self, peer: str) -> None:
        """Drop everything that a peer asked."""
        for room in list(self._peers.get(peer, ())):
            self._drop(peer, room)


def _size(request: Request) -> int:
    names = [*request.items, *request.prepared, *request.elsewhere]
    carried = sum(len(each.ids) for each in request.items.values()) + sum(map(len, request.prepared.values()))
    return OF_A_REQUEST + OF_AN_ENTRY * len(names) + sum(map(len, names)) + carried
