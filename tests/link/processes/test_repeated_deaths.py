"""One side dies or stops, many times in a row, while the other goes on: each time it recovers, and nothing adds up.

The side that goes on has one link throughout. Each time, the other side comes back at its address and serves a room
whose every byte is compared; the survivor's memory has been given back by then.
"""

from __future__ import annotations

import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.pair import Pair
from tests.helpers.peers import until
from tests.helpers.pools import Aux, Kv
from tests.helpers.worker import Host

from statelink import Status
from statelink.testing import free_addresses

if TYPE_CHECKING:
    from tests.helpers.engine import LinkHandle, RoomHandle
    from tests.helpers.expect import Case
    from tests.link.conftest import TwoEngines

LIVE: dict[str, Any] = {"heartbeat": 0.25, "liveness": 2.0, "deadline": 60.0, "slice_bytes": 256 << 10}
SOON = 30.0
"""Seconds within which something has to happen, on a machine that has other things to do."""
POOLS = (Kv(layers=tuple(range(8)), pages=64, heads=8, dim=64), Aux())
LARGE = 40 * 16
"""Tokens of a request whose copy takes some milliseconds: ten megabytes."""
SMALL = 4 * 16
STOP = 3.0
"""Seconds for which a side is stopped: longer than liveness."""
WARM = 3
"""Deaths before what the survivor holds is counted for the first time."""
SIDES = ("prefill", "decode")
WAYS: dict[str, dict[str, Any]] = {
    "tcp": {},
    "tcp through sockets": {"same_host_copy": False},
    "nixl": {},
    "nixl over TCP": {"ucx": {"TLS": "tcp"}},
    "mooncake": {},
}
"""Backends with their options. Through sockets, a peer that is stopped blocks the thread that writes to it."""
KEPT = 5.0
"""Seconds after which memory counts as kept."""
KEEPS = ("mooncake",)
"""Ways whose library never says when it has stopped to read what a batch named that failed: prefill keeps that."""


@dataclass
class Tally:
    """What a run came to.

    Attributes:
        deaths: How often the other side died, or stopped and went on.
        rooms: Rooms of the survivor that were under way then, by how they ended.
        kept: Rooms whose memory is not given back, where nothing proves that the library has let go of it.
        recovered: How often a room over the same peer worked afterwards.
        longest: Most seconds from a death to memory given back, and to the room that worked.
        held: What the survivor's process holds after each recovery.
    """

    deaths: int = 0
    rooms: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    recovered: int = 0
    longest: list[float] = field(default_factory=lambda: [0.0, 0.0])
    held: list[dict[str, int]] = field(default_factory=list)

    def growth(self, what: str) -> int:
        """What the survivor's process has gained since it was warm."""
        if not self.held:
            return 0
        return self.held[-1][what] - self.held[min(WARM, len(self.held)) - 1][what]

    def __str__(self) -> str:
        quiet, served = self.longest
        grown = ", ".join(f"{what} {self.growth(what):+}" for what in ("fds", "threads"))
        return (
            f"{self.deaths} times, {self.recovered} recovered, {self.rooms['failed']} rooms failed and "
            f"{self.rooms['succeeded']} succeeded meanwhile, {self.kept} kept their memory, "
            f"memory given back after {quiet:.1f} s and served after {served:.1f} s at most, "
            f"survivor {grown}, rss {self.growth('rss') / (1 << 20):+.1f} MiB"
        )


