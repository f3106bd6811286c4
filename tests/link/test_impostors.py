"""Peers that pass the handshake and then lie: about whom they are, what they hold, what they did.

What they say costs them their room, and nobody else anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from tests.helpers import peers
from tests.helpers.expect import Case, carry
from tests.helpers.fakes import FakeDecode, FakePrefill
from tests.helpers.pools import hybrid
from tests.wire.noise import resident

from statelink import Status, wire
from statelink.backend import Moved
from statelink.errors import Reason
from statelink.plan import Assignment

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helpers.engine import RoomHandle
    from tests.helpers.pair import Pair
    from tests.link.conftest import TwoEngines

pytestmark = pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")


@pytest.fixture
def decode(pair: Pair, tmp_path: Path) -> Iterator[FakeDecode]:
    """Someone who asks the pair's prefill."""
    fake = FakeDecode(tmp_path, pair.prefill.address, hybrid())
    yield fake
    fake.say(wire.Bye(sender=fake.name, to=pair.prefill.name))
    peers.until(lambda: fake.name not in pair.prefill.snapshot()["peers"])
    fake.close()


@pytest.fixture
def prefill(pair: Pair, tmp_path: Path) -> Iterator[FakePrefill]:
    """Someone whom the pair's decode asks."""
    fake = FakePrefill(tmp_path, hybrid())
    yield fake
    if fake.theirs is not None:
        fake.say(wire.Bye(sender=fake.name, to=fake.peer))
        peers.until(lambda: fake.address not in pair.decode.snapshot()["peers"])
    fake.close()


def use(fake: FakeDecode | FakePrefill, case: Case, generation: int) -> dict[str, Any]:
    return {"sender": fake.name, "to": fake.peer, "room": case.room, "generation": generation}


def test_an_honest_one(pair: Pair, decode: FakeDecode) -> None:
    """The impostor's tools are right: with them, a whole request works."""
    decode.attach()
    case = pair.case()
    expected = decode.memory.copy()
    decode.say(decode.request(case, 3))
    sending = pair.send(case)
    pair.push(sending, case, 64)
    finished = decode.hear(wire.Finished)
    assert finished.chunks == 2
    assert sending.see().status is Status.TRANSFERRING, "not before decode says that it has everything"
    decode.say(wire.Received(**use(decode, case, 3)))
    sending.succeeded()
    carry([pair.prefill.memory], expected, case)
    assert decode.memory.differences(expected) == []
    pair.done(case)


WRONG_ITEMS: list[tuple[str, Any, str]] = [
    ("kv", np.array([*range(12), 48]), "index 48 of component 'kv' is out of range"),
    ("kv", np.array([*range(12), -1]), "index -1 of component 'kv' is out of range"),
    ("kv", np.array([*range(12), 2**62]), "is out of range"),
    ("kv", np.arange(12), "12 items"),
    ("kv", np.arange(14), "14 items"),
    ("kv", np.zeros(13, np.int64), "is named twice"),
    ("kv", wire.ItemList(1, bytes(104)), "from item 1"),
    ("kv", wire.ItemList(1 << 39, bytes(104)), "component 'kv'"),
    ("kv", wire.ItemList(0, bytes(103)), "cut inside an element"),
    ("kv", None, "a request lacks component 'kv'"),
    ("mamba", np.array([10]), "index 10 of component 'mamba' is out of range"),
    ("mamba", np.array([1, 2]), "2 items of component 'mamba'"),
    ("aux", np.array([], np.int64), "0 items of component 'aux'"),
]


