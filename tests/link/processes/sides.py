"""What runs in an engine's process: it sends or receives rooms as drawn, aborts them, and uses their memory again.

Every item is owned by a room, or free. What is in use holds bytes that say whose they are, and what is free holds
bytes that say who had it last. Both are looked at here, and at the end by the test.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tests.helpers.pools import Aux, Kv, Memory
from tests.link.processes import watched

from statelink import Status
from statelink.backend import RoomReport, hookimpl
from statelink.registry import plugin_manager

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helpers.worker import Host


PAGE = 16
POOLS = (Kv(layers=(0,), pages=256, heads=8, dim=256), Aux(rows=64, widths=(("row", 128, "float32"),)))
"""Pages of 64 KiB of keys and as many of values, and rows of metadata."""
TRIGGERS = {
    "prefill": ("unmet", "unsent", "chunk", "batch", "gap", "written", "ending"),
    "decode": ("unmet", "unsent", "chunk", "chunk", "gap", "late"),
}
"""When a side aborts a room: before the sides have met, before anything is sent, and so on to the end."""
WINDOW, IDS = 12, 96
"""Rooms under way at once, and room ids, each of which is used again and again."""
REST, LATE = 0.004, 0.1
"""Seconds after which decode looks at what it received again, and for which a batch waits for its room to fail."""
RAMP: npt.NDArray[np.uint64] = np.arange(1 << 13, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def key_of(*words: int) -> int:
    """64 bits that stand for these numbers and, but for chance, for no others."""
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest(), "little")


class Item(NamedTuple):
    """A page of all arrays, or a row of metadata."""

    component: str
    number: int

    def arrays(self, memory: Memory) -> list[npt.NDArray[np.uint64]]:
        """Its words in each array."""
        return [each[self.number].reshape(-1).view(np.uint64) for each in memory.arrays[self.component].values()]

    def nbytes(self, memory: Memory) -> int:
        return sum(each.nbytes for each in self.arrays(memory))

    def fill(self, memory: Memory, key: int) -> None:
        """Every word becomes a key plus its place."""
        for number, array in enumerate(self.arrays(memory)):
            np.add(RAMP[: len(array)], np.uint64(key_of(key, number)), out=array)

    def foreign(self, memory: Memory, *keys: int) -> int:
        """How many of its bytes are none of these keys'. A torn word may hold bytes of several of them."""
        found = 0
        for number, array in enumerate(self.arrays(memory)):
            wanted = [RAMP[: len(array)] + np.uint64(key_of(key, number)) for key in keys]
            strange = [array.view(np.uint8) != each.view(np.uint8) for each in wanted]
            found += int(np.count_nonzero(np.logical_and.reduce(strange)))
        return found


