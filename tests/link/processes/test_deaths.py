"""Deaths with rooms in every phase: each affected room fails with a reason, memory comes back, others are served.

Liveness is two seconds here. Nothing is asserted of time but that nobody waits for a deadline, which is far off; what
the others had to wait meanwhile is measured, and shown with ``-s``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.pair import Pair
from tests.helpers.peers import until
from tests.helpers.pools import Kv, hybrid
from tests.helpers.worker import Host

from statelink import Status
from statelink.testing import free_addresses

if TYPE_CHECKING:
    from tests.helpers.engine import RoomHandle
    from tests.helpers.expect import Case
    from tests.link.conftest import TwoEngines
    from tests.link.processes.conftest import Cable

LIVE: dict[str, Any] = {"heartbeat": 0.25, "liveness": 2.0, "deadline": 90.0}
SOON = 20.0
"""Seconds within which something has to happen, on a machine that has other things to do."""
POOLS = hybrid(kv=Kv(pages=96), swa=None, dsa=None)


def on(*now: str, later: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Cases, written as the backend, what else there is to choose, and whether staging is forced on.

    Those that are for `make soak` come second: each takes seconds of waiting for liveness, and differs from one of the
    first in the backend or in staging alone.
    """

    def case(text: str, *marks: pytest.MarkDecorator) -> Any:
        words = text.removesuffix(" staged").split()
        if text.endswith(" staged"):
            marks = (*marks, pytest.mark.staged)
        return pytest.param(*words, id=text, marks=marks)

    cases = [*map(case, now), *(case(each, pytest.mark.soak) for each in later)]
    names = ["backend", "choice"][: len(cases[0].values)]
    return pytest.mark.parametrize(names, cases, indirect=["backend"], scope="session")