def test_requests_that_prefill_must_not_serve(pair: Pair, decode: FakeDecode) -> None:
    """Prefill trusts no index of the other side: these would be written outside what decode has."""
    decode.attach()
    for generation, (name, given, text) in enumerate(WRONG_ITEMS, 1):
        case = pair.case()
        packed = wire.ItemList(0, given.astype("<i8").tobytes()) if isinstance(given, np.ndarray) else given
        before = decode.memory.copy()
        sending = pair.send(case)
        pair.push(sending, case)
        decode.say(decode.request(case, generation, items={name: packed}))
        failed = decode.hear(wire.Failed)
        assert text in str(failed.reason), (name, given)
        assert (failed.room, failed.generation) == (case.room, generation)
        drained = decode.hear(wire.Drained)
        assert (drained.room, drained.generation) == (case.room, generation)
        assert sending.why() == failed.reason
        assert sending.wait(quiesced=True).quiesced
        assert decode.memory.differences(before) == []
        pair.done(case)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokens": 199}, "200 on prefill, 199 on decode"),
        ({"tokens": 0}, "200 on prefill, 0 on decode"),
        ({"prefix": 201, "items": dict.fromkeys(("kv", "swa", "dsa"), wire.ItemList(0, b""))}, "prefix"),
        ({"prefix": 1 << 39, "items": dict.fromkeys(("kv", "swa", "dsa"), wire.ItemList(0, b""))}, "prefix"),
        ({"prefix": 24}, "prefix 24 ends inside a page"),
        ({"prefix": 16}, "13 items"),
    ],
)
def test_requests_with_numbers_that_do_not_fit(
    pair: Pair, decode: FakeDecode, changes: dict[str, Any], text: str
) -> None:
    decode.attach()
    case = pair.case()
    sending = pair.send(case)
    pair.push(sending, case)
    decode.say(decode.request(case, 1, **changes))
    assert text in str(decode.hear(wire.Failed).reason)
    assert text in sending.failed()
    pair.done(case)


def test_who_only_introduced_itself_gets_no_room(pair: Pair, decode: FakeDecode) -> None:
    """Nothing is known of what it may be sent: it is told so, and honest decode gets the room."""
    decode.greet()
    case = pair.case()
    sending = pair.send(case)
    decode.say(decode.request(case, 1))
    assert decode.hear(wire.Failed).reason.code == "room.unattached"
    served(pair, case, sending)


def test_who_gives_up_a_room_of_another_instance_ends_it_for_nobody(pair: Pair, decode: FakeDecode) -> None:
    decode.attach()
    case = pair.case()
    receiving, sending = pair.receive(case), pair.send(case)
    sending.reach(Status.WAITING)
    decode.say(wire.Failed(**use(decode, case, 1), reason=Reason("x", "it is mine")))
    decode.hear(wire.Drained)
    decode.say(decode.request(case, 2))
    assert decode.hear(wire.Failed).reason.code == "room.instances"
    pair.push(sending, case)
    pair.ended(case, receiving, sending)


def test_who_asks_first_gets_a_room(pair: Pair, decode: FakeDecode) -> None:
    """And honest decode is told at once."""
    decode.attach()
    case = pair.case()
    decode.say(decode.request(case, 1))
    sending = pair.send(case)
    sending.reach(Status.WAITING)
    assert pair.receive(case).why().code == "room.instances"
    assert sending.see().status is Status.WAITING
    sending.abort()
    decode.hear(wire.Drained)
    pair.done(case)


def test_a_rank_that_is_missing_keeps_nobody_from_the_room(pair: Pair, decode: FakeDecode) -> None:
    """One that says to be of two ranks asks first, and alone: the first instance that is complete gets the room."""
    decode.greet()
    attach, _ = decode.plan()
    decode.backend.connect(decode.peer, decode.theirs.descriptor, decode.theirs.inventory.regions)  # type: ignore[union-attr]
    decode.say(msgspec.structs.replace(attach, destinations=2))
    decode.hear(wire.Attached)
    case = pair.case()
    sending = pair.send(case)
    decode.say(decode.request(case, 1))
    peers.until(lambda: pair.prefill.snapshot()["load"]["pending_requests"] == 1)
    served(pair, case, sending)
    assert decode.hear(wire.Failed).reason.code == "room.instances"


