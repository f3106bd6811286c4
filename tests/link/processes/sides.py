"""One engine: it sends or receives rooms as planned, aborts them, and gives memory to the next owner at once.

Run as ``python -m tests.quiescence.side SETTINGS``; it answers each line of JSON with another.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tests.quiescence import meddling
from tests.quiescence.pattern import Memory, Share, key_of
from tests.quiescence.plan import IDS, WINDOW, Plan, plan

import statelink
from statelink import Status, state

ENDED = (Status.FAILED, Status.SUCCEEDED)
REST = 0.004
"""Seconds for which decode keeps what it received, and then looks at it again."""
STUCK = 0.3
"""Seconds after which a room whose batch failed counts as quarantined for good."""


@dataclass
class Book:
    """Who owns which item. What nobody owns holds a poison that is looked at when it is taken again."""

    memory: Memory
    seed: int
    checked: int = 0
    foreign: int = 0
    wrong: set[int] = field(default_factory=set)
    found: list[str] = field(default_factory=list)
    keys: dict[Share, int] = field(default_factory=dict)
    free: dict[str, deque[Share]] = field(default_factory=lambda: {"kv": deque(), "aux": deque()})
    uses: int = 0

    def look(self, share: Share, what: str, *keys: int) -> int:
        """Count the bytes of an item that are none of these keys'."""
        wrong = self.memory.foreign(share, *keys)
        self.checked += self.memory.nbytes(share)
        self.foreign += wrong
        if wrong and len(self.found) < 20:
            self.found.append(f"{wrong} bytes of {share.component} {share.item}: {what}")
        return wrong

    def give(self, share: Share) -> None:
        """A new owner writes to it at once."""
        self.uses += 1
        self.keys[share] = key_of(self.seed, os.getpid(), self.uses)
        self.memory.fill(share, self.keys[share])
        self.free[share.component].append(share)

    def take(self, pages: int) -> list[Share]:
        """Pages and a row, if there are as many: those that were given back longest ago."""
        kv, aux = self.free["kv"], self.free["aux"]
        if len(kv) < pages or not aux:
            return []
        taken = [kv.popleft() for _ in range(pages)] + [aux.popleft()]
        for share in taken:
            self.look(share, "changed while it was somebody else's", self.keys[share])
        return taken

    def sweep(self) -> None:
        """Look at everything that is free."""
        for share in (*self.free["kv"], *self.free["aux"]):
            self.look(share, "changed while it was somebody else's (at the end)", self.keys[share])


@dataclass
class Active:
    """A room under way on this side."""

    plan: Plan
    room: Any
    shares: list[Share]
    started: float
    abort_at: float = float("inf")
    aborted: bool = False
    pushed: int = 0
    next_at: float = 0.0
    named: bool = False
    ended_at: float = 0.0

    def items(self, first: int, last: int, *, row: bool) -> dict[str, list[int]]:
        named = {"kv": [share.item for share in self.shares[first:last]]}
        return {**named, "aux": [self.shares[-1].item]} if row else named

    def keys(self) -> list[int]:
        return [*map(self.plan.share, range(self.plan.pages)), self.plan.share(-1)]