class Request(watched.Progress):
    """A room under way on this side, and what is drawn for it: the same on both sides.

    It is drawn with how likely somebody aborts it, and how likely its batches are to fail in the library.

    Attributes:
        how: Who aborts it, and when; see `TRIGGERS`. Empty if nobody does.
        ends: Where its chunks begin and end, in pages.
        delay: Seconds from the trigger to the abort, or a fraction where that takes one.
        waits: Whether one side waits for the other's abort: prefill with a batch, or decode before it asks.
        key: What its bytes are told by; another one for every use of an id.
        owed: Bytes that prefill has to move.
    """

    def __init__(self, number: int, seed: int, aborts: float, breaks: float) -> None:
        order = random.Random(key_of(seed, number))
        aborter = order.choice(tuple(TRIGGERS))
        self.how = f"{aborter} {order.choice(TRIGGERS[aborter])}" if order.random() < aborts else ""
        chunks = [order.randint(1, 3) for _ in range(order.randint(1, 3) + self.how.endswith("gap"))]
        self.number, self.ends = number, list(itertools.accumulate(chunks, initial=0))
        self.pages = self.ends[-1]
        self.broken = order.random() < breaks and not self.how.endswith(("unmet", "unsent"))
        if self.broken and order.random() < 0.5:
            self.how = ""  # else most of them could be aborted before their batches reach the library
        self.delay = order.random() * order.choice((0.0, 0.002, 0.002))
        self.gap = 0.004 if self.how == "decode gap" else order.choice((0.0, 0.0, 0.001))
        self.id = 1_000_000 + number if self.broken else 1 + number % IDS  # a broken room may hold its id for good
        self.key = key_of(seed, number, 1)
        self.waits = self.how == "prefill batch" or (self.how in ("prefill unmet", "decode chunk") and self.key % 2 > 0)
        self.room: Any = None
        self.items: list[Item] = []
        self.owed = self.pushed = 0
        self.named = self.aborted = False
        self.began_at = self.next_at = self.ended_at = 0.0
        self.abort_at = math.inf

    def keyed(self) -> list[tuple[Item, int]]:
        """Its pages and its row, and what each is told by."""
        return [(item, key_of(self.key, number)) for number, item in enumerate(self.items)]

    def ids(self, first: int, last: int) -> dict[str, list[int]]:
        """Its pages of a chunk; with the last one, its row."""
        *pages, row = (item.number for item in self.items)
        return {"kv": pages[first:last], **({"aux": [row]} if last == self.pages else {})}

    def abort_from(self, moment: float) -> None:
        self.abort_at = min(self.abort_at, moment)

    def began(self) -> None:
        """Let a room fail while a batch is on its way to the library, which gets it after that. On a data thread."""
        if self.waits and self.begun == 1 + self.key % self.pages:
            if self.how == "prefill batch":
                self.room.abort("as planned")
            until = time.monotonic() + LATE
            while not self.failed and time.monotonic() < until:
                time.sleep(0.0002)

    def arrived(self) -> None:
        """Abort a room before prefill can say that all has been written. On a data thread."""
        if self.how == "prefill written" and self.nbytes == self.owed:
            self.room.abort("as planned")


