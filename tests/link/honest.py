"""Honest rooms in a worker process, and how late everything comes while others do what they like to its port.

Two links open the same rooms at the same moments, told by the clock of the machine: requests that end well, and rooms
whose other side never comes, which have to fail at their deadline.
"""

from __future__ import annotations

import collections
import math
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import statelink
from statelink import Status

if TYPE_CHECKING:
    import numpy as np
    from tests.helpers.worker import Host

__all__ = ["DEADLINE", "FIRST", "PERIOD", "TOKENS", "Found", "begin", "end", "stop"]

PERIOD = 0.02
"""Seconds between two requests, and between two rooms that nobody serves."""
DEADLINE = 0.5
"""Seconds that a room has that nobody serves."""
PATIENCE = 30.0
"""Seconds that a request has."""
TOKENS = 16
"""Of a request: one page."""
FIRST = 1_000_000
"""Id of the first request; that of the first room that nobody serves is as far away again."""
LONELY = {"prefill": 2 * FIRST, "decode": 3 * FIRST}
POISON = 0


@dataclass
class Found:
    """What one side saw.

    Attributes:
        late: Moments at which a deadline was due, and by how many seconds it came later than that.
        took: Moments at which a request was due to begin, and the seconds that it took from then on.
        failed: Reasons of requests that failed, and of rooms that failed otherwise than at their deadline.
        wrong: Requests that succeeded without their bytes.
        open: Rooms that had not ended when nobody waited any more.
    """

    late: list[tuple[float, float]] = field(default_factory=list)
    took: list[tuple[float, float]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong: int = 0
    open: int = 0


class Honest:
    """One side, on a thread of its own.

    Args:
        link: Its link.
        pages: Its pages, uint8.
        peer: Where decode dials prefill.
        start: When the first rooms are due, on the machine's clock.
    """

    def __init__(self, link: statelink.Link, pages: list[np.ndarray[Any, Any]], peer: str, start: float) -> None:
        self._link, self._pages, self._peer, self._start = link, pages, peer, start
        self._role = link.inventory.instance
        self._free = collections.deque(range(len(pages[0])))
        self._open: dict[int, tuple[statelink.Room, int, float]] = {}
        self._found = Found()
        self._stop = threading.Event()
        self._last = math.inf
        self._thread = threading.Thread(target=self._run, name="honest", daemon=True)
        self._thread.start()

    def end(self, last: float) -> None:
        """Open no more rooms than are due at a moment."""
        self._last = last

    def found(self) -> Found:
        """Wait for the rooms that are open."""
        self._thread.join(PATIENCE + 10)
        return self._found

    def _run(self) -> None:
        number = 0
        while True:
            due = self._start + number * PERIOD
            if due > self._last:
                if not self._open:
                    return
                if time.monotonic() > self._last + PATIENCE:
                    self._found.open = len(self._open)
                    return
            elif time.monotonic() >= due and len(self._free) >= 2:
                self._begin(number, due)
                number += 1
            for room in self._link.changes(0.002):
                self._changed(room, time.monotonic())

    def _begin(self, number: int, due: float) -> None:
        """A request that both sides open, and a room that this side alone opens."""
        request, lonely = FIRST + number, LONELY[self._role] + number
        page, other = self._free.popleft(), self._free.popleft()
        if self._role == "prefill":
            for each in self._pages:
                each[page] = tag_of(number)
            sending = self._link.send(request, TOKENS, deadline=PATIENCE)
            sending.push({"kv": [page]})
            self._open[request] = sending, page, due
            self._open[lonely] = self._link.send(lonely, TOKENS, deadline=DEADLINE), other, time.monotonic()
            return
        for each in self._pages:
            each[page] = POISON
        receiving = self._link.receive(request, self._peer, TOKENS, {"kv": [page]}, deadline=PATIENCE)
        self._open[request] = receiving, page, due
        opened = time.monotonic()
        alone = self._link.receive(lonely, self._peer, TOKENS, {"kv": [other]}, deadline=DEADLINE)
        self._open[lonely] = alone, other, opened

    def _changed(self, room: statelink.Room, now: float) -> None:
        if room.room not in self._open or room.status not in (Status.SUCCEEDED, Status.FAILED):
            return
        known, page, since = self._open[room.room]
        lonely = room.room >= 2 * FIRST
        if since >= 0:  # it has ended, and is told of for the first time
            self._open[room.room] = known, page, -1.0
            if lonely:
                self._found.late.append((since + DEADLINE, now - since - DEADLINE))
            else:
                self._found.took.append((since, now - since))
            if room.reason is not None and not (lonely and room.reason.code == "room.deadline"):
                self._found.failed.append(str(room.reason))
            if room.status is Status.SUCCEEDED and self._role == "decode":
                tag = tag_of(room.room - FIRST)
                self._found.wrong += lonely or not all((each[page] == tag).all() for each in self._pages)
        if room.quiesced:
            del self._open[room.room]
            self._free.append(page)


def tag_of(number: int) -> int:
    return 1 + number % 255


_honest: dict[str, Honest] = {}


def begin(host: Host, key: str, peer: str, start: float) -> None:
    """Begin on a link."""
    pages = list(host.memories[key].arrays["kv"].values())
    _honest[key] = Honest(host.links[key], pages, peer, start)


def stop(host: Host, key: str, last: float) -> None:
    """Open no more rooms than are due at a moment."""
    _honest[key].end(last)


def end(host: Host, key: str) -> Found:
    """What a link saw, once its rooms have ended."""
    return _honest.pop(key).found()