def served(pair: Pair, case: Case, sending: RoomHandle) -> None:
    """Honest decode gets a room that is open."""
    receiving = pair.receive(case)
    pair.push(sending, case)
    pair.ended(case, receiving, sending)


def test_assignments_that_cannot_be_carried_out(pair: Pair, decode: FakeDecode) -> None:
    decode.greet()
    attach, _ = decode.plan()
    good = attach.assignment
    replace = msgspec.structs.replace
    share = good.shares[0]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"assignment": replace(good, source=1)}, "an assignment is for other ranks"),
        ({"assignment": replace(good, target=1)}, "an assignment is for other ranks"),
        ({"digest": bytes(16)}, "the two sides compile different plans"),
        ({"digest": b""}, "the two sides compile different plans"),
        ({"assignment": replace(good, shares=good.shares[1:])}, "the two sides compile different plans"),
        ({"assignment": Assignment(0, 0, (replace(share, component="nope"),))}, "an assignment names component 'nope'"),
        ({"assignment": Assignment(0, 0, (replace(share, buffers=("x",)),))}, "buffer 'x'"),
        ({"assignment": Assignment(0, 0, (share, share))}, "it is named twice"),
        ({"assignment": Assignment(0, 0, (replace(share, boxes=()),))}, "0 boxes; 1 to "),
        ({"assignment": Assignment(0, 0, (replace(share, boxes=share.boxes * 3),))}, "overlaps another box"),
    ]
    for changes, text in wrong:
        decode.say(replace(attach, **changes))
        assert text in str(decode.hear(wire.Refuse).reason), changes
    assert decode.silent(wire.Attached)
    decode.say(attach)
    decode.hear(wire.Attached)


def test_what_prefill_does_not_fall_for(pair: Pair, decode: FakeDecode) -> None:
    decode.attach()
    case = pair.case()
    before = decode.memory.copy()
    decode.say(decode.request(case, 5))
    sending = pair.send(case)
    sending.reach(Status.WAITING)
    decode.say(wire.Received(**use(decode, case, 5)))  # before anything was sent
    decode.say(wire.Received(**use(decode, case, 4)))
    decode.say(decode.request(case, 5))  # twice
    decode.say(wire.Failed(**use(decode, case, 4), reason=Reason("x", "an earlier use of the room")))
    assert decode.hear(wire.Drained).generation == 4
    decode.say(wire.Finished(**use(decode, case, 5), digest=bytes(16), moved={}, chunks=1))
    decode.say(wire.Chunk(**use(decode, case, 5), number=1 << 62, granules={"kv": (0, 1 << 62)}))
    decode.say(wire.Ping(sender=decode.name, to="somebody else"))
    assert decode.hear(wire.Unknown).sender == pair.prefill.name
    assert sending.see().status is Status.WAITING
    assert decode.memory.differences(before) == []
    pair.push(sending, case)
    decode.hear(wire.Finished)
    decode.say(wire.Received(**use(decode, case, 6)))
    decode.say(wire.Ping(sender=decode.name, to=pair.prefill.name))
    decode.hear(wire.Pong)
    assert sending.see().status is Status.TRANSFERRING
    decode.say(wire.Received(**use(decode, case, 5)))
    sending.succeeded()
    pair.done(case)


def test_a_note_that_nobody_expects(pair: Pair, decode: FakeDecode) -> None:
    decode.attach()
    case = pair.case()
    decode.say(decode.request(case, 5))
    sending = pair.send(case)
    sending.reach(Status.WAITING)
    decode.say(wire.Note(**use(decode, case, 5), component="kv", payload=b"psst"))
    assert "expects no messages" in str(decode.hear(wire.Failed).reason)
    assert "expects no messages" in sending.failed()
    pair.done(case)