class Side:
    """What both sides have in common: rooms under way, and items that are free. Counts what is not its owner's.

    Args:
        marks: Shared with the other side: which rooms each of them is through with.
        early: Whether memory of a room that failed is used again before it is quiesced.
        draws: Of `Request`, without the number.
    """

    mine = 0
    start: Callable[[Request], None]
    proceed: Callable[[Request, float], None]

    def __init__(self, host: Host, key: str, marks: Path, peer: str, early: bool, draws: dict[str, Any]) -> None:
        self.link, self.memory, self.peer, self.early = host.links[key], host.memories[key], peer, early
        self.marks, self.draws = np.memmap(marks, np.int64, "r+"), draws
        self.keys: dict[Item, int] = {}  # of each item that is free, what its bytes are told by
        self.free: dict[str, deque[Item]] = {name: deque() for name in self.memory.arrays}
        self._keys = (key_of(draws["seed"], os.getpid(), use) for use in itertools.count())
        self.active: dict[int, Request] = {}
        self.resting: deque[tuple[float, Request]] = deque()
        self.broken: list[Request] = []
        self.ended, self.phases = Counter[str](), Counter[str]()
        self.in_flight = self.checked = self.foreign = self.wrong = 0
        self.found: list[str] = []
        self.usual, self.waited = 0.004, 0.0
        for name in self.free:
            for number in range(self.memory.count(name)):
                self.give(Item(name, number))

    def look(self, item: Item, what: str, *keys: int) -> int:
        """Count the bytes of an item that are none of these keys'."""
        wrong = item.foreign(self.memory, *keys)
        self.checked += item.nbytes(self.memory)
        self.foreign += wrong
        if wrong and len(self.found) < 20:
            self.found.append(f"{wrong} bytes of {item.component} {item.number}: {what}")
        return wrong

    def give(self, item: Item) -> None:
        """A new owner writes to it at once."""
        self.keys[item] = next(self._keys)
        item.fill(self.memory, self.keys[item])
        self.free[item.component].append(item)

    def take(self, pages: int) -> list[Item]:
        """Pages and a row, if there are as many: those that were given back longest ago."""
        kv, aux = self.free["kv"], self.free["aux"]
        if len(kv) < pages or not aux:
            return []
        taken = [*(kv.popleft() for _ in range(pages)), aux.popleft()]
        for item in taken:
            self.look(item, "changed while it was somebody else's", self.keys[item])
        return taken

    def play(self, rooms: int) -> None:
        """Play so many rooms."""
        following = 0
        while following < rooms or self.active or self.resting:
            # Of a room whose id is used again, both sides have let go.
            oldest = min(min(self.active, default=following), int(self.marks[1 - self.mine]))
            while following < min(rooms, oldest + IDS - WINDOW) and len(self.active) < WINDOW:
                request = Request(following, **self.draws)
                request.items = self.take(request.pages)
                if not request.items:
                    break
                self.active[following], request.began_at = request, time.monotonic()
                self.start(request)
                following += 1
            self.link.changes(0.0002)
            now = time.monotonic()
            for number, request in list(self.active.items()):
                if self._step(request, now):
                    del self.active[number]
            while self.resting and self.resting[0][0] < now:
                self.release(self.resting.popleft()[1])
            self.marks[self.mine] = min(self.active, default=following)

    def _step(self, request: Request, now: float) -> bool:
        """Do what is due; whether nothing is left to do."""
        room, status = request.room, request.room.status
        if status not in (Status.FAILED, Status.SUCCEEDED):
            self.proceed(request, now)
            if now >= request.abort_at and not request.aborted:
                request.aborted = True
                room.abort("as planned")
            return False
        if not request.ended_at:
            request.ended_at = now
            self.ended[room.reason.code if status is Status.FAILED else "succeeded"] += 1
        if room.quiesced or (self.early and status is Status.FAILED):
            self.waited = max(self.waited, now - request.ended_at)
            self.over(request)
            return True
        if request.broken:
            self.broken.append(request)
        return request.broken

    def finish(self) -> dict[str, Any]:
        """Once both sides have come to rest: what this one saw, and what each item that is free has to hold."""
        stuck = [each for each in self.broken if not each.room.quiesced]
        for request in self.broken:
            if request not in stuck:  # it only took its time
                self.over(request)
        for _, request in self.resting:
            self.release(request)
        free = [item for each in self.free.values() for item in each]
        for item in free:
            self.look(item, "changed while it was free", self.keys[item])
        return {
            "ended": self.ended,
            "phases": self.phases,
            "in_flight": self.in_flight,
            "checked": self.checked,
            "foreign": self.foreign,
            "wrong": self.wrong,
            "found": self.found,
            "stuck": sorted(each.id for each in stuck),
            "held": sum(item.nbytes(self.memory) for each in stuck for item in each.items),
            "waited": round(self.waited, 3),
            "free": [(item, self.keys[item]) for item in free],
        }

    def over(self, request: Request) -> None:
        for item in request.items:
            self.give(item)

    def release(self, request: Request) -> None:
        """Give back what a room brought that succeeded a while ago."""
        for item, key in request.keyed():
            self.look(item, f"changed after room {request.number} had succeeded", key)
            self.give(item)