class Phases:
    """One room in each phase between two links."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.cases: dict[str, Case] = {}
        self.decode: dict[str, RoomHandle] = {}
        self.prefill: dict[str, RoomHandle] = {}
        pair.prefill.engine.gate("never")
        for phase in ("opened", "asked", "waiting", "mid-chunk", "before the last push"):
            case = self.cases[phase] = pair.case(64)
            if phase == "opened":  # nothing was asked of prefill: it is not affected
                self.decode[phase] = pair.decode.receive(case.room, pair.prefill.address, case.tokens)
                continue
            self.decode[phase] = pair.receive(case)
            if phase == "asked":
                continue
            sending = self.prefill[phase] = pair.send(case)
            pools = pair.prefill.memory.pools
            if phase == "mid-chunk":
                sending.push(case.span(0, 32, pools), span=(0, 32))
                sending.push(case.span(32, 64, pools), span=(32, 64), ready="never")
                self.decode[phase].reach(Status.TRANSFERRING)
            elif phase == "before the last push":
                sending.push({"kv": case.source["kv"]}, span=(0, 64), last=False)
                self.decode[phase].reach(Status.TRANSFERRING)
            else:
                sending.reach(Status.WAITING)

    def fail(self, side: str, other: str) -> None:
        """Every affected room of one side fails, and says why and who."""
        rooms = self.decode if side == "decode" else self.prefill
        peer = self.pair.prefill.name if side == "decode" else self.pair.decode.name
        for phase, room in rooms.items():
            if phase != "opened":
                text = room.failed(SOON)
                assert f"{other} was lost" in text, (phase, text)
                assert peer in text, (phase, text)
                assert f"room {self.cases[phase].room}" in text, (phase, text)

    def quiet(self, side: str) -> None:
        """The memory of every affected room comes back."""
        rooms = self.decode if side == "decode" else self.prefill
        for phase, room in rooms.items():
            assert phase == "opened" or room.wait(SOON, quiesced=True).quiesced, phase

    def pardon(self) -> None:
        """Their items may hold anything from now on."""
        for case in self.cases.values():
            self.pair.pardon(case)

    def done(self) -> None:
        """Their items are for others."""
        for case in self.cases.values():
            self.pair.done(case)


def meanwhile(pair: Pair, over: Callable[[], bool]) -> list[float]:
    """Requests between others, until something is over: how long each took, in milliseconds."""
    took: list[float] = []
    until_ = time.monotonic() + SOON
    while not over() or len(took) < 5:
        began = time.monotonic()
        pair.run(32)
        took.append(1e3 * (time.monotonic() - began))
        assert time.monotonic() < until_, "it is not over"
    return took


def show(what: str, took: list[float]) -> None:
    ordered = sorted(took)
    print(
        f"{what}: {len(took)} requests of others meanwhile, median {ordered[len(took) // 2]:.0f} ms, "
        f"longest {ordered[-1]:.0f} ms"
    )


@on(
    "tcp other-pools",
    "tcp same-pools staged",
    later=[
        "tcp same-pools",
        "nixl other-pools",
        "mooncake other-pools",
        "tcp other-pools staged",
        "nixl same-pools staged",
        "mooncake other-pools staged",
    ],
)
def test_prefill_dies_and_comes_back(two_engines: TwoEngines, choice: str) -> None:
    """Killed, and started anew at its address. What was not asked of it yet is served by the new process."""
    address = free_addresses(1)[0]
    doomed = two_engines.engine()
    # What was not asked of prefill waits for the next process for a part of this.
    decode = two_engines.open("decode", POOLS, **{**LIVE, "liveness": 240.0})
    pair = Pair(two_engines.open("prefill", POOLS, engine=doomed, listen=address, **LIVE), decode)
    other = pair.beside(two_engines.open("prefill", POOLS, **LIVE))
    pair.run(32)
    other.run(32)
    phases = Phases(pair)
    doomed.kill()
    phases.pardon()
    took = meanwhile(other, lambda: phases.decode["mid-chunk"].see().status is Status.FAILED)
    show(f"prefill killed over {two_engines.backend}", took)
    phases.fail("decode", "prefill")
    phases.quiet("decode")
    assert not decode.snapshot()["quarantined"]

    pools = POOLS if choice == "same-pools" else hybrid(kv=Kv(pages=60, order="hnd"), swa=None, dsa=None)
    again = pair.beside(two_engines.open("prefill", pools, engine=two_engines.engine(), listen=address, **LIVE))
    case = again.case(64, room=phases.cases["opened"].room)
    phases.decode["opened"].accept(case.target)
    sending = again.send(case)
    again.push(sending, case)
    again.ended(case, phases.decode["opened"], sending)
    phases.done()
    again.run(64)
    other.run(32)


@on("tcp", later=["nixl", "mooncake", "tcp staged", "nixl staged", "mooncake staged"])
def test_decode_dies_and_comes_back(two_engines: TwoEngines) -> None:
    address = free_addresses(1)[0]
    doomed = two_engines.engine()
    prefill = two_engines.open("prefill", POOLS, **LIVE)
    pair = Pair(prefill, two_engines.open("decode", POOLS, engine=doomed, listen=address, **LIVE))
    other = Pair(prefill, two_engines.open("decode", POOLS, **LIVE))
    pair.run(32)
    other.run(32)
    phases = Phases(pair)
    doomed.kill()
    took = meanwhile(other, lambda: phases.prefill["mid-chunk"].see().status is Status.FAILED)
    show(f"decode killed over {two_engines.backend}", took)
    phases.fail("prefill", "decode")
    phases.quiet("prefill")
    assert pair.decode.name not in prefill.snapshot()["peers"]
    pools = hybrid(kv=Kv(pages=70, order="hnd"), swa=None, dsa=None)
    again = Pair(prefill, two_engines.open("decode", pools, engine=two_engines.engine(), listen=address, **LIVE))
    again.run(64, room=phases.cases["mid-chunk"].room)  # an id that its former self used is nothing special
    other.run(32)


@on(
    "mooncake prefill",
    later=["tcp prefill", "tcp decode", "nixl prefill", "tcp prefill staged", "mooncake prefill staged"],
)
def test_the_network_is_cut(two_engines: TwoEngines, cable: Cable, choice: str) -> None:
    """Silence is no proof: what may still be written stays where it is until the two speak again."""
    side = choice
    opened = {}
    for role, (enter, address) in zip((side, "decode" if side == "prefill" else "prefill"), cable.hosts, strict=True):
        engine = two_engines.engine(*enter)
        opened[role] = two_engines.open(role, POOLS, engine=engine, listen=f"tcp://{address}:0", insecure=True, **LIVE)
    pair = Pair(opened["prefill"], opened["decode"])
    other = Pair(two_engines.open("prefill", POOLS, **LIVE), two_engines.open("decode", POOLS, **LIVE))
    pair.run(32)
    other.run(32)
    phases = Phases(pair)
    cable.cut()
    took = meanwhile(other, lambda: phases.decode["mid-chunk"].see().status is Status.FAILED)
    show(f"cut from {side} over {two_engines.backend}", took)
    phases.fail("decode", "prefill")
    phases.fail("prefill", "decode")
    fenced = two_engines.backend == "tcp"  # where decode can stop it alone
    if fenced:
        phases.quiet("decode")
    held = sorted(case.room for phase, case in phases.cases.items() if phase != "opened" and not fenced)
    assert opened["decode"].snapshot()["quarantined"] == held
    cable.mend()
    phases.quiet("decode")
    phases.quiet("prefill")
    phases.decode["opened"].abort()
    phases.pardon()
    phases.done()
    pair.run(64)
    other.run(32)


@on("mooncake", later=["mooncake staged"])  # its fence is the mover's, and it needs nothing but sockets
def test_prefill_dies_where_decode_cannot_see_it(two_engines: TwoEngines, root: None) -> None:
    """In another pid namespace: nothing proves its end, and a process that has its id here is not it."""
    doomed = two_engines.engine("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    decode = two_engines.open("decode", POOLS, **LIVE)
    pair = Pair(two_engines.open("prefill", POOLS, engine=doomed, **LIVE), decode)
    pair.run(32)
    phases = Phases(pair)
    doomed.kill()
    phases.fail("decode", "prefill")
    time.sleep(2.0)  # far longer than it takes where there is proof
    held = sorted(case.room for phase, case in phases.cases.items() if phase != "opened")
    assert decode.snapshot()["quarantined"] == held
    two_engines.untidy = True


@on("mooncake", later=["nixl", "nixl staged", "mooncake staged"])
def test_a_stopped_prefill_is_no_dead_one(two_engines: TwoEngines) -> None:
    decode = two_engines.open("decode", POOLS, **LIVE)
    doomed = two_engines.engine()
    pair = Pair(two_engines.open("prefill", POOLS, engine=doomed, **LIVE), decode)
    pair.run(32)
    phases = Phases(pair)
    doomed.stop()
    phases.fail("decode", "prefill")
    time.sleep(2.0)
    held = sorted(case.room for phase, case in phases.cases.items() if phase != "opened")
    assert decode.snapshot()["quarantined"] == held
    doomed.kill()
    phases.quiet("decode")


@on("tcp", later=["tcp staged"])  # who writes the bytes changes nothing here
def test_one_of_several_sources_dies(two_engines: TwoEngines) -> None:
    """Two pipeline stages write to one decode rank; the death of one fails the room once, on both who are left."""
    halves = [Kv(layers=(0, 1)), Kv(layers=(2, 3))]
    doomed = two_engines.engine()
    engines = [two_engines.prefill, doomed]
    sources = [
        two_engines.open("prefill", (pools,), engine=engine, rank=n, ranks=2, **LIVE)
        for n, (pools, engine) in enumerate(zip(halves, engines, strict=True))
    ]
    decode = two_engines.open("decode", (Kv(),), **LIVE)
    addresses = [source.address for source in sources]

    for side in (decode, sources[0]):
        side.engine(Host.count_ends)

    def begin(room: int) -> tuple[RoomHandle, list[RoomHandle]]:
        receiving = decode.receive(room, addresses, 32, {"kv": [1, 2]})
        return receiving, [source.send(room, 32) for source in sources]

    receiving, sending = begin(1)
    for each in sending:
        each.push({"kv": [3, 4]})
    receiving.succeeded()
    receiving, sending = begin(2)
    sending[0].push({"kv": [3, 4]})  # one has done its part
    sending[0].reach(Status.TRANSFERRING)
    doomed.kill()
    reason = receiving.failed(SOON)
    assert "prefill was lost" in reason
    assert sources[1].name in reason
    assert sending[0].failed(SOON) == reason
    assert receiving.wait(SOON, quiesced=True).quiesced
    assert sending[0].wait(SOON, quiesced=True).quiesced
    until(lambda: not decode.snapshot()["quarantined"])
    for side in (decode, sources[0]):
        assert side.engine(Host.counted_ends) == {(1, "succeeded"): 1, (2, "failed"): 1}