class Side:
    """What both sides have in common.

    Args:
        settings: Role, backend, descriptors of memory.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.role: str = settings["role"]
        self.settings = settings
        self.memory = Memory(settings["memory"], settings["pages"], settings["rows"])
        self.marks = np.frombuffer(meddling.shared(settings["marks"]), np.int64)
        self.mine, self.theirs = (0, 1) if self.role == "prefill" else (1, 0)
        self.link: statelink.Link | None = None
        self.watch = meddling.Watch()

    def open(self, config: dict[str, Any], unchecked: bool) -> dict[str, Any]:
        """Open a link."""
        if unchecked and self.role == "decode":
            meddling.open_the_gates()
        inventory = state.describe(
            self.role,
            [state.mla_pages(dict(enumerate(self.memory.layers))), state.aux_rows({"row": self.memory.row})],
        )
        self.link = statelink.open({"role": self.role, "backend": self.settings["backend"], **config}, inventory)
        if self.role == "prefill":
            self.watch.attach(self.link)
        return {"address": self.link.address}

    def counts(self) -> dict[str, int]:
        """What this process holds."""
        gc.collect()
        return {"threads": len(os.listdir("/proc/self/task")), "descriptors": len(os.listdir("/proc/self/fd"))}

    def snapshot(self) -> dict[str, Any]:
        """The link's."""
        assert self.link is not None
        return {**self.link.snapshot(), "backend": meddling.holds(self.link)}

    def close(self) -> dict[str, Any]:
        """Close the link, and let go of it."""
        assert self.link is not None
        ended = self.link.close()
        self.link = None
        self.watch = meddling.Watch()
        return {"ended": ended, **self.counts()}

    def run(self, **drawn: Any) -> dict[str, Any]:
        """Play all rooms."""
        assert self.link is not None
        self.seed, self.total, self.peer = drawn["seed"], drawn["rooms"], drawn["peer"]
        self.aborts, self.breaks, self.unchecked = drawn["aborts"], drawn["breaks"], drawn["unchecked"]
        self.watch.reset()
        self.book = Book(self.memory, self.seed)
        for share in self.memory.shares():
            self.book.give(share)
        self.active: dict[int, Active] = {}
        self.resting: deque[tuple[float, Active]] = deque()
        self.stuck: list[Active] = []
        self.ended: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.usual = 0.004
        self.quarantined, self.waited = 0, 0.0
        following, look_at = 0, 0.0
        while following < self.total or self.active or self.resting:
            while following < self.total and len(self.active) < WINDOW and self._may_start(following):
                drawn_plan = plan(self.seed, following, self.aborts, self.breaks)
                shares = self.book.take(drawn_plan.pages)
                if not shares:
                    break
                self.active[following] = self.start(drawn_plan, shares)
                following += 1
            self.link.changes(0.0002)
            now = time.monotonic()
            for number, room in list(self.active.items()):
                if self._step(room, now):
                    del self.active[number]
            while self.resting and self.resting[0][0] < now:
                self.release(self.resting.popleft()[1])
            self.marks[self.mine] = min(self.active, default=following)
            if now > look_at:
                look_at = now + 0.05
                self.quarantined = max(self.quarantined, sum(self.link.snapshot()["quarantined_bytes"].values()))
        self.marks[self.mine] = self.total
        return {"ended": self.ended, "reasons": self.reasons, "phases": self.watch.phases, "left": self.watch.left}

    def _may_start(self, number: int) -> bool:
        """Whether both sides have let go of what its room's id was used for before."""
        oldest = min(min(self.active, default=number), int(self.marks[self.theirs]))
        return number < oldest + IDS - WINDOW

    def finish(self) -> dict[str, Any]:
        """Once both sides have come to rest: what this one saw, and what each item that is free has to hold."""
        for room in self.stuck:
            if room.room.quiesced:  # it only took its time
                self.over(room, time.monotonic())
        self.stuck = [room for room in self.stuck if not room.room.quiesced]
        while self.resting:
            self.release(self.resting.popleft()[1])
        self.book.sweep()
        return {
            "checked": self.book.checked,
            "foreign": self.book.foreign,
            "wrong": len(self.book.wrong),
            "found": self.book.found,
            "stuck": [each.plan.room for each in self.stuck],
            "stuck_bytes": sum(self.memory.nbytes(share) for each in self.stuck for share in each.shares),
            "quarantined": self.quarantined,
            "waited": self.waited,
            "free": [[*share, self.book.keys[share]] for each in self.book.free.values() for share in each],
        }

    def _step(self, room: Active, now: float) -> bool:
        """Do what is due; whether nothing is left to do."""
        status = room.room.status
        if status in ENDED:
            if not room.ended_at:
                room.ended_at = now
                self.ended[status.name.lower()] += 1
                if status is Status.FAILED:
                    self.reasons[room.room.reason.code] += 1
            if room.room.quiesced or (self.unchecked and status is Status.FAILED):
                self.waited = max(self.waited, now - room.ended_at)
                self.over(room, now)
                return True
            if room.plan.broken and now > room.ended_at + STUCK:
                self.stuck.append(room)
                return True
            return False
        self.proceed(room, now)
        if now >= room.abort_at and not room.aborted:
            room.aborted = True
            room.room.abort("as planned")
        return False

    def start(self, planned: Plan, shares: list[Share]) -> Active:
        raise NotImplementedError

    def proceed(self, room: Active, now: float) -> None:
        raise NotImplementedError

    def over(self, room: Active, now: float) -> None:
        raise NotImplementedError

    def release(self, room: Active) -> None:
        raise NotImplementedError