class Prefill(Side):
    """Fills sources, pushes them, and overwrites them as soon as it may."""

    def start(self, request: Request) -> None:
        watched.rooms[request.id] = request
        for item, key in request.keyed():
            item.fill(self.memory, key)
            request.owed += item.nbytes(self.memory)
        request.room = self.link.send(request.id, request.pages * PAGE)
        if request.how == "prefill unmet":
            request.abort_from(request.began_at + request.delay)

    def proceed(self, request: Request, now: float) -> None:
        how, room, chunks = request.how, request.room, len(request.ends) - 1
        if how == "prefill unsent" and room.status is Status.WAITING:
            request.abort_from(now + request.delay)
        if room.report.chunks >= {"prefill gap": 1, "prefill ending": chunks}.get(how, math.inf):
            request.abort_from(now)  # at the end, prefill's last word is on its way
        if how in ("prefill unmet", "prefill unsent", "decode unsent") or (how == "prefill gap" and request.pushed):
            return
        if request.pushed < chunks and now >= request.next_at:
            first, last = request.ends[request.pushed :][:2]
            span = (first * PAGE, last * PAGE)
            room.push(request.ids(first, last), span=span, last=last == request.pages)
            request.pushed += 1
            request.next_at = now + request.gap
            if how == "prefill chunk" and request.pushed > request.key % chunks:
                request.abort_from(now + request.delay)

    @hookimpl
    def statelink_room_ended(self, report: RoomReport) -> None:
        """Note in which phase a room failed. Runs on the control thread."""
        request, reason = watched.rooms[report.room], report.reason
        assert isinstance(request, Request)
        if reason is None:
            return
        request.failed = True
        by = "decode" if reason.what.startswith("decode") else "prefill"
        if not request.begun:
            phase = "before send" if report.transferred else "before metadata"
        elif report.chunks == len(request.ends) - 1:
            phase = "during completion"
        elif request.flying:
            phase = "mid-chunk"
        else:
            phase = "after the last write" if request.nbytes == request.owed else "between chunks"
        self.phases[f"{by if reason.code == 'room.aborted' else reason.code}: {phase}"] += 1
        self.in_flight += bool(request.flying)


class Decode(Side):
    """Names destinations, believes only what succeeded, and gives the rest to others as soon as it may."""

    mine = 1

    def start(self, request: Request) -> None:
        request.room = self.link.receive(request.id, self.peer, request.pages * PAGE)
        if request.how == "prefill unmet" and request.waits:
            request.next_at = request.began_at + LATE
        self.proceed(request, request.began_at)
        later = {
            "decode unmet": request.delay,
            "decode unsent": 10 * request.delay,  # prefill waits for it, and pushes nothing
            "decode chunk": request.delay * 500 * self.usual,
            "decode late": (0.7 + request.delay * 250) * self.usual,
        }
        if request.how in later:
            request.abort_from(request.began_at + later[request.how])

    def proceed(self, request: Request, now: float) -> None:
        if not request.named and request.how != "decode unmet" and now >= request.next_at:
            request.named = True
            request.room.accept(request.ids(0, request.pages))
        if request.how == "decode gap" and request.room.status is Status.TRANSFERRING:
            request.abort_from(now)

    def over(self, request: Request) -> None:
        if request.room.status is Status.SUCCEEDED:
            self.usual = 0.95 * self.usual + 0.05 * (request.ended_at - request.began_at)
            what = f"wrong in room {request.number}, which succeeded"
            self.wrong += sum(self.look(item, what, key) for item, key in request.keyed()) > 0
            self.resting.append((time.monotonic() + REST, request))
            return
        for item, key in request.keyed() if not self.early else ():
            before = self.keys[item]
            what = f"neither room {request.number}'s nor what was there before it"
            self.look(item, what, *((before, key) if request.named else (before,)))
        super().over(request)


_sides: dict[str, Side] = {}


def play(host: Host, key: str, marks: Path, peer: str, rooms: int, early: bool, draws: dict[str, Any]) -> None:
    """Play rooms over a link."""
    kind = Prefill if host.links[key].inventory.instance == "prefill" else Decode
    side = _sides[key] = kind(host, key, marks, peer, early, draws)
    plugin_manager().register(side, "sides")
    try:
        side.play(rooms)
    finally:
        plugin_manager().unregister(side)


def finish(host: Host, key: str) -> dict[str, Any]:
    """What a side saw; see `Side.finish`."""
    return _sides.pop(key).finish()
