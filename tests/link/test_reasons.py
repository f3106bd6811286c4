"""Every failure says where it arose and how far the room was, which rank, what was missing, and who was last heard."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.fleet import Fleet, only
from tests.helpers.pair import Pair
from tests.helpers.pools import Kv, hybrid
from tests.link.test_topology import shards

from statelink import Status

if TYPE_CHECKING:
    from tests.helpers.engine import RoomHandle
    from tests.link.conftest import TwoEngines

    from statelink.errors import Reason

pytestmark = pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")
FAULTY = "faulty_backends"
EVERYTHING = "kv, swa, dsa, mamba, aux"


def stood(reason: Reason, side: str, stage: str, missing: str, *, heard: str = r"\d+\.\d s ago") -> None:
    """How the room stood, as the reason says it to people."""
    told = {**reason.who, **reason.diagnostics}
    assert told["room"]
    assert told["backend"]
    assert (told["side"], told["status"], told["missing"]) == (side, stage, missing)
    assert re.fullmatch(heard, told["heard"]), told["heard"]
    words = f"side {side}, status {stage}, "
    assert f"\nat failure: {words}" in str(reason) or words in str(reason)


def same(*rooms: RoomHandle) -> Reason:
    """The one reason of several rooms."""
    first, *others = (room.why() for room in rooms)
    assert all(other == first for other in others), others
    return first


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_abort(pair: Pair, side: str) -> None:
    case = pair.case()
    sending, receiving = pair.send(case), pair.receive(case)
    sending.push(case.span(0, 96, pair.prefill.memory.pools), span=(0, 96))
    receiving.reach(Status.TRANSFERRING)
    (sending if side == "prefill" else receiving).abort("enough")
    reason = same(sending, receiving)
    assert reason.cause == "enough"
    missing = {
        "prefill": "the engine's last push, with mamba, aux",
        "decode": "swa, mamba, aux and the rest of kv, dsa from rank 0",
    }[side]
    stood(reason, f"{side} rank 0", "transferring", missing)
    pair.spoilt(case)


def test_backend_fails(two_engines: TwoEngines) -> None:
    made = two_engines.pair(backend="faulty-tcp")
    made.run()
    case = made.case()
    two_engines.prefill.run(FAULTY, "plan", "submit", "fail")
    receiving, sending = made.begin(case)
    made.push(sending, case)
    reason = same(receiving, sending)
    stood(reason, "prefill rank 0", "transferring", "the transfer to rank 0")
    assert reason.who["peer"] == made.decode.name
    assert reason.who["component"] == EVERYTHING
    made.pardon(case)
    made.done(case)


def test_digest_differs(two_engines: TwoEngines) -> None:
    made = two_engines.pair(backend="faulty-tcp", verify="digest")
    made.run()
    case = made.case()
    two_engines.prefill.run(FAULTY, "plan", "flip", "0")
    receiving, sending = made.begin(case)
    made.push(sending, case)
    reason = same(receiving, sending)
    stood(reason, "decode rank 0", "transferring", "nothing")
    assert (reason.code, reason.who["component"], reason.who["rank"]) == ("room.verify", "kv", "0")
    made.pardon(case)
    made.done(case)


def test_refused(two_engines: TwoEngines) -> None:
    made = two_engines.pair(hybrid(), hybrid(kv=Kv(dim=8)))
    case = made.case()
    reason = made.receive(case, deadline=20).why()
    stood(reason, "decode rank 0", "bootstrapping", "prefill, which is refused")
    assert reason.diagnostics["heard"] != "never"
    reason = made.send(case).why()
    assert (reason.code, reason.what) == ("mismatch", "prefill and decode do not describe the same state")
    assert "8 on decode, 16 on prefill" in reason.cause
    made.done(case)


def test_the_last_refusal_of_a_peer_is_named_where_nobody_asked(two_engines: TwoEngines) -> None:
    """Links that refused a handshake speak of no rooms."""
    prefill = two_engines.open("prefill")
    made = Pair(prefill, two_engines.open("decode", verify="digest"))
    before = made.send(made.case(), deadline=0.2)
    assert before.why().cause == "decode never asked for it"
    case = made.case()
    sending = made.send(case, deadline=5)
    assert made.receive(case, deadline=20).why().code == "peer.verify"
    reason = sending.why()
    assert re.match(r"decode never asked for it; \d\.\d s ago, .* did not agree \(.*digest", reason.cause), reason.cause
    made.done(case)


def test_a_decode_rank_that_never_asks_is_thought_of(two_engines: TwoEngines) -> None:
    fleet = Fleet(two_engines, [hybrid()], shards(2))
    case = fleet.case(64)
    fleet.send(case)
    first, _ = fleet.decode.links
    room = first.receive(case.room, fleet.peer, 64, only(case.target, first), deadline=1.0)
    assert room.why().hint == (
        "prefill begins once every rank of this decode instance has opened and accepted the room: have they?"
    )


def test_nothing_is_missing_where_all_have_asked(two_engines: TwoEngines) -> None:
    fleet = Fleet(two_engines, [hybrid()], shards(2))
    case = fleet.case(64)
    (sending,) = fleet.send(case)
    receiving = []
    for link, each in zip(fleet.decode.links, (case, fleet.case(64, 16)), strict=True):
        target = only(each.target, link)
        receiving.append(link.receive(case.room, fleet.peer, 64, target, prefix=each.prefix, deadline=20))
    reason = same(sending, *receiving)
    assert reason.code == "room.prefix"
    stood(reason, "prefill rank 0", "bootstrapping", "nothing")


@pytest.mark.parametrize("lost", ["prefill", "decode"])
def test_peer_is_lost(two_engines: TwoEngines, lost: str) -> None:
    quick: dict[str, Any] = {"heartbeat": 0.1, "liveness": 1.0}
    two_engines.untidy = True
    doomed = two_engines.engine()
    links = {
        side: two_engines.open(side, None, **({"engine": doomed} if side == lost else {}), **quick)
        for side in ("prefill", "decode")
    }
    made = Pair(links["prefill"], links["decode"])
    case = made.case()
    receiving, sending = made.begin(case)
    sending.reach(Status.WAITING)
    doomed.kill()
    survivor = sending if lost == "decode" else receiving
    reason = survivor.why()
    side = "prefill" if lost == "decode" else "decode"
    missing = f"the engine's first push, with {EVERYTHING}" if lost == "decode" else f"{EVERYTHING} from rank 0"
    stood(reason, f"{side} rank 0", "waiting", missing, heard=r"\d+\.\d s ago")
    assert reason.who["peer"] == links[lost].name


def test_the_directory_is_named_only_where_no_decode_rank_is_connected(two_engines: TwoEngines) -> None:
    """The two are given each other's address. Nothing listens where prefill would register."""
    prefill = two_engines.open("prefill", rendezvous="tcp://127.0.0.1:1")
    made = Pair(prefill, two_engines.open("decode"))
    alone = made.send(made.case(), deadline=3).why()
    assert "the rendezvous server at tcp://127.0.0.1:1 does not answer" in alone.cause
    made.run()
    assert made.send(made.case(), deadline=0.5).why().cause == "decode never asked for it"
