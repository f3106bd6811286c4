"""What runs in an engine's process: it sends or receives rooms as drawn, aborts them, and uses their memory again.

Every item is owned by a room, or free. What is in use holds bytes that say whose they are, and what is free holds
bytes that say who had it last. Both are looked at here, and at the end by the test.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tests.helpers.pools import Aux, Kv, Memory
from tests.link.processes.watched import Progress, watch

from statelink import Status
from statelink.backend import RoomReport, hookimpl
from statelink.registry import plugin_manager

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helpers.worker import Host

    import statelink

__all__ = ["PHASES", "POOLS", "Drawn", "Item", "finish", "foreign", "play", "snapshot"]

PAGE = 16
POOLS = (Kv(layers=(0,), pages=256, heads=8, dim=256), Aux(rows=64, widths=(("row", 128, "float32"),)))
"""Pages of 64 KiB of keys and as many of values, and rows of metadata."""
PHASES = (
    "before metadata",
    "before send",
    "mid-chunk",
    "between chunks",
    "after the last write",
    "during completion",
)
TRIGGERS = {
    "prefill": ("unmet", "unsent", "chunk", "batch", "gap", "written", "ending"),
    "decode": ("unmet", "unsent", "chunk", "chunk", "gap", "late"),
}
ENDED = (Status.FAILED, Status.SUCCEEDED)
WINDOW = 12
"""Rooms under way at once."""
IDS = 8 * WINDOW
"""Room ids; each is used again and again."""
REST = 0.004
"""Seconds for which decode keeps what it received, and then looks at it again."""
LATE = 0.1
"""Most seconds for which a batch waits for its room to fail."""
STUCK = 0.3
"""Seconds after which a room whose batch failed counts as quarantined for good."""

MASK = (1 << 64) - 1
RAMP: npt.NDArray[np.uint64] = np.arange(1 << 13, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def key_of(*words: int) -> int:
    """64 bits that stand for these numbers and, but for chance, for no others."""
    mixed = 0x243F6A8885A308D3
    for word in words:
        mixed = (mixed ^ word) + 0x9E3779B97F4A7C15 & MASK
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
        mixed ^= mixed >> 31
    return mixed


class Item(NamedTuple):
    """A page of all arrays, or a row of metadata."""

    component: str
    number: int

    def parts(self, memory: Memory) -> list[npt.NDArray[np.uint64]]:
        """Its bytes in each array."""
        return [each[self.number].reshape(-1).view(np.uint64) for each in memory.arrays[self.component].values()]

    def nbytes(self, memory: Memory) -> int:
        return sum(part.nbytes for part in self.parts(memory))


def fill(memory: Memory, item: Item, key: int) -> None:
    """Every 8 bytes of an item become a key plus their place."""
    for number, part in enumerate(item.parts(memory)):
        np.add(RAMP[: len(part)], np.uint64(key_of(key, number)), out=part)


def foreign(memory: Memory, item: Item, *keys: int) -> int:
    """How many bytes of an item are none of these keys'. A torn word may hold bytes of several of them."""
    found = 0
    for number, part in enumerate(item.parts(memory)):
        wanted = [RAMP[: len(part)] + np.uint64(key_of(key, number)) for key in keys]
        if not np.array_equal(part, wanted[0]):
            known = [part.view(np.uint8) == each.view(np.uint8) for each in wanted]
            found += part.nbytes - int(np.logical_or.reduce(known).sum())
    return found


