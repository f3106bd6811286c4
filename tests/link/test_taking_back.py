"""Memory of failed rooms that is taken back without proof, and the bound within which there is proof."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.links import link_of
from tests.helpers.peers import until
from tests.link.conftest import FORCED
from tests.link.test_staged import hang, quarantined, reach, ring
from tests.link.test_verify import FAULTY

from statelink import Status
from statelink.errors import RoomError

if TYPE_CHECKING:
    from tests.helpers.engine import LinkHandle, RoomHandle
    from tests.helpers.expect import Case
    from tests.helpers.pair import Pair
    from tests.link.conftest import TwoEngines

BY = pytest.mark.parametrize("by", ["engine", "take_back_after"])
AT_ONCE: dict[str, Any] = {"take_back_after": 0.2, "liveness": 2.0, "heartbeat": 0.25}

pytestmark = pytest.mark.soak_over("mooncake", why="what is given back is the link's bookkeeping")


def taken_back(link: LinkHandle) -> tuple[list[int], dict[str, Any], list[int]]:
    """The rooms without proof, the counts of them, and the rooms that hold memory."""
    seen = link.snapshot()
    return seen["taken_back"], seen["totals"]["taken_back"], seen["quarantined"]


def test_an_engine_takes_the_memory_of_a_room_back(two_engines: TwoEngines) -> None:
    """At once, and the id with it; what the earlier use left in flight is followed to its end."""
    made = two_engines.pair(backend=f"faulty-{two_engines.backend}")
    fenced = two_engines.backend == "tcp"
    made.run()
    case, receiving, sending = hang(two_engines, made, two_engines.prefill)
    receiving.abort("as planned")
    assert "as planned" in sending.failed()
    assert "as planned" in receiving.failed()
    rooms = [(made.prefill, sending, "prefill")]
    if fenced:
        seen = receiving.wait(quiesced=True)
        assert (seen.quiesced, seen.taken_back) == (True, False)
    else:
        rooms.append((made.decode, receiving, "decode"))
    for _, room, role in rooms:
        seen = room.see()
        assert (seen.quiesced, seen.taken_back) == (False, False)
        with pytest.raises(RoomError, match="is in use"):
            made.send(case) if role == "prefill" else made.receive(case)
        room.take_back("it is needed")
        seen = room.see()
        assert (seen.quiesced, seen.taken_back) == (True, True)
    for link, room, role in rooms:
        room.take_back("once more")  # which does nothing
        until(lambda: taken_back(link) == ([case.room], {role: {"engine": 1}}, []))  # noqa: B023 - it is called at once
        assert link.snapshot()["load"]["taken_back"] == 1
    made.pardon(case)
    made.done(case)
    made.run(room=case.room)
    for link, _, role in rooms:
        assert taken_back(link) == ([case.room], {role: {"engine": 1}}, [])
    two_engines.prefill.run(FAULTY, "heal")
    for link, _, role in rooms:
        until(lambda: not taken_back(link)[0])  # noqa: B023 - it is called at once
        assert taken_back(link) == ([], {role: {"engine": 1}}, [])
    made.run(room=case.room)


def stuck(two_engines: TwoEngines, made: Pair, how: str) -> tuple[Case, RoomHandle, RoomHandle]:
    """A failed request whose writer cannot say whether it has stopped: its transfer hangs, or it is stopped itself."""
    if how == "hangs":
        case, receiving, sending = hang(two_engines, made, two_engines.prefill)
    else:
        case = made.case()
        receiving, sending = made.begin(case)
        sending.reach(Status.WAITING)
        two_engines.prefill.stop()
    receiving.abort("as planned")
    assert "as planned" in receiving.failed()
    return case, receiving, sending


def free(two_engines: TwoEngines, how: str) -> None:
    if how == "hangs":
        two_engines.prefill.run(FAULTY, "heal")
    else:
        two_engines.prefill.go_on()


@BY
@pytest.mark.parametrize("how", ["hangs", "stopped"])
def test_what_is_taken_back_is_not_proven(two_engines: TwoEngines, by: str, how: str) -> None:
    """Whoever took it back. Later proof ends it. A backend with a fence proves it at once, so nothing is taken back."""
    fenced = two_engines.backend == "tcp"
    option = AT_ONCE if by == "take_back_after" else {}
    made = two_engines.pair(backend=f"faulty-{two_engines.backend}", decode_config=option)
    made.run()
    counted = {} if fenced else {"decode": {by: 1}}

    def take_back() -> tuple[Case, RoomHandle]:
        case, receiving, sending = stuck(two_engines, made, how)
        if by == "engine":
            if fenced:
                receiving.wait(quiesced=True)
            receiving.take_back("it is needed")
        assert receiving.wait(quiesced=True).taken_back == (not fenced)
        until(lambda: taken_back(made.decode) == ([] if fenced else [case.room], counted, []))
        assert made.decode.snapshot()["load"]["taken_back"] == (not fenced)
        return case, sending

    try:
        case, sending = take_back()
        if not fenced:
            with pytest.raises(RoomError, match=f"rooms {case.room} have ended, and transfers of theirs") as caught:
                made.decode.suspend(0.3)
            assert caught.value.code == "room.unfinished"
        free(two_engines, how)
        until(lambda: not taken_back(made.decode)[0])
        made.decode.suspend()
        made.decode.resume()
        assert sending.wait(quiesced=True).quiesced
        made.spoilt(case)
        made.run()
        counted = {} if fenced else {"decode": {by: 2}}
        take_back()
        two_engines.untidy = not fenced  # each further close says the same
        assert made.decode.close(0.3) == fenced
    finally:
        free(two_engines, how)


@BY
def test_space_in_rings_stays_quarantined_until_there_is_proof(two_engines: TwoEngines, by: str) -> None:
    """Also if the id is used again meanwhile. A late write there would be taken for bytes of another room."""
    roomy = {**FORCED, "ring_bytes": 256 << 10}
    option = AT_ONCE if by == "take_back_after" else {}
    made = two_engines.pair(backend=f"faulty-{two_engines.backend}", staging=roomy, decode_config=option)
    fenced = two_engines.backend == "tcp"
    made.run()
    case, receiving, sending = hang(two_engines, made, two_engines.prefill)
    receiving.abort("as planned")
    assert "as planned" in sending.failed()
    held = [(link, quarantined(link)) for link in (made.prefill, made.decode)[: 1 if fenced else 2]]
    for room in (sending, receiving):
        if room is sending or by == "engine":
            room.take_back("it is needed")
        assert room.wait(quiesced=True).quiesced
    made.pardon(case)
    made.done(case)
    made.run(32, room=case.room)
    for link, nbytes in held:
        assert ring(link)["quarantined"] == nbytes
    two_engines.prefill.run(FAULTY, "heal")
    for link in (made.prefill, made.decode):
        reach(link, in_use=0, waiting=0, quarantined=0)
        until(lambda: not taken_back(link)[0])  # noqa: B023 - it is called at once
    made.run()


def test_the_operators_bound_gives_memory_back(two_engines: TwoEngines) -> None:
    """Where decode's backend holds no fence. The link counts it as it counts what an engine takes back."""
    bound, liveness = 3.0, 2.0
    config: dict[str, Any] = {"take_back_after": bound, "liveness": liveness, "heartbeat": 0.25}
    made = two_engines.pair(backend=f"faulty-{two_engines.backend}", decode_config=config)
    made.run()
    case, receiving, sending = hang(two_engines, made, two_engines.prefill)
    receiving.abort("as planned")
    sending.failed()
    receiving.failed()
    seen = receiving.wait(quiesced=True)
    fenced = two_engines.backend == "tcp"
    assert (seen.quiesced, seen.taken_back) == (True, not fenced)
    counted = {} if fenced else {"decode": {"take_back_after": 1}}
    until(lambda: taken_back(made.decode) == ([] if fenced else [case.room], counted, []))
    two_engines.prefill.run(FAULTY, "heal")
    assert sending.wait(quiesced=True).quiesced
    until(lambda: not taken_back(made.decode)[0])
    made.spoilt(case)
    made.run()