class Repeated:
    """A survivor, and a side that dies and comes back.

    Args:
        two_engines: Where processes come from.
        way: How bytes move.
        side: Which side dies.
        seed: Of the moments.
        stop: Whether it is only stopped: then nothing proves that its library reads no more.
    """

    def __init__(self, two_engines: TwoEngines, way: str, side: str, seed: int, *, stop: bool) -> None:
        self._engines = two_engines
        self._config = {**LIVE, "options": WAYS[way]}
        self._keeps = stop and way in KEEPS and side == "decode"
        two_engines.untidy |= self._keeps
        self._order = random.Random(seed)
        self._role = side
        self._survivor_role = SIDES[1 - SIDES.index(side)]
        self._address = free_addresses(1)[0]
        self._survivor = two_engines.open(self._survivor_role, POOLS, **self._config)
        self._pair = self._together(self._open())
        self.tally = Tally()

    def _open(self) -> LinkHandle:
        """The side that dies, in a new process at its address."""
        engine = self._engines.engine()
        return self._engines.open(self._role, POOLS, engine=engine, listen=self._address, **self._config)

    def _together(self, other: LinkHandle) -> Pair:
        sides = {self._survivor_role: self._survivor, self._role: other}
        return Pair(sides["prefill"], sides["decode"])

    @property
    def _other(self) -> LinkHandle:
        return self._pair.prefill if self._role == "prefill" else self._pair.decode

    def die(self, *, stop: bool = False) -> None:
        """One death, and the recovery from it. With ``stop``, the side is stopped for a while instead, and goes on."""
        pair, doomed = self._pair, self._other.engine
        pair.run(SMALL)
        cases, receiving, sending = self._begin()
        rooms = receiving if self._role == "prefill" else sending
        time.sleep(self._order.choice((0.0, 0.002, 0.01)))
        began = time.monotonic()
        if stop:
            doomed.stop()
            time.sleep(STOP)
            for room in rooms:  # until the survivor has noticed, which may take longer on a busy machine
                room.wait(SOON)
            doomed.go_on()
            receiving[0].abort()  # where it is decode that goes on, it may still wait for prefill's engine
            rooms = [*receiving, *sending]
        else:
            doomed.kill()
        self._ended(rooms)
        # The bytes of a room that failed may be anything; also on the side that wrote, nothing else has changed.
        for case in cases:
            pair.pardon(case)
            pair.done(case)
        until(lambda: self._at_rest(self._survivor), SOON)
        self.tally.longest[0] = max(self.tally.longest[0], time.monotonic() - began)
        if stop:
            until(lambda: self._at_rest(self._other), SOON)
            until(lambda: self._served(pair), SOON)
        else:
            self._other.memory.path.unlink()
            doomed.links.clear()  # and with them, what is mapped of their memory here
            self._pair = self._together(self._open())
        self._pair.verify()
        self._pair.run(SMALL)
        self.tally.longest[1] = max(self.tally.longest[1], time.monotonic() - began)
        self.tally.deaths += 1
        self.tally.recovered += 1
        self.tally.held.append(self._survivor.engine(Host.usage))

    def _served(self, pair: Pair) -> bool:
        """Whether a room works. A decode that goes on may ask before it has heard that prefill gave it up."""
        case = pair.case(SMALL)
        receiving, sending = pair.begin(case)
        pair.push(sending, case)
        seen = receiving.wait(SOON)
        if seen.status is Status.SUCCEEDED:
            pair.ended(case, receiving, sending)
            return True
        assert seen.reason is not None
        assert seen.reason.code == "peer.lost", seen
        sending.abort()
        assert all(room.wait(SOON, quiesced=True).quiesced for room in (receiving, sending))
        pair.pardon(case)
        pair.done(case)
        return False

    def _begin(self) -> tuple[list[Case], list[RoomHandle], list[RoomHandle]]:
        """Rooms in several phases: asked for alone, waiting for the rest, and in the middle of a copy."""
        pair = self._pair
        asked, waiting, moving = pair.case(SMALL), pair.case(SMALL), pair.case(LARGE)
        receiving = [pair.receive(case) for case in (asked, waiting, moving)]
        sending = [pair.send(case) for case in (waiting, moving)]
        sending[0].push(waiting.span(0, 16, pair.prefill.memory.pools), span=(0, 16))
        receiving[1].reach(Status.TRANSFERRING)
        sending[1].reach(Status.WAITING)
        pair.push(sending[1], moving)
        return [asked, waiting, moving], receiving, sending

    def _ended(self, rooms: Sequence[RoomHandle]) -> None:
        for room in rooms:
            seen = room.wait(KEPT if self._keeps else SOON, quiesced=True)
            assert seen.status in (Status.FAILED, Status.SUCCEEDED), seen
            assert seen.quiesced or self._keeps, seen
            self.tally.kept += not seen.quiesced
            assert seen.reason is None or seen.reason.code in ("peer.lost", "room.aborted", "backend.transfer"), seen
            self.tally.rooms[seen.status.name.lower()] += 1

    def _at_rest(self, link: LinkHandle) -> bool:
        seen = link.snapshot()
        kept = self.tally.kept if link is self._survivor else 0
        rooms = {status: count for status, count in seen["rooms"].items() if count}
        return len(seen["quarantined"]) == kept and rooms == ({"failed": kept} if kept else {})


def on(now: Sequence[tuple[str, int]], later: Sequence[tuple[str, int]]) -> pytest.MarkDecorator:
    """Ways and how many times: those for every run, and those for `make soak`, which take minutes each."""
    cases = []
    for way, times in (*now, *later):
        marks = [pytest.mark.soak] if (way, times) in later else []
        cases.append(pytest.param(way.split()[0], way, times, id=f"{way} {times}".replace(" ", "-"), marks=marks))
    return pytest.mark.parametrize(("backend", "way", "times"), cases, indirect=["backend"], scope="session")


def run(two_engines: TwoEngines, way: str, side: str, times: int, tell: Callable[[str], None], *, stop: bool) -> None:
    seed = int(os.environ.get("STATELINK_SEED") or secrets.randbits(32))
    repeated = Repeated(two_engines, way, side, seed, stop=stop)
    try:
        for _ in range(times):
            repeated.die(stop=stop)
    finally:
        tally = repeated.tally
        tell(f"{side} {'stopped' if stop else 'killed'} over {way}: {tally}, seed {seed}")
    # One connection more or less may be in the making; what is kept for each death would be many.
    assert tally.growth("fds") < 4 + times // 4, tally.held
    assert tally.growth("threads") < 4 + times // 4, tally.held


@pytest.mark.parametrize("side", SIDES)
@on([("tcp", 2)], [("tcp", 100), ("tcp through sockets", 30), ("nixl", 30), ("nixl over TCP", 30), ("mooncake", 30)])
def test_a_side_is_killed_again_and_again(
    two_engines: TwoEngines, way: str, side: str, times: int, tell: Callable[[str], None]
) -> None:
    run(two_engines, way, side, times, tell, stop=False)


@pytest.mark.parametrize("side", SIDES)
@on([], [("tcp", 20), ("tcp through sockets", 20), ("nixl over TCP", 10), ("mooncake", 10)])
def test_a_side_is_stopped_again_and_again(
    two_engines: TwoEngines, way: str, side: str, times: int, tell: Callable[[str], None]
) -> None:
    """For longer than the other side waits for it; then it goes on."""
    run(two_engines, way, side, times, tell, stop=True)