class Drawn(NamedTuple):
    """What happens to one room: the same on both sides.

    Attributes:
        number: Which one, from 0.
        room: Its id.
        ends: Pages that were pushed after each chunk.
        aborter: Who aborts it; empty if nobody does.
        trigger: When; see `TRIGGERS`.
        delay: Seconds after the trigger, or a fraction where the trigger takes one.
        gap: Seconds between chunks.
        broken: Whether its batches are to fail in the library.
        key: What its bytes are told by; another one for every use of an id.
    """

    number: int
    room: int
    ends: tuple[int, ...]
    aborter: str
    trigger: str
    delay: float
    gap: float
    broken: bool
    key: int

    @classmethod
    def of(cls, seed: int, number: int, aborts: float, breaks: float) -> Drawn:
        """A room of a run, with how likely it is to be aborted and to have batches that fail."""
        rng = random.Random(key_of(seed, number))
        ends: list[int] = []
        for _ in range(rng.randint(1, 3)):
            ends.append((ends[-1] if ends else 0) + rng.randint(1, 3))
        aborter = rng.choice(("prefill", "decode")) if rng.random() < aborts else ""
        trigger = rng.choice(TRIGGERS[aborter]) if aborter else ""
        if trigger == "gap" and len(ends) == 1:
            ends.append(ends[0] + 2)
        broken = rng.random() < breaks and trigger not in ("unmet", "unsent")
        delay = rng.random() * (0.0 if rng.random() < 0.3 else 0.002)
        gap = 0.004 if aborter == "decode" and trigger == "gap" else rng.choice((0.0, 0.0, 0.001))
        room = 1_000_000 + number if broken else 1 + number % IDS  # a broken room may hold its id for good
        return cls(number, room, tuple(ends), aborter, trigger, delay, gap, broken, key_of(seed, number, 1))

    @property
    def waits(self) -> bool:
        """Whether one side waits for the other's abort: prefill with a batch, or decode before it asks."""
        how = self.aborter, self.trigger
        return how == ("prefill", "batch") or (how in (("prefill", "unmet"), ("decode", "chunk")) and self.key % 2 > 0)

    def keys(self) -> list[int]:
        """Of its pages and its row."""
        return [key_of(self.key, page + 1) for page in (*range(self.ends[-1]), -1)]


@dataclass
class Request:
    """A room under way on this side."""

    drawn: Drawn
    items: list[Item]
    started: float
    room: Any = None
    abort_at: float = float("inf")
    aborted: bool = False
    pushed: int = 0
    next_at: float = 0.0
    named: bool = False
    ended_at: float = 0.0

    def ids(self, first: int, last: int, *, row: bool) -> dict[str, list[int]]:
        pages = {"kv": [item.number for item in self.items[first:last]]}
        return {**pages, "aux": [self.items[-1].number]} if row else pages


class Owners:
    """Who owns which item. Counts the bytes that are not their owner's.

    Attributes:
        keys: Of each item that is free, what its bytes are told by.
    """

    def __init__(self, memory: Memory, seed: int) -> None:
        self.memory = memory
        self.checked = self.foreign = 0
        self.found: list[str] = []
        self.keys: dict[Item, int] = {}
        self.free: dict[str, deque[Item]] = {name: deque() for name in memory.arrays}
        self._seed = key_of(seed, os.getpid())
        self._uses = 0
        for name, arrays in memory.arrays.items():
            for number in range(len(next(iter(arrays.values())))):
                self.give(Item(name, number))

    def look(self, item: Item, what: str, *keys: int) -> int:
        """Count the bytes of an item that are none of these keys'."""
        wrong = foreign(self.memory, item, *keys)
        self.checked += item.nbytes(self.memory)
        self.foreign += wrong
        if wrong and len(self.found) < 20:
            self.found.append(f"{wrong} bytes of {item.component} {item.number}: {what}")
        return wrong

    def give(self, item: Item) -> None:
        """A new owner writes to it at once."""
        self._uses += 1
        self.keys[item] = key_of(self._seed, self._uses)
        fill(self.memory, item, self.keys[item])
        self.free[item.component].append(item)

    def take(self, pages: int) -> list[Item]:
        """Pages and a row, if there are as many: those that were given back longest ago."""
        kv, aux = self.free["kv"], self.free["aux"]
        if len(kv) < pages or not aux:
            return []
        taken = [kv.popleft() for _ in range(pages)] + [aux.popleft()]
        for item in taken:
            self.look(item, "changed while it was somebody else's", self.keys[item])
        return taken

    def sweep(self) -> None:
        """Look at everything that is free."""
        for item in (*self.free["kv"], *self.free["aux"]):
            self.look(item, "changed while it was somebody else's (at the end)", self.keys[item])