def test_a_room_that_has_not_ended_is_aborted(caplog: pytest.LogCaptureFixture) -> None:
    with link_of("prefill") as prefill, link_of("decode") as decode:
        assert (prefill.quiet_within, decode.quiet_within) == (None, 10.0)
        sending, receiving = prefill.send(7, 4), decode.receive(7, prefill.address, 4, {"kv": [1]})
        until(lambda: sending.status is Status.WAITING)
        with caplog.at_level(logging.WARNING):
            receiving.take_back("it is needed")
            assert receiving.wait(20, quiesced=True) is sending.wait(20) is Status.FAILED
        assert receiving.reason is not None
        assert (receiving.reason.code, receiving.reason.cause) == ("room.aborted", "it is needed")
        if receiving.taken_back:  # otherwise the revocation came before

            def said() -> list[str]:
                return [text for each in caplog.records if "without proof" in (text := each.getMessage())]

            until(said)
            text = "room 7: memory is taken back without proof, by engine: it is needed; not known to have stopped: "
            assert said() == [text + prefill.name]
        sending, receiving = prefill.send(7, 4), decode.receive(7, prefill.address, 4, {"kv": [1]})
        sending.push({"kv": [0]})
        assert receiving.wait(20) is sending.wait(20) is Status.SUCCEEDED
        sending.take_back()
        receiving.take_back()
        assert not sending.taken_back
        assert not receiving.taken_back
        assert decode.snapshot()["taken_back"] == []
        assert math.isfinite(decode.quiet_within or math.inf)
