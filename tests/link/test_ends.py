"""How rooms end early: aborts at every phase, deadlines on each side. Reasons cross over, and both sides get quiet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests.helpers.worker import Host
from tests.link.test_reasons import same, stood

from statelink import Status

if TYPE_CHECKING:
    from tests.helpers.engine import RoomHandle
    from tests.helpers.expect import Case
    from tests.helpers.pair import Pair
    from tests.link.conftest import TwoEngines

pytestmark = pytest.mark.soak_over("mooncake", why="test_aborts.py ends rooms over Mooncake in every phase, too")
TCP = pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")
PHASES = ["opened", "asked", "gated", "mid-chunk", "all but the last"]


def reach(phase: str, pair: Pair, case: Case) -> tuple[RoomHandle, RoomHandle]:
    """Bring a room to a phase, and hold it there."""
    if phase == "opened":
        receiving = pair.decode.receive(case.room, pair.prefill.address, case.tokens)
        sending = pair.send(case)
        receiving.reach(Status.WAITING)
        return receiving, sending
    receiving, sending = pair.begin(case)
    sending.reach(Status.WAITING)
    if phase == "gated":
        pair.push(sending, case, ready=pair.prefill.engine.gate(f"{case.room}"))
    elif phase == "mid-chunk":
        sending.push(case.span(0, 96, pair.prefill.memory.pools), span=(0, 96))
        receiving.reach(Status.TRANSFERRING)
    elif phase == "all but the last":
        given = case.whole(pair.prefill.memory.pools)
        del given["aux"]
        sending.push(given, span=(0, case.tokens), last=False)
        receiving.reach(Status.TRANSFERRING)
    return receiving, sending


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("phase", PHASES)
def test_aborts(pair: Pair, phase: str, side: str) -> None:
    case = pair.case(200)
    receiving, sending = reach(phase, pair, case)
    (sending if side == "prefill" else receiving).abort("the user left")
    (sending if side == "prefill" else receiving).abort("this comes too late")
    if phase == "opened" and side == "prefill":
        receiving.accept(case.target)  # decode had not asked; it hears of it when it does
    wanted = f"{side} aborted the request (room {case.room}, backend {pair.backend}): the user left"
    assert receiving.failed() == wanted
    assert sending.failed() == wanted
    assert receiving.wait(quiesced=True).quiesced
    assert sending.wait(quiesced=True).quiesced
    pair.prefill.engine(Host.gate, str(case.room), "")
    pair.spoilt(case)
    pair.run(room=case.room)  # the id is free again, at once


def test_an_abort_before_the_other_side_knows(pair: Pair) -> None:
    """Whoever comes second is told, and does not wait for its deadline."""
    case = pair.case(200)
    sending = pair.send(case)
    pair.push(sending, case)
    sending.abort("gone before decode came")
    assert sending.wait(quiesced=True).quiesced
    receiving = pair.receive(case)
    assert "gone before decode came" in receiving.failed()
    assert receiving.wait(quiesced=True).quiesced
    receiving = pair.receive(case)
    receiving.reach(Status.WAITING)
    receiving.abort("gone before prefill came")
    assert receiving.wait(quiesced=True).quiesced
    assert "gone before prefill came" in pair.send(case).failed()
    pair.spoilt(case)


def test_nothing_comes_after_an_end(pair: Pair) -> None:
    case = pair.case(200)
    receiving, sending = pair.begin(case)
    pair.push(sending, case)
    pair.ended(case, receiving, sending)
    for room in (receiving, sending):
        room.abort("too late")
        room.close()
        room.check()
        seen = room.see()
        assert (seen.status, seen.reason, seen.quiesced) == (Status.SUCCEEDED, None, True)


def test_calls_on_a_room_that_has_failed(pair: Pair) -> None:
    """An engine cannot know that its room failed a moment ago: its calls do nothing."""
    case = pair.case(200)
    receiving = pair.decode.receive(case.room, pair.prefill.address, 200)
    sending = pair.send(case)
    receiving.abort("enough")
    receiving.failed()
    sending.failed()
    receiving.accept(case.target)
    pair.push(sending, case, 64)
    assert receiving.see().quiesced
    assert sending.see().quiesced
    pair.done(case)
    pair.verify()


@TCP
@pytest.mark.parametrize("why", ["bad \udcff name", "x" * 2_000_000, "", "\0\x1b[31m"])
def test_reasons_of_any_kind(pair: Pair, why: str) -> None:
    for side in ("prefill", "decode"):
        case = pair.case(200)
        receiving, sending = pair.begin(case)
        sending.reach(Status.WAITING)
        (sending if side == "prefill" else receiving).abort(why)
        for room in (receiving, sending):
            text = room.failed(10)
            assert f"{side} aborted the request" in text
            assert len(text) < 20_000
        assert receiving.wait(quiesced=True).quiesced
        pair.spoilt(case)


WHOLE = "kv, swa, dsa, mamba, aux"
WAITS = "it still waits for "
DEADLINES = [
    # What never happens, whose deadline it is, the cause, the room's status there, what is missing.
    ("sent", "decode", WAITS, "waiting", f"{WHOLE} from rank 0"),
    ("accepted", "decode", WAITS, "waiting", "the engine's accept()"),
    ("asked", "prefill", "decode never asked for it", "bootstrapping", "decode's request"),
    ("pushed", "prefill", WAITS, "waiting", f"the engine's first push, with {WHOLE}"),
    ("the last", "prefill", WAITS, "transferring", "the engine's last push, with mamba, aux"),
    ("ready", "prefill", WAITS, "waiting", "the engine's ready event"),
    ("the last", "decode", WAITS, "transferring", "swa, mamba, aux and the rest of kv, dsa from rank 0"),
]


@TCP
@pytest.mark.parametrize(
    ("never", "side", "cause", "status", "missing"), DEADLINES, ids=[f"{each[0]}-{each[1]}" for each in DEADLINES]
)
def test_deadlines(pair: Pair, never: str, side: str, cause: str, status: str, missing: str) -> None:
    case = pair.case(200)
    ours, theirs = (0.5, 60.0) if side == "decode" else (60.0, 0.5)
    rooms: list[RoomHandle] = []
    if never == "accepted":
        rooms.append(pair.decode.receive(case.room, pair.prefill.address, 200, deadline=ours))
    elif never != "asked":
        rooms.append(pair.receive(case, deadline=ours))
    if never != "sent":
        sending = pair.send(case, deadline=theirs)
        rooms.append(sending)
        if never == "the last":
            sending.push(case.span(0, 96, pair.prefill.memory.pools), span=(0, 96))
        elif never == "ready":
            pair.push(sending, case, ready=pair.prefill.engine.gate("never"))
        elif never == "asked":
            pair.push(sending, case)
    for room in rooms:  # also the side that had time left, because it was told
        said = room.failed(10)
        assert f"a room passed its deadline on {side}" in said
        assert cause in said
        assert f"room {case.room}" in said
        assert room.wait(quiesced=True).quiesced
    reason = same(*rooms)
    stood(reason, f"{side} rank 0", status, missing, heard="never" if never == "asked" else r"\d+\.\d s ago")
    if never == "the last" and side == "prefill":
        assert "unless it says last=True" in reason.hint
    if never == "sent":
        assert reason.hint == "did prefill's engine call send() with this room id, and push()?"
    if never == "pushed":
        assert reason.diagnostics["peer"] == pair.decode.name
        assert reason.diagnostics["rank"] == "0"
    pair.spoilt(case)


@TCP
def test_the_two_sides_name_different_rooms(pair: Pair) -> None:
    case, other = pair.case(200), pair.case(200)
    receiving = pair.receive(case, deadline=60)
    while not pair.prefill.snapshot()["load"]["pending_requests"]:
        time.sleep(0.01)
    text = pair.send(other, deadline=0.5).failed(10)
    assert f"decode never asked for it; requests for other rooms wait here: {case.room} (of {pair.decode.name})" in text
    receiving.abort("gone")
    receiving.failed()
    pair.spoilt(case)


@TCP
def test_a_deadline_while_nobody_is_there(pair: Pair) -> None:
    receiving = pair.decode.receive(12, "tcp://127.0.0.1:9", 64, deadline=0.5)
    assert receiving.see().status is Status.BOOTSTRAPPING
    text = receiving.failed(10)
    assert "prefill instance tcp://127.0.0.1:9 is still greeting; no answer from tcp://127.0.0.1:9 (the conn" in text
    assert "hint: does it run, and listen at this host and this port?" in text
    refused = "the connection is refused: nothing listens there"
    missing = f"prefill, which is greeting, and an answer from tcp://127.0.0.1:9 ({refused})"
    stood(receiving.why(), "decode rank 0", "bootstrapping", missing, heard="never")


@pytest.fixture
def slow(two_engines: TwoEngines) -> Iterator[Pair]:
    """Links over which a batch waits in the library until it is told to go on."""
    made = two_engines.pair(backend=f"faulty-{two_engines.backend}")
    made.run()
    yield made
    two_engines.prefill.run("faulty_backends", "heal")


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["block", "hang"])
def test_aborts_while_a_batch_is_in_the_library(slow: Pair, two_engines: TwoEngines, side: str, how: str) -> None:
    """The room fails at once, on both sides; prefill's memory is quiet only when the library has let go."""
    case = slow.case(200)
    two_engines.prefill.run("faulty_backends", "plan", "submit", how)
    receiving, sending = slow.begin(case)
    slow.push(sending, case)
    sending.reach(Status.TRANSFERRING)
    while not two_engines.prefill.run("faulty_backends", "struck", how):
        pass
    (sending if side == "prefill" else receiving).abort("the user left")
    assert "the user left" in sending.failed(5)
    assert "the user left" in receiving.failed(5)
    assert not sending.see().quiesced
    if two_engines.backend != "tcp":  # decode cannot fence by itself, and nobody has told it that writes ended
        assert not receiving.see().quiesced
        assert slow.decode.snapshot()["quarantined"] == [case.room]
    assert slow.prefill.snapshot()["quarantined"] == [case.room]
    two_engines.prefill.run("faulty_backends", "heal")
    assert sending.wait(quiesced=True).quiesced
    assert receiving.wait(quiesced=True).quiesced
    slow.spoilt(case)
    slow.run()
    slow.idle()
