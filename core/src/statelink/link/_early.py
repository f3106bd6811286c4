"""Requests that came before prefill's engine opened their rooms."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statelink.wire import Request

__all__ = ["Early"]


class Early:
    """Keeps requests by room and by who asked; the oldest rooms give way when there are too many.

    Args:
        most: Most rooms.
        nbytes: Most bytes of what the requests carry, of all rooms together.
    """

    def __init__(self, most: int, nbytes: int) -> None:
        self._most = most
        self._limit = nbytes
        self._rooms: OrderedDict[int, dict[str, Request]] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._rooms)

    def put(self, peer: str, request: Request) -> list[tuple[str, Request]]:
        """Keep a request, in place of an earlier one of the same peer; what had to give way for it."""
        waiting = self._rooms.setdefault(request.room, {})
        known = waiting.get(peer)
        waiting[peer] = request
        self.nbytes += _size(request) - (_size(known) if known else 0)
        dropped: list[tuple[str, Request]] = []
        while len(self._rooms) > self._most or self.nbytes > self._limit:
            dropped += self.take(next(iter(self._rooms))).items()
        return dropped

    def get(self, room: int, peer: str) -> Request | None:
        """What a peer asked of a room."""
        return self._rooms.get(room, {}).get(peer)

    def take(self, room: int) -> dict[str, Request]:
        """Take out what was asked of a room, by who asked."""
        found = self._rooms.pop(room, {})
        self.nbytes -= sum(map(_size, found.values()))
        return found

    def forget(self, peer: str) -> None:
        """Drop everything that a peer asked."""
        for number, requests in list(self._rooms.items()):
            gone = requests.pop(peer, None)
            self.nbytes -= _size(gone) if gone else 0
            if not requests:
                del self._rooms[number]


def _size(request: Request) -> int:
    listed = sum(len(each.ids) for each in request.items.values())
    return listed + sum(map(len, request.prepared.values())) + sum(map(len, request.elsewhere)) + 256
