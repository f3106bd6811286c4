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
from typing import TYPE_CHECKING

import statelink
from statelink import Status

if TYPE_CHECKING:
    from tests.helpers.worker import Host

__all__ = ["FIRST", "PERIOD", "Found", "begin", "end"]

PERIOD = 0.02
"""Seconds between two requests, and between two rooms that nobody serves."""
DEADLINE, PATIENCE = 0.5, 30.0
"""Seconds that a room has that nobody serves, and those that a request has."""
TOKENS = 16
"""Of a request: one page."""
FIRST = 1_000_000
"""Id of the first request."""
LONELY = {"prefill": 2 * FIRST, "decode": 3 * FIRST}
"""Id of a side's first room that nobody serves."""


@dataclass
class Found:
    """What one side saw.

    Attributes:
        late: Moments at which a deadline was due, and by how many seconds it came later than that.
        took: Moments at which a request was due to begin, and the seconds that it took from then on.
        failed: Reasons of requests that failed, and of rooms that failed otherwise than at their deadline.
        wrong: Requests that succeeded without their bytes, and rooms that succeeded although nobody served them.
        open: Rooms that had not ended when nobody waited any more.
    """

    late: list[tuple[float, float]] = field(default_factory=list)
    took: list[tuple[float, float]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong: int = 0
    open: int = 0


class Honest(threading.Thread):
    """One side, which opens rooms from ``start`` on, until ``last``, on the machine's clock."""

    def __init__(self, host: Host, key: str, peer: str, start: float) -> None:
        super().__init__(name="honest", daemon=True)
        self._link, self._peer, self._start = host.links[key], peer, start
        self._pages = list(host.memories[key].arrays["kv"].values())
        self._free = collections.deque(range(len(self._pages[0])))
        self._due: dict[int, float] = {}  # when rooms that have not ended were to begin, or to fail
        self._held: dict[int, tuple[statelink.Room, int]] = {}
        self.found = Found()
        self.last = math.inf

    def run(self) -> None:
        number = 0
        while (due := self._start + number * PERIOD) <= self.last or self._held:
            if time.monotonic() > self.last + PATIENCE:
                break
            if due <= min(self.last, time.monotonic()) and len(self._free) >= 2:
                self._open(FIRST + number, due, PATIENCE)
                self._open(LONELY[self._link.inventory.instance] + number, time.monotonic() + DEADLINE, DEADLINE)
                number += 1
            for room in self._link.changes(0.002):
                self._changed(room, time.monotonic())
        self.found.open = len(self._held)

    def _open(self, number: int, due: float, deadline: float) -> None:
        """A request that both sides open, or a room that this side alone opens."""
        page, sends = self._free.popleft(), self._link.inventory.instance == "prefill"
        for each in self._pages:
            each[page] = tag_of(number) if sends else 0
        room: statelink.Room
        if sends:
            room = self._link.send(number, TOKENS, deadline=deadline)
            if number < 2 * FIRST:
                room.push({"kv": [page]})
        else:
            room = self._link.receive(number, self._peer, TOKENS, {"kv": [page]}, deadline=deadline)
        self._held[number], self._due[number] = (room, page), due

    def _changed(self, room: statelink.Room, now: float) -> None:
        """A room has ended, or its memory can be used again; both may be told at once, and twice."""
        number, lonely = room.room, room.room >= 2 * FIRST
        if room.status in (Status.SUCCEEDED, Status.FAILED) and number in self._due:
            due = self._due.pop(number)
            (self.found.late if lonely else self.found.took).append((due, now - due))
            if room.reason is not None and not (lonely and room.reason.code == "room.deadline"):
                self.found.failed.append(str(room.reason))
            whole = all((each[self._held[number][1]] == tag_of(number)).all() for each in self._pages)
            self.found.wrong += room.status is Status.SUCCEEDED and (lonely or not whole)
        if room.quiesced and number in self._held and number not in self._due:
            self._free.append(self._held.pop(number)[1])


def tag_of(number: int) -> int:
    return 1 + number % 255


_honest: dict[str, Honest] = {}


def begin(host: Host, key: str, peer: str, start: float) -> None:
    """Begin on a link."""
    _honest[key] = Honest(host, key, peer, start)
    _honest[key].start()


def end(host: Host, key: str, last: float) -> Found:
    """Open no more rooms than are due at a moment; what a link saw, once its rooms have ended."""
    honest = _honest.pop(key)
    honest.last = last
    honest.join(PATIENCE + 10)
    return honest.found
