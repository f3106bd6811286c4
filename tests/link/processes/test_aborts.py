"""Rooms are aborted at random moments, and their memory belongs to somebody else at once: no foreign byte, ever.

Whatever is free holds a poison of its owner, on both sides; whatever is in use, bytes that say whose they are. All of
it is looked at outside of Statelink, in the engines' processes and again in the test's. The same rooms with the checks
taken out must find foreign bytes, or all of this would prove nothing.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from tests.helpers.availability import OPTIONS, environment_of
from tests.quiescence.meddling import PHASES
from tests.quiescence.stage import SIDES, Outcome, Stage

SHORT, LONG = 300, 18_000
"""Rooms of a run; four fifths of them or more end in failure."""
ABORTED = 15_000
"""Rooms of a long run that end in failure, at least."""
LIVE: dict[str, Any] = {"heartbeat": 0.25, "liveness": 1.5, "deadline": 8.0}
STOP = 2.5
"""Seconds for which a peer is stopped: longer than liveness."""
SMALL = {"same_host_copy": False, "send_buffer": 64 << 10, "receive_buffer": 64 << 10}
STAGED = {"mode": "always", "ring_bytes": 512 << 10, "parcel_bytes": 128 << 10}
"""Rings of four parcels, which a dozen rooms share."""
WAYS: dict[str, dict[str, Any]] = {
    "tcp": {},
    "tcp through sockets": {"options": SMALL},
    "nixl": {},
    "nixl over TCP": {"options": {"ucx": {"TLS": "tcp"}}},
    "mooncake": {},
    "tcp staged": {"staging": STAGED},
    "tcp through sockets staged": {"options": SMALL, "staging": STAGED},
    "nixl staged": {"staging": STAGED},
    "nixl over TCP staged": {"options": {"ucx": {"TLS": "tcp"}}, "staging": STAGED},
    "mooncake staged": {"staging": STAGED},
}
"""Backends and how they move bytes."""
SIMULATED: dict[str, dict[str, Any]] = {
    f"{name}{how}": {"options": OPTIONS.get(name, {}), **more}
    for name in ("mori", "ascend")
    for how, more in (("", {}), (" staged", {"staging": STAGED}))
}
"""Those whose library may be a simulator."""


class Ground(NamedTuple):
    """Two engines that are warm, what each of them holds without a link, and how they open one."""

    stage: Stage
    config: dict[str, Any]
    before: list[dict[str, Any]]


def drawn() -> int:
    """Seed of a run; one that failed can be given again."""
    return int(os.environ.get("STATELINK_SEED") or secrets.randbits(32))


@pytest.fixture
def ground(backend: str, way: str) -> Iterator[Ground]:
    assert way.split()[0] == backend
    with Stage(backend) as stage:
        stage.open(**WAYS[way])
        yield Ground(stage, WAYS[way], stage.both("close"))


@pytest.fixture
def simulated(way: str) -> Iterator[Ground]:
    """The same, over the library that is there, or its simulator."""
    backend = way.split()[0]
    with Stage(backend, environment=environment_of(backend)) as stage:
        stage.open(**SIMULATED[way])
        yield Ground(stage, SIMULATED[way], stage.both("close"))


def on(*ways: str) -> pytest.MarkDecorator:
    """Ways with their backends."""
    cases = [pytest.param(way.split()[0], way, id=way.replace(" ", "-")) for way in ways]
    return pytest.mark.parametrize(("backend", "way"), cases, indirect=["backend"], scope="session")


def check(outcome: Outcome, rooms: int) -> None:
    """Every phase was hit, and every byte is whose it should be."""
    assert (outcome.foreign, outcome.wrong) == (0, 0), outcome
    assert outcome.failed > 0.7 * rooms, outcome
    assert outcome.ended["decode"]["succeeded"] > 0, outcome
    for phase in PHASES:
        assert outcome.hits(phase, "prefill"), f"prefill never aborted {phase}\n{outcome}"
    for phase in ("before metadata", "before send", "mid-chunk"):
        assert outcome.hits(phase, "decode"), f"decode never aborted {phase}\n{outcome}"
    assert outcome.in_flight > rooms // 30, outcome


def nothing_is_left(ground: Ground, outcome: Outcome) -> None:
    """No room, no handle and no space while the links are open; no thread and no descriptor after."""
    for seen in ground.stage.both("snapshot"):
        for space in seen["strategies"].values():
            assert (space["lent"], space["waiting"], space["quarantined"]) == (0, 0, 0), seen
        assert not any(seen["rooms"].values()), seen
        assert seen["quarantined_bytes"] == {}, seen
        assert seen["backend"] == 0, seen
    assert ground.stage.both("close") == ground.before, outcome


def bytes_are_foreign_without_checks(ground: Ground, seed: int) -> None:
    """Memory is used again at the failure: the test finds out."""
    ground.stage.open(unchecked=True, **ground.config)
    outcome = ground.stage.run(seed, SHORT, unchecked=True)
    print(f"\n--- without checks\n{outcome}")
    assert outcome.foreign > 0, outcome


def play(ground: Ground, rooms: int) -> Outcome:
    seed = drawn()
    ground.stage.open(**ground.config)
    outcome = ground.stage.run(seed, rooms, aborts=0.95)
    print(f"\n--- with checks\n{outcome}")
    check(outcome, rooms)
    # Over tcp, that decode has taken a grant back may be known before the reason why.
    known = {"room.aborted", "backend.transfer"} if ground.stage.backend == "tcp" else {"room.aborted"}
    assert all(set(reasons) <= known for reasons in outcome.reasons.values()), outcome
    nothing_is_left(ground, outcome)
    bytes_are_foreign_without_checks(ground, seed)
    return outcome


def play_long(ground: Ground, way: str, tell: Callable[[str], None]) -> None:
    began = time.monotonic()
    outcome = play(ground, LONG)
    tell(
        f"aborted rooms over {way}: {outcome.failed} aborted of {LONG}, {outcome.foreign} foreign bytes of "
        f"{outcome.checked}, {outcome.wrong} wrong successes, {time.monotonic() - began:.0f} s"
    )
    assert outcome.failed >= ABORTED, outcome


@on("tcp", "nixl", "mooncake", "tcp staged")
def test_memory_of_aborted_rooms_is_reused_at_once(ground: Ground) -> None:
    play(ground, SHORT)


@pytest.mark.soak
@pytest.mark.parametrize("way", SIMULATED)
def test_memory_of_thousands_of_aborted_rooms_over_a_simulator(
    simulated: Ground, way: str, tell: Callable[[str], None]
) -> None:
    play_long(simulated, way, tell)


@pytest.mark.soak
@on(*WAYS)
def test_memory_of_thousands_of_aborted_rooms(ground: Ground, way: str, tell: Callable[[str], None]) -> None:
    play_long(ground, way, tell)


def stopped(ground: Ground, seed: int, rooms: int, *, unchecked: bool = False) -> Outcome:
    """Play rooms while each side is stopped for longer than its peer waits for it."""
    ground.stage.open(unchecked=unchecked, **ground.config, **LIVE)
    ground.stage.begin(seed, rooms, unchecked=unchecked)
    for engine in reversed(ground.stage.engines):
        time.sleep(1.0)
        engine.process.send_signal(signal.SIGSTOP)
        time.sleep(STOP)
        engine.process.send_signal(signal.SIGCONT)
    outcome = ground.stage.finish()
    print(f"\n--- stopped{', without checks' if unchecked else ''}\n{outcome}")
    return outcome


@pytest.mark.soak
@on("tcp through sockets", "nixl over TCP", "tcp through sockets staged", "nixl over TCP staged")
def test_late_bytes_of_a_stopped_peer(ground: Ground) -> None:
    """They land in quarantine, or nowhere; the survivor gives nothing back before the peer goes on."""
    seed = drawn()
    outcome = stopped(ground, seed, 3000)
    assert outcome.foreign == 0, outcome
    assert any("peer.lost" in reasons for reasons in outcome.reasons.values()), outcome
    if ground.stage.backend == "nixl":
        assert max(outcome.waited.values()) > STOP - LIVE["liveness"], outcome
    nothing_is_left(ground, outcome)
    assert stopped(ground, seed, 3000, unchecked=True).foreign > 0


@on("mooncake")
def test_batches_fail_in_the_library(ground: Ground) -> None:
    """Nobody knows when the rest of such a batch has landed: both sides keep its memory, and say so."""
    seed = drawn()
    ground.stage.open(**ground.config)
    outcome = ground.stage.run(seed, SHORT // 2, breaks=0.06)
    print(f"\n--- with failing batches\n{outcome}")
    assert outcome.foreign == 0, outcome
    assert outcome.stuck["prefill"], outcome
    assert sorted(outcome.stuck["prefill"]) == sorted(outcome.stuck["decode"]), outcome
    for side, seen in zip(SIDES, ground.stage.both("snapshot"), strict=True):
        assert seen["quarantined"] == sorted(outcome.stuck[side])
        assert 0 < sum(seen["quarantined_bytes"].values()) <= outcome.held[side]
    ground.stage.both("close")
    ground.stage.open(unchecked=True, **ground.config)
    outcome = ground.stage.run(seed, SHORT // 2, breaks=0.06, unchecked=True)
    print(f"\n--- without checks\n{outcome}")
    assert outcome.foreign > 0, outcome