def finished(prefill: FakePrefill, request: wire.Request, moved: dict[str, int], **changes: Any) -> wire.Finished:
    assert prefill.plan is not None
    usual: dict[str, Any] = {
        "sender": prefill.name,
        "to": prefill.peer,
        "room": request.room,
        "generation": request.generation,
        "digest": prefill.plan.digest,
        "moved": {name: Moved(nbytes, 1) for name, nbytes in moved.items()},
        "chunks": 1,
    }
    return wire.Finished(**{**usual, **changes})


def asked(pair: Pair, prefill: FakePrefill, attached: bool) -> tuple[Case, RoomHandle, wire.Request, dict[str, int]]:
    """A room that decode has asked for, and the bytes that it should get."""
    case = pair.case(200)
    receiving = pair.decode.receive(case.room, prefill.address, 200, case.target, deadline=30)
    if not attached:
        prefill.attached()
    request = prefill.hear(wire.Request)
    promised = {
        "kv": 13 * 4 * 2 * 16 * 4 * 16 * 2,
        "swa": 5 * 2 * 16 * 2 * (16 + 24) * 2,
        "dsa": 13 * 2 * 16 * 33,
        "mamba": 2 * (128 * 3 + 4 * 8 * 16) * 4,
        "aux": 16 * 4 + 20 * 4,
    }
    return case, receiving, request, promised


def test_prefill_that_lies_about_what_it_moved(pair: Pair, prefill: FakePrefill) -> None:
    """Decode believes only what adds up with its own numbers, component by component."""
    lies: list[tuple[dict[str, int], dict[str, Any], str]] = [
        ({"kv": -16}, {}, "kv: 212992 bytes promised, 212976 moved"),
        ({"swa": +1}, {}, "swa: 25600 bytes promised, 25601 moved"),
        ({"mamba": -7168}, {}, "mamba: 7168 bytes promised, 0 moved"),
        ({"aux": -144, "dsa": -13728}, {}, "aux: 144 bytes promised, 0 moved; dsa: 13728 bytes promised, 0 moved"),
        ({"more": 5}, {}, "more: 0 bytes promised, 5 moved"),
        ({}, {"digest": bytes(16)}, "a writer followed another plan"),
        ({}, {"digest": b""}, "a writer followed another plan"),
    ]
    for number, (off, changes, text) in enumerate(lies):
        case, receiving, request, promised = asked(pair, prefill, number > 0)
        said = {name: promised.get(name, 0) + off.get(name, 0) for name in promised.keys() | off.keys()}
        prefill.say(finished(prefill, request, {name: n for name, n in said.items() if n}, **changes))
        told = receiving.failed()
        assert text in told
        assert prefill.name in told
        assert prefill.hear(wire.Failed).reason == receiving.why()
        assert receiving.wait(quiesced=True).quiesced
        pair.spoilt(case)


def test_what_decode_does_not_fall_for(pair: Pair, prefill: FakePrefill) -> None:
    case, receiving, request, promised = asked(pair, prefill, False)
    right = finished(prefill, request, promised)
    replace = msgspec.structs.replace
    for wrong in (
        replace(right, generation=request.generation ^ 1),
        replace(right, room=request.room + 1),
        replace(right, sender="somebody else"),
        replace(right, to="somebody else"),
        wire.Attached(sender=prefill.name, to=prefill.peer, digest=bytes(16)),
        wire.Failed(**{**use(prefill, case, request.generation + 1)}, reason=Reason("x", "an earlier use")),
        wire.Drained(**use(prefill, case, request.generation + 1)),
        wire.Received(**use(prefill, case, request.generation)),
        wire.Chunk(
            **use(prefill, case, request.generation),
            number=2**62,
            granules={"no": (0, 2**62)},
            layers=(-(2**62), 2**62),
        ),
        wire.Welcome(sender=prefill.name, to=prefill.peer, handshake=wire.write_handshake(prefill.card)),
    ):
        prefill.say(wrong)
    for frames in ([b"finished", b"\x80"], [b"failed", b"\xff"], [b"x"]):
        prefill.say_raw(frames)
    prefill.say(wire.Ping(sender=prefill.name, to=prefill.peer))
    assert prefill.silent(wire.Received)
    assert receiving.see().status in (Status.WAITING, Status.TRANSFERRING)
    assert receiving.see().reason is None
    prefill.say(right)
    assert prefill.hear(wire.Received).generation == request.generation
    receiving.succeeded()
    prefill.say(right)  # and once more, and too late
    prefill.say(wire.Failed(**use(prefill, case, request.generation), reason=Reason("x", "too late")))
    assert prefill.silent(wire.Failed, 0.1)
    assert receiving.see().status is Status.SUCCEEDED
    pair.done(case)
    pair.verify()


