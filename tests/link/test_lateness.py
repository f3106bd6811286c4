"""Hostile frames of every kind at both sides of an honest pair, which has rooms with deadlines meanwhile.

Each link is in a process of its own, and the frames come from this one. No room of the pair may fail or get wrong
bytes, and a room that nobody serves fails at its deadline. How late everything comes is measured; the long run asserts
that no deadline comes a second late.
"""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from tests.helpers.pools import Kv
from tests.link import honest
from tests.link.hostile import KINDS, Target
from tests.wire.noise import resident

if TYPE_CHECKING:
    from tests.helpers.engine import LinkHandle
    from tests.link.conftest import TwoEngines

HONEST = "tests.link.honest"
POOLS = (Kv(layers=(0,), pages=1024, heads=1, dtype="uint8"),)
MEGABYTE = 1 << 20
MOST = 256
"""Megabytes by which a side may grow: less than what it is sent."""
LATEST = 1.0
"""Seconds that a deadline may come late in the long run."""
SHARE = 1000
"""The short run sends one frame for each so many of the long one, and at least one of each kind."""


@dataclass
class Siege:
    """An honest pair, and what is done to it.

    Attributes:
        links: By role.
        phases: Kind of frames, whom they went to, and when that began and ended.
        sent: Frames.
    """

    links: dict[str, LinkHandle]
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    sent: int = 0

    def begin(self) -> None:
        self.start = time.monotonic() + 0.2
        for link in self.links.values():
            link.engine.run_here(HONEST, "begin", link.key, self.links["prefill"].address, self.start)

    def rooms(self) -> range:
        """Ids of requests that are, or will soon be, open."""
        now = int((time.monotonic() - self.start) / honest.PERIOD)
        return range(max(honest.FIRST + now - 10, honest.FIRST), honest.FIRST + max(now, 0) + 30)

    def attack(self, kind: str, count: int, order: random.Random) -> None:
        """Send frames of a kind, the same number to each side."""
        sides = KINDS[kind].sides
        began = time.monotonic()
        for role in sides:
            KINDS[kind].send(Target(self.links[role], role, self.rooms), -(-count // len(sides)), order)
            self.sent += -(-count // len(sides))
        self.phases.append((kind, began, time.monotonic()))

    def end(self) -> dict[str, honest.Found]:
        last = time.monotonic() + 0.5
        for link in self.links.values():
            link.engine.ask("run_here", HONEST, "end", (link.key, last))
        return {role: link.engine.answer() for role, link in self.links.items()}


def besiege(two_engines: TwoEngines, scale: int, tell: Callable[[str], None]) -> float:
    """Every kind of frame; returns by how many seconds the latest deadline came late."""
    seed = int(os.environ.get("STATELINK_SEED") or secrets.randbits(32))
    order = random.Random(seed)
    pair = two_engines.pair(POOLS, POOLS, deadline=60.0)
    pair.run(64)
    siege = Siege({"prefill": pair.prefill, "decode": pair.decode})
    before = {role: resident(link.engine.pid) for role, link in siege.links.items()}
    siege.begin()
    time.sleep(0.5)
    siege.phases.append(("nothing", siege.start, time.monotonic()))
    for kind, (_, count, _) in KINDS.items():
        siege.attack(kind, max(2, count // scale), order)
        tell(f"hostile frames, {kind}: sent in {siege.phases[-1][2] - siege.phases[-1][1]:.1f} s")
    found = siege.end()
    late = [each for side in found.values() for each in side.late]
    took = [each for side in found.values() for each in side.took]
    for kind, began, ended in siege.phases:
        worst = [
            max((took for at, took in seen if at + took >= began and at < ended), default=0.0) for seen in (late, took)
        ]
        tell(f"hostile frames, {kind}: latest deadline {worst[0]:.3f} s late, longest request {worst[1]:.3f} s")
    grown = {role: (resident(link.engine.pid) - before[role]) / MEGABYTE for role, link in siege.links.items()}
    seconds = sorted(each for _, each in took)
    wrong = [each for side in found.values() for each in side.wrong]
    latest = max(each for _, each in late)
    tell(
        f"hostile frames: {siege.sent} sent, latest of {len(late)} deadlines {latest:.3f} s late; {len(took)} honest "
        f"rooms, {len(wrong)} failed or wrong, median {1e3 * seconds[len(seconds) // 2]:.1f} ms, longest "
        f"{seconds[-1]:.3f} s; memory prefill {grown['prefill']:+.0f} MiB, decode {grown['decode']:+.0f} MiB; "
        f"seed {seed}"
    )
    assert not wrong, wrong[:5]
    assert max(grown.values()) < MOST
    assert len(took) > 10
    for link in siege.links.values():
        seen = link.snapshot()
        assert seen["quarantined"] == []
        assert not any(seen["rooms"].values()), seen["rooms"]
    return latest


@pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")
def test_an_honest_pair_is_served_among_hostile_frames(two_engines: TwoEngines, tell: Callable[[str], None]) -> None:
    besiege(two_engines, SHARE, tell)


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")
def test_no_deadline_is_late_among_a_hundred_thousand_hostile_frames(
    two_engines: TwoEngines, tell: Callable[[str], None]
) -> None:
    assert besiege(two_engines, 1, tell) <= LATEST
