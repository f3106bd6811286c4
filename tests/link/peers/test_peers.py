"""Processes that die, stop, close and come back. Whoever is left fails its rooms with a reason, and serves others.

Liveness is two seconds here; what is asserted of time is only that nothing waits for a deadline, which is far off.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.expect import Case, carry
from tests.helpers.pair import Pair
from tests.helpers.peers import until
from tests.helpers.worker import Host

from statelink import Status
from statelink.testing.process import ProcessError

if TYPE_CHECKING:
    from tests.helpers.engine import Engine, LinkHandle, RoomHandle
    from tests.link.conftest import TwoEngines

LIVE: dict[str, Any] = {"heartbeat": 0.25, "liveness": 2.0, "deadline": 60.0}
SOON = 15.0
"""Seconds within which a loss has to be noticed, on a machine that has other things to do."""
TCP = pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")


def on(name: str, *cases: tuple[str, object], later: Sequence[tuple[str, object]] = ()) -> pytest.MarkDecorator:
    """Cases with their backends: each of them takes seconds, so that not everything runs everywhere.

    Those that come later are for `make soak`, and have staging forced on.
    """
    marks = (pytest.mark.soak, pytest.mark.staged)
    chosen = [*cases, *(pytest.param(*each, marks=marks, id=f"{each[0]}-{each[1]}-staged") for each in later)]
    return pytest.mark.parametrize(("backend", name), chosen, indirect=["backend"], scope="session")


def threads(engine: Engine) -> Counter[str]:
    """How many threads of each kind there are. The next one takes the place of one that was stuck in the library."""
    return Counter(re.sub(r"-\d+$", "", name) for name in engine(Host.threads) if name.startswith("statelink-"))


def mid_chunk(pair: Pair, case: Case) -> tuple[RoomHandle, RoomHandle]:
    """A room of which a part has arrived, and the rest waits for an event."""
    receiving, sending = pair.begin(case)
    sending.push(case.span(0, 96, pair.prefill.memory.pools), span=(0, 96))
    pair.prefill.engine.gate("later")
    sending.push(case.span(96, case.tokens, pair.prefill.memory.pools), span=(96, case.tokens), ready="later")
    receiving.reach(Status.TRANSFERRING)
    return receiving, sending


def quarantined(link: LinkHandle, room: int) -> bool:
    return room in link.snapshot()["quarantined"]


@on(
    "when",
    ("tcp", "idle"),
    ("tcp", "mid-chunk"),
    ("tcp", "in the library"),
    ("nixl", "in the library"),
    ("mooncake", "mid-chunk"),
    later=[("tcp", "mid-chunk"), ("tcp", "in the library"), ("nixl", "in the library"), ("mooncake", "in the library")],
)
def test_prefill_is_killed(two_engines: TwoEngines, when: str) -> None:
    """Decode's rooms fail; its memory is given back, fenced by itself or because that process has ended for certain."""
    backend = f"faulty-{two_engines.backend}"
    doomed, other = two_engines.engine(), two_engines.prefill
    decode = two_engines.open("decode", backend=backend, **LIVE)
    first = Pair(two_engines.open("prefill", engine=doomed, backend=backend, instance="doomed", **LIVE), decode)
    second = Pair(two_engines.open("prefill", engine=other, backend=backend, **LIVE), decode)
    first.run()
    second.expected = first.expected
    second.run()
    before = threads(two_engines.decode)
    case = first.case()
    if when == "in the library":
        receiving, sending = first.begin(case)
        doomed.run("faulty_backends", "plan", "submit", "die")
        with contextlib.suppress(ProcessError):  # it may be gone before it can answer
            first.push(sending, case)
        doomed.popen.wait(20)
    elif when == "mid-chunk":
        receiving, _ = mid_chunk(first, case)
        doomed.kill()
    else:
        doomed.kill()
        receiving = first.receive(case)
    if when == "idle":  # it may have been asked, or not: a room fails, or waits for the next process at the address
        receiving.abort("tired of waiting")
        assert receiving.failed(SOON)
    else:
        text = receiving.failed(SOON)
        assert "prefill was lost" in text
        assert f"room {case.room}" in text
        assert first.prefill.name in text
        assert receiving.wait(SOON, quiesced=True).quiesced
        assert not quarantined(decode, case.room)
    second.expected = first.expected
    second.pardon(case)
    second.run()
    assert before <= threads(two_engines.decode)
    assert decode.engine(Host.take_errors) == []