class Side:
    """What both sides have in common.

    Args:
        link: This side's.
        memory: Its pools.
        marks: Shared with the other side: which rooms each of them is through with.
        peer: Where prefill listens.
        rooms: How many there are.
        early: Whether memory of a room that failed is used again before it is quiesced.
        draws: Of `Drawn.of`: seed, and how likely aborts and broken batches are.
    """

    def __init__(
        self, link: statelink.Link, memory: Memory, marks: Path, peer: str, rooms: int, *, early: bool, **draws: Any
    ) -> None:
        self.link, self.memory, self.peer, self.total, self.early, self.draws = link, memory, peer, rooms, early, draws
        self.marks = np.memmap(marks, np.int64, "r+")
        self.mine = 0 if self.sends else 1
        self.owners = Owners(memory, draws["seed"])
        self.active: dict[int, Request] = {}
        self.resting: deque[tuple[float, Request]] = deque()
        self.stuck: list[Request] = []
        self.wrong: set[int] = set()
        self.ended: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.phases: Counter[str] = Counter()
        self.in_flight = 0
        self.usual = 0.004
        self.quarantined, self.waited = 0, 0.0

    sends = False

    def play(self) -> None:
        """Play all rooms."""
        following, look_at = 0, 0.0
        while following < self.total or self.active or self.resting:
            while following < self.total and len(self.active) < WINDOW and self._may_start(following):
                drawn = Drawn.of(number=following, **self.draws)
                items = self.owners.take(drawn.ends[-1])
                if not items:
                    break
                request = self.active[following] = Request(drawn, items, time.monotonic())
                self.start(request, drawn)
                following += 1
            self.link.changes(0.0002)
            now = time.monotonic()
            for number, request in list(self.active.items()):
                if self._step(request, now):
                    del self.active[number]
            while self.resting and self.resting[0][0] < now:
                self.release(self.resting.popleft()[1])
            self.marks[self.mine] = min(self.active, default=following)
            if now > look_at:
                look_at = now + 0.05
                self.quarantined = max(self.quarantined, sum(self.link.snapshot()["quarantined_bytes"].values()))
        self.marks[self.mine] = self.total

    def _may_start(self, number: int) -> bool:
        """Whether both sides have let go of what its room's id was used for before."""
        oldest = min(min(self.active, default=number), int(self.marks[1 - self.mine]))
        return number < oldest + IDS - WINDOW

    def _step(self, request: Request, now: float) -> bool:
        """Do what is due; whether nothing is left to do."""
        room, status = request.room, request.room.status
        if status in ENDED:
            if not request.ended_at:
                request.ended_at = now
                self.ended[status.name.lower()] += 1
                if status is Status.FAILED:
                    self.reasons[room.reason.code] += 1
            if room.quiesced or (self.early and status is Status.FAILED):
                self.waited = max(self.waited, now - request.ended_at)
                self.over(request, now)
                return True
            if request.drawn.broken and now > request.ended_at + STUCK:
                self.stuck.append(request)
                return True
            return False
        self.proceed(request, now)
        if now >= request.abort_at and not request.aborted:
            request.aborted = True
            room.abort("as planned")
        return False

    def finish(self) -> dict[str, Any]:
        """Once both sides have come to rest: what this one saw, and what each item that is free has to hold."""
        for request in self.stuck:
            if request.room.quiesced:  # it only took its time
                self.over(request, time.monotonic())
        self.stuck = [request for request in self.stuck if not request.room.quiesced]
        while self.resting:
            self.release(self.resting.popleft()[1])
        self.owners.sweep()
        return {
            "ended": dict(self.ended),
            "reasons": dict(self.reasons),
            "phases": dict(self.phases),
            "in_flight": self.in_flight,
            "checked": self.owners.checked,
            "foreign": self.owners.foreign,
            "wrong": len(self.wrong),
            "found": self.owners.found,
            "stuck": sorted(each.drawn.room for each in self.stuck),
            "held": sum(item.nbytes(self.memory) for each in self.stuck for item in each.items),
            "quarantined": self.quarantined,
            "waited": round(self.waited, 3),
            "free": [(*item, self.owners.keys[item]) for each in self.owners.free.values() for item in each],
        }

    def start(self, request: Request, drawn: Drawn) -> None:
        raise NotImplementedError

    def proceed(self, request: Request, now: float) -> None:
        raise NotImplementedError

    def over(self, request: Request, now: float) -> None:
        raise NotImplementedError

    def release(self, request: Request) -> None:
        raise NotImplementedError


