"""Rooms are aborted at random moments, and their memory belongs to somebody else at once: no foreign byte, ever.

Whatever is free holds the bytes of its last owner, on both sides; whatever is in use, bytes that say whose they are.
All of it is looked at outside of Statelink, in the engines' processes and again in the test's. The same rooms with the
checks taken out must find foreign bytes, or all of this would prove nothing: engines then use memory again that is not
quiesced, and backends say that nothing can land any more when that is not so.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.worker import Host
from tests.link.processes import sides
from tests.link.processes.sides import POOLS

if TYPE_CHECKING:
    from tests.helpers.engine import LinkHandle
    from tests.link.conftest import TwoEngines

WATCHED = "tests.link.processes.watched"
SIDES = ("prefill", "decode")
SHORT, LONG = 200, 20_000
"""Rooms of a run; four fifths of them or more end in failure."""
TRIES = 10
"""How often `SHORT` rooms are played without checks, until one of them finds bytes of another room."""
BROKEN = 150
"""Rooms of a run in which batches fail in the library."""
ABORTED = 15_000
"""Rooms of a long run that end in failure, at least."""
PATIENCE = 100.0, 3600.0
"""Seconds that a run may take, and a long one."""
LIVE: dict[str, Any] = {"heartbeat": 0.25, "liveness": 1.5, "deadline": 8.0}
PHASES = 6
"""Of a room; in each of them, prefill aborts some."""
STOP = 2.5
"""Seconds for which a peer is stopped: longer than liveness."""
SOCKETS = {"same_host_copy": False}
STAGED = {"mode": "always", "ring_bytes": 512 << 10, "parcel_bytes": 128 << 10}
"""Rings of four parcels, which a dozen rooms share."""
WAYS: dict[str, dict[str, Any]] = {
    "tcp": {},
    "tcp through sockets": {"options": SOCKETS},
    "nixl": {},
    "nixl over TCP": {"options": {"ucx": {"TLS": "tcp"}}},
    "mooncake": {},
    "tcp staged": {"staging": STAGED},
    "tcp through sockets staged": {"options": SOCKETS, "staging": STAGED},
    "nixl staged": {"staging": STAGED},
    "nixl over TCP staged": {"options": {"ucx": {"TLS": "tcp"}}, "staging": STAGED},
    "mooncake staged": {"staging": STAGED},
    "mori": {},
    "mori staged": {"staging": STAGED},
}
"""Backends and how they move bytes."""


@dataclass
class Outcome:
    """What a run came to.

    Attributes:
        seed: It was drawn from.
        aborted: Rooms that failed on prefill, per phase and who aborted.
        in_flight: Rooms that failed there while the library had a batch of theirs.
        sides: Of each side, what `sides.Side.finish` returns.
        foreign: Bytes that were somebody else's.
        wrong: Rooms that succeeded on decode without all of their bytes.
    """

    seed: int
    aborted: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    sides: dict[str, dict[str, Any]] = field(default_factory=dict)
    foreign: int = 0
    wrong: int = 0

    @property
    def failed(self) -> int:
        """Rooms that failed on prefill."""
        return sum(count for how, count in self.sides["prefill"]["ended"].items() if how != "succeeded")

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in vars(self).items())


class Run:
    """Two engines, and a way to move bytes between them. No link is open yet.

    Args:
        two_engines: The processes.
        way: Name of the way.
        config: What its links are configured with.
    """

    def __init__(self, two_engines: TwoEngines, way: str, config: dict[str, Any]) -> None:
        self.two_engines, self.way, self._config = two_engines, way, config
        self.engines = (two_engines.prefill, two_engines.decode)
        self.links: list[LinkHandle] = []
        self._marks = two_engines.folder / "marks"
        self.seed = int(os.environ.get("STATELINK_SEED") or secrets.randbits(32))
        self.open()  # what libraries keep once they were used is there from now on
        self.before = self.close()

    def open(self, *, lies: bool = False, **config: Any) -> None:
        """Open both links, and let two rooms succeed: from then on, they know each other."""
        given: dict[str, Any] = {"slice_bytes": 128 << 10, "deadline": 60.0, **self._config, **config}
        for engine in self.engines:
            engine.run(WATCHED, "lie", False)
        opening = [
            self.two_engines.begin_open(role, POOLS, backend=f"watched-{self.two_engines.backend}", **given)
            for role in SIDES
        ]
        self.links = [opened() for opened in opening]
        outcome = self.play(2, aborts=0.0)
        assert all(outcome.sides[side]["ended"] == {"succeeded": 2} for side in SIDES), outcome
        for engine in self.engines:
            engine.run(WATCHED, "lie", lies)

    def close(self) -> list[Any]:
        """Close both, and let go of all that was theirs; what each process holds then."""
        for engine in self.engines:
            assert engine(Host.close_all, 5.0)
            engine.links.clear()
        return [{name: engine(Host.usage)[name] for name in ("fds", "tasks")} for engine in self.engines]

    def begin(self, rooms: int, *, aborts: float = 0.85, breaks: float = 0.0, early: bool = False) -> None:
        """Let rooms be played. With ``early``, memory of failed rooms is used again before it is quiesced."""
        np.zeros(2, np.int64).tofile(self._marks)
        draws = {"seed": self.seed, "aborts": aborts, "breaks": breaks}
        for link in self.links:
            given = (link.key, self._marks, self.links[0].address, rooms, early, draws)
            link.engine.start(sides.play, *given)

    def wait_for(self, rooms: int) -> None:
        """Return once both sides are through with so many rooms."""
        until = time.monotonic() + PATIENCE[0]
        while np.fromfile(self._marks, np.int64).min() < rooms:
            assert time.monotonic() < until, "the engines play no rooms"
            time.sleep(0.01)

    def finish(self) -> Outcome:
        """Wait until both sides have come to rest, and look at every byte."""
        outcome = Outcome(self.seed)
        for link in self.links:
            link.engine.result(PATIENCE[1])
        time.sleep(0.2)  # what is late has time to land
        for link in self.links:
            link.engine.start(sides.finish, link.key)
        for side, link in zip(SIDES, self.links, strict=True):
            seen = link.engine.result()
            outcome.aborted.update(seen.pop("phases"))
            outcome.in_flight += seen.pop("in_flight")
            outcome.wrong += seen["wrong"]
            outcome.foreign += seen["foreign"]
            outcome.foreign += sum(item.foreign(link.memory, key) for item, key in seen.pop("free"))
            outcome.sides[side] = seen
        return outcome

    def play(self, rooms: int, **drawn: Any) -> Outcome:
        self.begin(rooms, **drawn)
        return self.finish()


def on(*ways: str) -> pytest.MarkDecorator:
    """Ways with their backends."""
    cases = [pytest.param(way.split()[0], way, id=way.replace(" ", "-")) for way in ways]
    return pytest.mark.parametrize(("backend", "way"), cases, indirect=["backend"], scope="session")


@pytest.fixture
def run(two_engines: TwoEngines, way: str) -> Run:
    return Run(two_engines, way, WAYS[way])


def check(outcome: Outcome, rooms: int) -> None:
    """Every byte is whose it should be, and aborts met the phases that so many rooms have to meet."""
    assert (outcome.foreign, outcome.wrong) == (0, 0), outcome
    assert outcome.failed > 0.7 * rooms, outcome
    assert outcome.sides["decode"]["ended"]["succeeded"] > 0, outcome
    # In few rooms, whether an abort meets a phase that is short is left to chance.
    many = rooms >= LONG
    for side, phases in (("prefill", ("mid-chunk",)), ("decode", ("mid-chunk",) if many else ())):
        for phase in ("before metadata", "before send", *phases):
            assert outcome.aborted[f"{side}: {phase}"], f"{side} never aborted {phase}\n{outcome}"
    if many:
        assert sum(each.startswith("prefill: ") for each in outcome.aborted) == PHASES, outcome
    assert outcome.in_flight > (rooms // 30 if many else 0), outcome


def nothing_is_left(run: Run, outcome: Outcome) -> None:
    """No room, no grant, no batch and no space while the links are open; no thread and no descriptor after."""
    for link in run.links:
        seen = link.snapshot()
        for space in seen["strategies"].values():
            assert (space["in_use"], space["waiting"], space["quarantined"]) == (0, 0, 0), seen
        assert not any(seen["rooms"].values()), seen
        assert seen["quarantined_bytes"] == {}, seen
        assert link.engine.run(WATCHED, "held") == 0, seen
    assert run.close() == run.before, outcome


def play(run: Run, rooms: int) -> Outcome:
    run.open()
    outcome = run.play(rooms, aborts=0.95)
    print(f"\n--- with checks\n{outcome}")
    check(outcome, rooms)
    # Over tcp, that decode has taken a grant back may be known before the reason why.
    known = {"room.aborted", "backend.transfer"} if run.two_engines.backend == "tcp" else {"room.aborted"}
    assert all(set(side["ended"]) <= {"succeeded", *known} for side in outcome.sides.values()), outcome
    nothing_is_left(run, outcome)
    run.open(lies=True)
    # Chance decides whether an abort meets a write that is under way. So a few hundred rooms may all come out right.
    for _ in range(TRIES):
        run.seed += 1  # another choice of rooms and moments
        without = run.play(SHORT, early=True)
        print(f"\n--- without checks\n{without}")
        if without.foreign:
            break
    assert without.foreign > 0, without
    run.two_engines.untidy = True
    return outcome


def play_long(run: Run, tell: Callable[[str], None]) -> None:
    began = time.monotonic()
    outcome = play(run, LONG)
    checked = sum(side["checked"] for side in outcome.sides.values())
    tell(
        f"aborted rooms over {run.way}: {outcome.failed} aborted of {LONG}, {outcome.foreign} foreign bytes of "
        f"{checked}, {outcome.wrong} wrong successes, {time.monotonic() - began:.0f} s"
    )
    assert outcome.failed >= ABORTED, outcome


@on("tcp", "nixl", "mooncake", "tcp staged")
def test_memory_of_aborted_rooms_is_reused_at_once(run: Run) -> None:
    play(run, SHORT)


@pytest.mark.soak  # minutes for each way: 20,000 rooms
@on(*WAYS)
def test_memory_of_thousands_of_aborted_rooms(run: Run, tell: Callable[[str], None]) -> None:
    play_long(run, tell)


def stopped(run: Run, rooms: int, *, lies: bool = False) -> Outcome:
    """Play rooms while each side is stopped for longer than its peer waits for it: each amid a third of the rooms."""
    run.open(lies=lies, **LIVE)
    run.begin(rooms, early=lies)
    for part, engine in enumerate(reversed(run.engines), 1):
        run.wait_for(part * rooms // 3)
        engine.stop()
        time.sleep(STOP)
        engine.go_on()
    outcome = run.finish()
    print(f"\n--- stopped{', without checks' if lies else ''}\n{outcome}")
    return outcome


@pytest.mark.soak  # a minute for each way: sides are stopped for longer than liveness, with thousands of rooms
@on("tcp through sockets", "nixl over TCP", "tcp through sockets staged", "nixl over TCP staged")
def test_late_bytes_of_a_stopped_peer(run: Run) -> None:
    """They land in quarantine, or nowhere; the survivor gives nothing back before the peer goes on."""
    outcome = stopped(run, 3000)
    assert outcome.foreign == 0, outcome
    assert any("peer.lost" in side["ended"] for side in outcome.sides.values()), outcome
    if run.two_engines.backend == "nixl":
        lost = LIVE["liveness"] + 2 * LIVE["heartbeat"]  # seconds after which a stopped peer is lost, at most
        assert max(side["waited"] for side in outcome.sides.values()) > STOP - lost, outcome
    nothing_is_left(run, outcome)
    assert stopped(run, 3000, lies=True).foreign > 0
    run.two_engines.untidy = True


@on("mooncake")
def test_batches_fail_in_the_library(run: Run) -> None:
    """Nobody knows when the rest of such a batch has landed: both sides keep its memory, and say so."""
    run.open()
    outcome = run.play(BROKEN, breaks=0.06)
    print(f"\n--- with failing batches\n{outcome}")
    assert outcome.foreign == 0, outcome
    assert outcome.sides["prefill"]["stuck"], outcome
    assert outcome.sides["prefill"]["stuck"] == outcome.sides["decode"]["stuck"], outcome
    for side, link in zip(outcome.sides.values(), run.links, strict=True):
        seen = link.snapshot()
        assert seen["quarantined"] == side["stuck"]
        assert 0 < sum(seen["quarantined_bytes"].values()) <= side["held"]
    for engine in run.engines:
        engine(Host.close_all, 0.5)
    run.open(lies=True)
    outcome = run.play(BROKEN, breaks=0.06, early=True)
    print(f"\n--- without checks\n{outcome}")
    assert outcome.foreign > 0, outcome
    run.two_engines.untidy = True
