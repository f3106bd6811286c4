"""Honest rooms in a worker process, and how late everything comes while others do what they like to its port.

Two links open the same rooms at the same moments, told by the clock of the machine: requests that end well, and rooms
whose other side never comes, which have to fail at their deadline.
"""

from __future__ import annotations

import collections
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import statelink
from statelink import Status

if TYPE_CHECKING:
    from tests.helpers.worker import Host

PERIOD = 0.02
"""Seconds between two requests, and between two rooms that nobody serves."""
DEADLINE, PATIENCE = 0.5, 40.0
"""Seconds that a room has that nobody serves, and those that a request has: fewer than a test waits for the end."""
TOKENS = 16  # one page
FIRST = 1_000_000
LONELY = {"prefill": 2 * FIRST, "decode": 3 * FIRST}
"""Ids of the first request, and of a side's first room that nobody serves."""


class Found(NamedTuple):
    """What one side saw.

    Attributes:
        late: Moments at which a deadline was due, and by how many seconds it came later than that.
        took: Moments at which a request was due to begin, and the seconds that it took from then on.
        wrong: Requests that failed or lack bytes, and lonely rooms that did not fail at their deadline.
    """

    late: list[tuple[float, float]]
    took: list[tuple[float, float]]
    wrong: list[str]


_last: dict[str, float] = {}
_found: dict[str, Future[Found]] = {}


def begin(host: Host, key: str, peer: str, start: float) -> None:
    """Open rooms on a link from a moment on, on a thread of its own."""
    _last[key] = math.inf
    _found[key] = ThreadPoolExecutor(1).submit(serve, host, key, peer, start)


def end(host: Host, key: str, last: float) -> Found:
    """Open no more rooms than are due at a moment; what a link saw, once its rooms have ended."""
    _last[key] = last
    return _found.pop(key).result()


def serve(host: Host, key: str, peer: str, start: float) -> Found:
    link, pages = host.links[key], list(host.memories[key].arrays["kv"].values())
    role, free = link.inventory.instance, collections.deque(range(len(pages[0])))
    number, found = 0, Found([], [], [])
    held: dict[int, tuple[int, statelink.Room]] = {}  # by room, its page and itself
    due: dict[int, float] = {}  # when rooms that have not ended were to begin, or to fail
    while (begins := start + number * PERIOD) <= _last[key] or held:
        if time.monotonic() > _last[key] + PATIENCE:
            found.wrong.append(f"rooms {list(held)} have not ended")
            break
        if begins <= min(_last[key], time.monotonic()) and len(free) >= 2:
            for room, deadline in ((FIRST + number, PATIENCE), (LONELY[role] + number, DEADLINE)):
                due[room] = begins if room < 2 * FIRST else time.monotonic() + DEADLINE
                page = free.popleft()
                for each in pages:
                    each[page] = 1 + room % 255 if role == "prefill" else 0
                if role == "decode":
                    held[room] = page, link.receive(room, peer, TOKENS, {"kv": [page]}, deadline=deadline)
                    continue
                sending = link.send(room, TOKENS, deadline=deadline)
                held[room] = page, sending
                if room < 2 * FIRST:
                    sending.push({"kv": [page]})
            number += 1
        for told in link.changes(0.002):  # that a room has ended, that its memory can be used again, or both
            if told.status in (Status.SUCCEEDED, Status.FAILED) and told.room in due:
                page, _ = held[told.room]
                whole = all((each[page] == 1 + told.room % 255).all() for each in pages)
                note(found, told, due.pop(told.room), whole)
            if told.quiesced and told.room in held and told.room not in due:
                free.append(held.pop(told.room)[0])
    return found


def note(found: Found, room: statelink.Room, due: float, whole: bool) -> None:
    """A room has ended, with all of its bytes or without."""
    lonely, now = room.room >= 2 * FIRST, time.monotonic()
    (found.late if lonely else found.took).append((due, now - due))
    if room.reason is not None and not (lonely and room.reason.code == "room.deadline"):
        found.wrong.append(str(room.reason))
    if room.reason is None and (lonely or not whole):
        found.wrong.append(f"room {room.room} succeeded without its bytes")