@on(
    "when",
    ("tcp", "idle"),
    ("tcp", "mid-chunk"),
    ("tcp", "in the library"),
    ("nixl", "in the library"),
    ("mooncake", "in the library"),
    later=[("tcp", "mid-chunk"), ("tcp", "in the library"), ("nixl", "in the library"), ("mooncake", "in the library")],
)
def test_decode_is_killed(two_engines: TwoEngines, when: str) -> None:
    backend = f"faulty-{two_engines.backend}"
    doomed = two_engines.engine()
    prefill = two_engines.open("prefill", backend=backend, **LIVE)
    first = Pair(prefill, two_engines.open("decode", engine=doomed, backend=backend, instance="doomed", **LIVE))
    first.run()
    second = Pair(prefill, two_engines.open("decode", backend=backend, **LIVE))
    second.run()
    before = threads(two_engines.prefill)
    case = first.case()
    if when == "idle":
        doomed.kill()
        until(lambda: first.decode.name not in prefill.snapshot()["peers"], SOON)
    else:
        if when == "mid-chunk":
            _, sending = mid_chunk(first, case)
            doomed.kill()
        else:
            _, sending = first.begin(case)
            two_engines.prefill.run("faulty_backends", "plan", "submit", "block")
            first.push(sending, case)
            until(lambda: bool(two_engines.prefill.run("faulty_backends", "struck", "block")))
            doomed.kill()
            time.sleep(0.3)
            two_engines.prefill.run("faulty_backends", "heal")
        text = sending.failed(SOON)
        assert f"room {case.room}" in text
        assert first.decode.name in text
        if when == "mid-chunk":
            assert "decode was lost" in text
            assert sending.wait(SOON, quiesced=True).quiesced, "nothing of it is in the library"
    second.run()
    assert before <= threads(two_engines.prefill)
    two_engines.untidy = when == "in the library"


@on(
    "side",
    ("tcp", "prefill"),
    ("tcp", "decode"),
    ("nixl", "prefill"),
    ("mooncake", "decode"),
    later=[("tcp", "prefill"), ("tcp", "decode"), ("nixl", "decode"), ("mooncake", "prefill")],
)
def test_a_side_closes(two_engines: TwoEngines, side: str) -> None:
    """A goodbye is noticed at once, and says that nothing is in flight."""
    made = two_engines.pair(**{**LIVE, "liveness": 50.0})
    made.run()
    case = made.case()
    receiving, sending = mid_chunk(made, case)
    leaving, staying = (made.prefill, receiving) if side == "prefill" else (made.decode, sending)
    assert leaving.close()
    staying.failed(10)
    reason = staying.why()
    assert (reason.code, reason.what) == ("peer.lost", f"{side} was lost"), "a router tries it again"
    assert staying.wait(10, quiesced=True).quiesced
    assert leaving.close(), "it may be closed twice"
    if side == "prefill":
        other = Pair(two_engines.open("prefill", **LIVE), made.decode)
        other.expected = made.expected
    else:
        other = Pair(made.prefill, two_engines.open("decode", **LIVE))
    other.pardon(case)
    other.run()


def test_a_goodbye_does_not_vouch_for_what_hangs(two_engines: TwoEngines) -> None:
    """Prefill closes while it is not known whether a batch has ended: decode's memory stays where it is."""
    made = two_engines.pair(backend=f"faulty-{two_engines.backend}", **LIVE)
    made.run()
    case = made.case()
    two_engines.prefill.run("faulty_backends", "plan", "submit", "lose")
    receiving, sending = made.begin(case)
    made.push(sending, case)
    receiving.failed()
    sending.failed()
    assert not sending.see().quiesced
    assert quarantined(made.prefill, case.room)
    two_engines.untidy = True
    assert not made.prefill.close(0.5), "not everything has ended"
    other = Pair(two_engines.open("prefill", backend=f"faulty-{two_engines.backend}", **LIVE), made.decode)
    other.expected = made.expected
    other.pardon(case)
    other.run()
    fenced = two_engines.backend == "tcp"  # where decode can stop it alone
    assert (receiving.wait(quiesced=True) if fenced else receiving.see()).quiesced == fenced
    assert quarantined(made.decode, case.room) != fenced


def test_each_side_is_quiet_on_its_own_word(two_engines: TwoEngines) -> None:
    """Nothing reads a failed batch's source any more, and its bytes may still land: prefill's memory is free."""
    made = two_engines.pair(backend=f"faulty-{two_engines.backend}", **LIVE)
    made.run()
    case = made.case()
    two_engines.prefill.run("faulty_backends", "plan", "submit", "stray")
    receiving, sending = made.begin(case)
    made.push(sending, case)
    receiving.failed()
    sending.failed()
    assert sending.wait(quiesced=True).quiesced
    assert made.prefill.snapshot()["quarantined"] == []
    made.spoilt(case)
    fenced = two_engines.backend == "tcp"  # where decode can stop it alone
    if fenced:
        assert receiving.wait(quiesced=True).quiesced
    else:
        again = made.send(case)  # prefill may use the room's id again, and still vouches for nothing
        time.sleep(3 * LIVE["heartbeat"])  # decode asks about it at every beat
        again.abort()
        assert not receiving.see().quiesced
    assert quarantined(made.decode, case.room) != fenced
    seen = made.decode.snapshot()["quarantined_bytes"]
    held = [
        a[case.target[name]].nbytes for name, each in made.decode.memory.arrays.items() for a in each.values() if len(a)
    ]
    assert seen == ({} if fenced else {f"not known to have stopped: {made.prefill.name}": sum(held)})
    two_engines.untidy = True