class Prefill(Side):
    """Fills sources, pushes them, and overwrites them as soon as it may."""

    def start(self, planned: Plan, shares: list[Share]) -> Active:
        assert self.link is not None
        self.watch.expect(planned)
        room = Active(planned, None, shares, time.monotonic())
        for share, key in zip(shares, room.keys(), strict=True):
            self.memory.fill(share, key)
        room.room = self.link.send(planned.room, planned.pages * 16, to="decode")
        if planned.aborter == "prefill" and planned.trigger == "unmet":
            room.abort_at = room.started + planned.delay
        return room

    def proceed(self, room: Active, now: float) -> None:
        planned = room.plan
        if planned.trigger == "unsent" or (planned.aborter == "prefill" and planned.trigger == "unmet"):
            if planned.aborter == "prefill" and room.room.status is Status.WAITING:
                room.abort_at = min(room.abort_at, now + planned.delay)
            return
        if planned.aborter == "prefill" and planned.trigger == "gap" and room.pushed:
            if room.room.report.chunks:
                room.abort_at = now
            return
        if room.pushed < len(planned.ends) and now >= room.next_at:
            first = planned.ends[room.pushed - 1] if room.pushed else 0
            last = planned.ends[room.pushed]
            final = last == planned.pages
            room.room.push(room.items(first, last, row=final), span=(first * 16, last * 16), last=final)
            room.pushed += 1
            room.next_at = now + planned.gap
            if planned.aborter == "prefill" and planned.trigger == "chunk" and room.abort_at == float("inf"):
                final_chunk = planned.key % len(planned.ends)
                if room.pushed > final_chunk:
                    room.abort_at = now + planned.delay

    def over(self, room: Active, now: float) -> None:
        for share in room.shares:
            self.book.give(share)


class Decode(Side):
    """Names destinations, believes only what succeeded, and gives the rest to others as soon as it may."""

    def start(self, planned: Plan, shares: list[Share]) -> Active:
        assert self.link is not None
        room = Active(planned, None, shares, time.monotonic())
        room.room = self.link.receive(planned.room, self.peer, planned.pages * 16)
        aborts = planned.aborter == "decode"
        if aborts and planned.trigger == "unmet":
            room.abort_at = room.started + planned.delay
            return room
        room.named = True
        room.room.accept(room.items(0, planned.pages, row=True))
        if aborts and planned.trigger == "unsent":
            room.abort_at = room.started + 10 * planned.delay  # prefill waits for it, and pushes nothing
        elif aborts and planned.trigger == "chunk":
            room.abort_at = room.started + planned.delay * 500 * self.usual
        elif aborts and planned.trigger == "late":
            room.abort_at = room.started + (0.7 + planned.delay * 250) * self.usual
        return room

    def proceed(self, room: Active, now: float) -> None:
        planned = room.plan
        if planned.aborter == "decode" and planned.trigger == "gap" and room.room.status is Status.TRANSFERRING:
            room.abort_at = now

    def over(self, room: Active, now: float) -> None:
        keys = room.keys()
        if room.room.status is Status.SUCCEEDED:
            self.usual = 0.95 * self.usual + 0.05 * (now - room.started)
            for share, key in zip(room.shares, keys, strict=True):
                if self.book.look(share, f"wrong in room {room.plan.number}, which succeeded", key):
                    self.book.wrong.add(room.plan.number)
            self.resting.append((now + REST, room))
            return
        for share, key in zip(room.shares, keys, strict=True):
            what = f"neither room {room.plan.number}'s nor what was there before it"
            allowed = (self.book.keys[share], key) if room.named else (self.book.keys[share],)
            if not self.unchecked:
                self.book.look(share, what, *allowed)
            self.book.give(share)

    def release(self, room: Active) -> None:
        for share, key in zip(room.shares, room.keys(), strict=True):
            self.book.look(share, f"changed after room {room.plan.number} had succeeded", key)
            self.book.give(share)


def main() -> None:
    """Serve the test."""
    faulthandler.register(signal.SIGUSR1)
    faulthandler.enable()
    settings = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.CRITICAL)
    side: Side = (Prefill if settings["role"] == "prefill" else Decode)(settings)
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        answer = getattr(side, command.pop("do"))(**command)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