class Prefill(Side):
    """Fills sources, pushes them, and overwrites them as soon as it may."""

    sends = True

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._by_id: dict[int, Request] = {}
        watch().began, watch().arrived = self._began, self._arrived

    def start(self, request: Request, drawn: Drawn) -> None:
        self._by_id[drawn.room] = request
        watch().rooms[drawn.room] = Progress()
        if drawn.broken:
            watch().broken.add(drawn.room)
        for item, key in zip(request.items, drawn.keys(), strict=True):
            fill(self.memory, item, key)
        request.room = self.link.send(drawn.room, drawn.ends[-1] * PAGE, to="decode")
        if drawn.aborter == "prefill" and drawn.trigger == "unmet":
            request.abort_at = request.started + drawn.delay

    def proceed(self, request: Request, now: float) -> None:
        drawn = request.drawn
        trigger = drawn.trigger if drawn.aborter == "prefill" else ""
        if drawn.trigger == "unsent" or trigger == "unmet":
            if trigger == "unsent" and request.room.status is Status.WAITING:
                request.abort_at = min(request.abort_at, now + drawn.delay)
            return
        if trigger == "gap" and request.pushed:
            if request.room.report.chunks:
                request.abort_at = now
            return
        if trigger == "ending" and request.room.report.chunks == len(drawn.ends):
            request.abort_at = now  # prefill's last word is on its way
        if request.pushed < len(drawn.ends) and now >= request.next_at:
            first = drawn.ends[request.pushed - 1] if request.pushed else 0
            last = drawn.ends[request.pushed]
            final = last == drawn.ends[-1]
            ids = request.ids(first, last, row=final)
            request.room.push(ids, span=(first * PAGE, last * PAGE), last=final)
            request.pushed += 1
            request.next_at = now + drawn.gap
            if trigger == "chunk" and request.abort_at == float("inf") and request.pushed > drawn.key % len(drawn.ends):
                request.abort_at = now + drawn.delay

    def over(self, request: Request, now: float) -> None:
        for item in request.items:
            self.owners.give(item)

    def _due(self, request: Request) -> int:
        return sum(item.nbytes(self.memory) for item in request.items)

    def _began(self, room: int, progress: Progress) -> None:
        """Let a room fail while a batch is on its way to the library, which gets it after that. On a data thread."""
        request = self._by_id[room]
        drawn = request.drawn
        if progress is not watch().rooms[room] or progress.begun != 1 + drawn.key % drawn.ends[-1] or not drawn.waits:
            return
        if drawn.aborter == "prefill":
            request.room.abort("as planned")
        until = time.monotonic() + LATE
        while not progress.failed and time.monotonic() < until:
            time.sleep(0.0002)

    def _arrived(self, room: int, progress: Progress) -> None:
        """Abort a room before prefill can say that all has been written. Runs on a data thread."""
        request = self._by_id[room]
        drawn = request.drawn
        written = progress is watch().rooms[room] and progress.nbytes == self._due(request)
        if written and (drawn.aborter, drawn.trigger) == ("prefill", "written"):
            request.room.abort("as planned")

    @hookimpl
    def statelink_room_ended(self, report: RoomReport) -> None:
        """Note in which phase a room failed. Runs on the control thread."""
        request, reason = self._by_id[report.room], report.reason
        if reason is None:
            return
        progress = watch().rooms[report.room]
        progress.failed = True
        by = "decode" if reason.what.startswith("decode") else "prefill"
        phase = self._phase(report, request, progress)
        self.phases[f"{by if reason.code == 'room.aborted' else reason.code}: {phase}"] += 1
        self.in_flight += bool(progress.flying)

    def _phase(self, report: RoomReport, request: Request, progress: Progress) -> str:
        if not progress.begun:
            return "before send" if report.transferred else "before metadata"
        if report.chunks == len(request.drawn.ends):
            return "during completion"
        if progress.flying:
            return "mid-chunk"
        return "after the last write" if progress.nbytes == self._due(request) else "between chunks"