@on(
    "case",
    ("tcp", ("prefill", 0.6)),
    ("tcp", ("decode", 0.6)),
    ("tcp", ("prefill", 5.0)),
    ("tcp", ("decode", 5.0)),
    ("nixl", ("prefill", 5.0)),
    ("nixl", ("decode", 5.0)),
    ("mooncake", ("prefill", 5.0)),
    later=[
        ("tcp", ("prefill", 5.0)),
        ("tcp", ("decode", 0.6)),
        ("nixl", ("decode", 5.0)),
        ("mooncake", ("prefill", 5.0)),
    ],
)
def test_a_side_is_stopped(two_engines: TwoEngines, case: tuple[str, float]) -> None:
    """Shorter than liveness, and longer. Either way the links go on afterwards."""
    side, stop = case
    made = two_engines.pair(**LIVE)
    made.run()
    request = made.case()
    receiving, sending = mid_chunk(made, request)
    engine, awake = (made.prefill.engine, receiving) if side == "prefill" else (made.decode.engine, sending)
    engine.stop()
    try:
        if stop > LIVE["liveness"]:
            assert f"{side} was lost" in awake.failed(SOON)
        else:
            time.sleep(stop)
            assert awake.see().status is Status.TRANSFERRING
    finally:
        engine.go_on()
    made.prefill.engine.release("later")
    if stop > LIVE["liveness"]:
        for room in (receiving, sending):  # also who slept hears of it, and need not wait for its deadline
            assert room.failed(SOON)
        made.pardon(request)
        meet_again(made, request, receiving, sending)
        made.spoilt(request)
    else:
        made.ended(request, receiving, sending)
    made.run()
    made.run()
    made.idle()


def meet_again(made: Pair, before: Case, *rooms: RoomHandle) -> None:
    """A request that goes well; the one before it may still hear that who slept has given the other up.

    It brings both sides together, and what was said in between is said again: then nothing lands any more for the rooms
    of the one ``before``, whose items may hold anything.
    """
    case = made.case()
    receiving, sending = made.begin(case)
    made.push(sending, case)
    seen = receiving.wait(SOON, quiesced=True)
    if seen.status is not Status.SUCCEEDED:
        assert "was lost" in receiving.failed(SOON)
        sending.abort("decode has lost it")
        assert sending.wait(SOON, quiesced=True).quiesced
    for room in rooms:
        assert room.wait(SOON, quiesced=True).quiesced
    made.pardon(before)
    if seen.status is Status.SUCCEEDED:
        made.ended(case, receiving, sending)
    else:
        made.spoilt(case)
        made.run()


@TCP
@pytest.mark.parametrize("patient", ["prefill", "decode"])
def test_only_one_side_gives_up(two_engines: TwoEngines, patient: str) -> None:
    """A stop that is long for one side and short for the other: they find together again."""
    impatient = {**LIVE, "heartbeat": 0.1, "liveness": 1.5}
    long = {**LIVE, "liveness": 50.0}
    mine, theirs = (long, impatient) if patient == "prefill" else (impatient, long)
    made = two_engines.pair(**mine, decode_config=theirs)
    made.run()
    engine = made.prefill.engine if patient == "prefill" else made.decode.engine
    case = made.case()
    receiving, sending = mid_chunk(made, case)
    engine.stop()
    time.sleep(2.5)
    engine.go_on()
    made.prefill.engine.release("later")
    for room in (receiving, sending):
        room.failed(SOON)
        assert room.wait(SOON, quiesced=True).quiesced
    made.spoilt(case)
    made.run()
    made.run()
    made.idle()


@TCP
def test_one_instance_under_two_names(two_engines: TwoEngines) -> None:
    prefill = two_engines.open("prefill", **LIVE)
    made = Pair(prefill, two_engines.open("decode", peers={"west": (prefill.address,)}, **LIVE))
    case = made.case()
    receiving, sending = mid_chunk(made, case)
    other = made.case()
    named = made.decode.receive(other.room, "west", other.tokens, other.target)
    more = made.send(other)
    made.push(more, other)
    named.succeeded()
    more.succeeded()
    made.prefill.engine.release("later")
    receiving.succeeded()
    sending.succeeded()
    carry([prefill.memory], made.expected, other)
    made.arrived(case)