def test_the_first_reason_stays(pair: Pair, prefill: FakePrefill) -> None:
    case, receiving, request, promised = asked(pair, prefill, False)
    for what in ("the first", "the second"):
        prefill.say(wire.Failed(**use(prefill, case, request.generation), reason=Reason("their.code", what)))
    prefill.say(finished(prefill, request, promised))
    assert receiving.failed() == "the first"
    assert receiving.why().code == "their.code"
    assert receiving.wait(quiesced=True).quiesced
    pair.spoilt(case)


def test_prefill_that_confirms_another_part(pair: Pair, prefill: FakePrefill) -> None:
    receiving = pair.decode.receive(501, prefill.address, 64, deadline=1.0)
    prefill.attached(digest=bytes(16))
    assert receiving.failed(10)
    assert prefill.silent(wire.Request)


def test_cards_that_do_not_go_with_ours(pair: Pair, tmp_path: Path) -> None:
    cards: list[tuple[dict[str, Any], str]] = [
        ({"protocol": (7, 9)}, "the two sides speak no protocol version in common"),
        ({"backend": "rdma"}, "the two sides use different backends"),
        ({"role": "router"}, "the role of a peer is unknown"),
        ({"strategies": {"kv": "staged"}}, "the two sides move component 'kv' with different strategies"),
        ({"descriptor": b"nonsense"}, "descriptor"),
    ]
    for number, (changes, text) in enumerate(cards):
        fake = FakePrefill(tmp_path, hybrid())
        try:
            receiving = pair.decode.receive(510 + number, fake.address, 64, deadline=20)
            fake.welcome(**changes)
            told = receiving.failed()
            assert text in told
            assert fake.name in told
        finally:
            fake.close()


def test_an_attached_peer_that_asks_for_much(two_engines: TwoEngines, tmp_path: Path) -> None:
    """Prefill keeps as many bytes as it may, whatever is asked; and who asks for little is served meanwhile."""
    limit = 8 << 20
    pair = two_engines.pair(max_pending_request_bytes=limit)
    pair.run()
    fake = FakeDecode(tmp_path, pair.prefill.address, hybrid())
    try:
        fake.attach()
        early = pair.case()
        receiving = pair.receive(early)
        peers.until(lambda: pair.prefill.snapshot()["load"]["pending_requests"] == 1)
        before = resident(pair.prefill.engine.pid)
        items = {"kv": wire.ItemList(0, bytes(4 << 20))}
        for room in range(1, 60):
            usual: dict[str, Any] = {"room": (1 << 50) + room, "generation": 1, "tokens": 1, "prefix": 0}
            fake.say(wire.Request(sender=fake.name, to=fake.peer, **usual, items=items))
        fake.hear(wire.Failed, (1 << 50) + 57, timeout=60)
        assert pair.prefill.snapshot()["load"]["pending_request_bytes"] <= limit
        assert resident(pair.prefill.engine.pid) - before < limit + (96 << 20)
        sending = pair.send(early)
        pair.push(sending, early)
        pair.ended(early, receiving, sending)
    finally:
        fake.close()