class Decode(Side):
    """Names destinations, believes only what succeeded, and gives the rest to others as soon as it may."""

    def start(self, request: Request, drawn: Drawn) -> None:
        request.room = self.link.receive(drawn.room, self.peer, drawn.ends[-1] * PAGE)
        trigger = drawn.trigger if drawn.aborter == "decode" else ""
        if trigger == "unmet":
            request.abort_at = request.started + drawn.delay
            return
        if (drawn.aborter, drawn.trigger) == ("prefill", "unmet") and drawn.waits:
            request.next_at = request.started + LATE
        self.proceed(request, request.started)
        later = {
            "unsent": 10 * drawn.delay,  # prefill waits for it, and pushes nothing
            "chunk": drawn.delay * 500 * self.usual,
            "late": (0.7 + drawn.delay * 250) * self.usual,
        }
        request.abort_at = request.started + later.get(trigger, float("inf"))

    def proceed(self, request: Request, now: float) -> None:
        drawn = request.drawn
        how = drawn.aborter, drawn.trigger
        if not request.named and how != ("decode", "unmet") and now >= request.next_at:
            request.named = True
            request.room.accept(request.ids(0, drawn.ends[-1], row=True))
        if how == ("decode", "gap") and request.room.status is Status.TRANSFERRING:
            request.abort_at = now

    def over(self, request: Request, now: float) -> None:
        drawn = request.drawn
        if request.room.status is Status.SUCCEEDED:
            self.usual = 0.95 * self.usual + 0.05 * (now - request.started)
            for item, key in zip(request.items, drawn.keys(), strict=True):
                if self.owners.look(item, f"wrong in room {drawn.number}, which succeeded", key):
                    self.wrong.add(drawn.number)
            self.resting.append((now + REST, request))
            return
        for item, key in zip(request.items, drawn.keys(), strict=True):
            before = self.owners.keys[item]
            if not self.early:
                what = f"neither room {drawn.number}'s nor what was there before it"
                self.owners.look(item, what, *((before, key) if request.named else (before,)))
            self.owners.give(item)

    def release(self, request: Request) -> None:
        for item, key in zip(request.items, request.drawn.keys(), strict=True):
            self.owners.look(item, f"changed after room {request.drawn.number} had succeeded", key)
            self.owners.give(item)


_sides: dict[str, Side] = {}


def play(host: Host, key: str, marks: Path, peer: str, rooms: int, early: bool, draws: dict[str, Any]) -> None:
    """Play all rooms over a link."""
    link = host.links[key]
    kind: Callable[..., Side] = Prefill if link.inventory.instance == "prefill" else Decode
    side = _sides[key] = kind(link, host.memories[key], marks, peer, rooms, early=early, **draws)
    plugin_manager().register(side, "sides")
    try:
        side.play()
    finally:
        plugin_manager().unregister(side)


def finish(host: Host, key: str) -> dict[str, Any]:
    """What a side saw; see `Side.finish`."""
    return _sides.pop(key).finish()


def snapshot(host: Host, key: str) -> dict[str, Any]:
    """A link's, with what its backend holds for rooms."""
    return {**host.links[key].snapshot(), "backend": watch().held()}
