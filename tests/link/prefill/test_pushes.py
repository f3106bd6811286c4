"""How state arrives in pieces: chunks, layers, gated pieces, many requests at once; and pieces that do not add up."""

from __future__ import annotations

import itertools
import random
import time
from typing import TYPE_CHECKING

import pytest
from tests.helpers.expect import Case, carry
from tests.helpers.worker import Host

from statelink import Pages, Status
from statelink.errors import ClosedError, RoomError

if TYPE_CHECKING:
    from tests.helpers.engine import RoomHandle
    from tests.helpers.pair import Pair

TCP = pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")


def failed_alike(receiving: RoomHandle, sending: RoomHandle) -> str:
    """Both sides failed for the same reason, and are quiet."""
    said = {receiving.failed(), sending.failed()}
    assert len(said) == 1, said
    assert receiving.wait(quiesced=True).quiesced
    assert sending.wait(quiesced=True).quiesced
    return said.pop()


def test_many_chunks(pair: Pair) -> None:
    pair.run(400, cuts=tuple(range(16, 400, 16)))
    pair.run(400, 96, cuts=tuple(range(32, 400, 32)))


def test_chunks_in_any_order(pair: Pair) -> None:
    """Only the last push has to be the last."""
    case = pair.case(256)
    receiving, sending = pair.begin(case)
    pools = pair.prefill.memory.pools
    for first in (192, 0, 128):
        named = {"last": False} if first == 192 else {}
        given = case.span(first, first + 64, pools)
        for name in ("mamba", "aux"):
            given.pop(name, None)
        sending.push(given, span=(first, first + 64), **named)
    rest = {name: ids for name, ids in case.span(64, 128, pools).items() if ids}
    sending.push({**rest}, span=(64, 128))
    sending.push({"mamba": case.source["mamba"], "aux": case.source["aux"]}, span=(256, 256))
    pair.ended(case, receiving, sending)


def test_components_of_one_push_cover_different_positions(pair: Pair) -> None:
    """Pages of full attention for the last chunk, and all of a window that begins long before it."""
    case = pair.case(256)
    receiving, sending = pair.begin(case)
    pools = pair.prefill.memory.pools
    early = case.span(0, 224, pools)
    chunks = ("kv", "dsa")
    sending.push({name: early[name] for name in chunks}, span=(0, 224), last=False)
    last, whole = case.span(224, 256, pools), case.whole(pools)
    given = {**whole, **{name: Pages(last[name], 224) for name in chunks}}
    sending.push(given, span=(0, 256))
    pair.ended(case, receiving, sending)


def test_indices_are_copied(pair: Pair) -> None:
    """An engine may reuse its list as soon as a call has returned."""
    case = pair.case()
    pair.decode.engine.gate("accept")
    pair.prefill.engine.gate("push")
    receiving, sending = pair.decode.receive(case.room, pair.prefill.address, case.tokens), pair.send(case)
    receiving.spoiling("accept", case.target, ready="accept")
    sending.spoiling("push", case.whole(pair.prefill.memory.pools), ready="push")
    pair.decode.engine.release("accept")
    pair.prefill.engine.release("push")
    pair.ended(case, receiving, sending)


@pytest.mark.parametrize("step", [1, 3])
def test_by_layers(pair: Pair, step: int) -> None:
    """As during the forward pass: layer after layer, and what has no layer at the end."""
    case = pair.case(200, 32)
    receiving, sending = pair.begin(case)
    whole = case.whole(pair.prefill.memory.pools)
    layered = {name: ids for name, ids in whole.items() if name != "aux"}
    for first in range(0, 8, step):
        sending.push(layered, span=(0, 200), layers=(first, first + step))
    assert sending.reach(Status.TRANSFERRING).status is Status.TRANSFERRING
    sending.push({"aux": whole["aux"]}, span=(200, 200), last=True)
    pair.ended(case, receiving, sending)


def test_chunks_by_layers(pair: Pair) -> None:
    case = pair.case(200)
    receiving, sending = pair.begin(case)
    pools = pair.prefill.memory.pools
    for (first, last), layers in itertools.product([(0, 96), (96, 200)], [(0, 2), (2, 5), (5, 100)]):
        given = case.span(first, last, pools)
        given.pop("aux", None)
        sending.push(given, span=(first, last), layers=layers)
    sending.push({"aux": case.source["aux"]}, last=True)
    pair.ended(case, receiving, sending)


@pytest.mark.parametrize("layers", [None, (1, 3)])
def test_pushes_overlap(pair: Pair, layers: tuple[int, int] | None) -> None:
    case = pair.case(200)
    receiving, sending = pair.begin(case)
    sending.push({"kv": case.source["kv"][:8]}, span=(0, 128), layers=(0, 2))
    sending.push({"kv": case.source["kv"][7:]}, span=(112, 200), layers=layers, last=False)
    text = failed_alike(receiving, sending)
    assert "component 'kv' is pushed twice" in text
    which = "layer 1" if layers else "layers 0, 1"
    assert f"positions [112, 128) of {which} were in an earlier push" in text
    pair.spoilt(case)


def test_a_page_is_pushed_for_two_positions(pair: Pair) -> None:
    """In two pushes: the last one is refused, and takes another page. The first one has not settled meanwhile."""
    case = pair.case(64)
    gate = pair.prefill.engine.gate("event")
    receiving, sending = pair.begin(case)
    pools = pair.prefill.memory.pools
    first, rest = case.span(0, 32, pools), case.span(32, 64, pools)
    sending.push({name: ids for name, ids in first.items() if name not in ("mamba", "aux")}, span=(0, 32), ready=gate)
    wrong = {**rest, "kv": [first["kv"][0], *rest["kv"][1:]]}
    with pytest.raises(RoomError, match="is pushed for two positions"):
        sending.push(wrong, span=(32, 64))
    sending.push(rest, span=(32, 64))
    pair.prefill.engine.release(gate)
    pair.ended(case, receiving, sending)


def test_the_slot_is_pushed_twice(pair: Pair) -> None:
    case = pair.case(200)
    receiving, sending = pair.begin(case)
    sending.push({"mamba": case.source["mamba"]}, span=(192, 200), last=False)
    pair.push(sending, case)
    assert "component 'mamba' is pushed twice" in failed_alike(receiving, sending)
    pair.spoilt(case)


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("chunk", "the last push leaves component 'kv' incomplete|position 64 of layer 0 was never pushed"),
        ("layer", "the last push leaves component 'kv' incomplete|position 0 of layer 2 was never pushed"),
        ("swa", "the last push leaves component 'swa' incomplete|position 128 of layer 6 was never pushed"),
        ("dsa", "the last push leaves component 'dsa' incomplete|position 0 of layer 0 was never pushed"),
        ("slot layer", "the last push leaves component 'mamba' incomplete|its item of layer 5 was never pushed"),
    ],
)
def test_the_last_push_is_incomplete(pair: Pair, missing: str, text: str) -> None:
    case = pair.case(200)
    receiving, sending = pair.begin(case)
    whole = case.whole(pair.prefill.memory.pools)
    if missing == "chunk":
        sending.push({"kv": case.source["kv"][:4]}, span=(0, 64))
        whole = {**case.span(128, 200, pair.prefill.memory.pools), "dsa": whole["dsa"], "swa": whole["swa"]}
        sending.push({"dsa": whole.pop("dsa"), "swa": whole.pop("swa")}, span=(0, 200), last=False)
        sending.push(whole, span=(128, 200))
    elif missing == "layer":
        for layers in ((0, 2), (3, 4)):
            sending.push({"kv": whole["kv"]}, span=(0, 200), layers=layers)
        del whole["kv"]
        sending.push(whole, span=(0, 200))
    elif missing == "slot layer":
        sending.push({"mamba": whole.pop("mamba")}, span=(0, 200), layers=(0, 5))
        sending.push(whole, span=(0, 200))
    else:
        del whole[missing]
        sending.push(whole, span=(0, 200))
    said = failed_alike(receiving, sending)
    for part in text.split("|"):
        assert part in said
    pair.spoilt(case)


def test_a_push_after_the_last(pair: Pair) -> None:
    case = pair.case(200)
    receiving, sending = pair.receive(case, ready=pair.decode.engine.gate("later")), pair.send(case)
    pair.push(sending, case)
    with pytest.raises(ClosedError) as error:
        sending.push({"kv": []}, span=(200, 200))
    assert str(error.value) == f"a room takes no more pushes (room {case.room}): its last push was made"
    pair.decode.engine.release("later")
    pair.ended(case, receiving, sending)


def test_positions_that_nobody_asked_for_stay_behind(pair: Pair) -> None:
    """Prefill pushes everything that it has; decode holds a part, and says so."""
    case = pair.case(256, 128)
    receiving, sending = pair.begin(case)
    sending.reach(Status.WAITING)
    pair.push(sending, case, 48, 112, 160)
    pair.ended(case, receiving, sending)
    assert receiving.see().report.moved["kv"].nbytes == 8 * 2 * 4 * 16 * 4 * 16 * 2


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_ready_events_hold_the_bytes_back(pair: Pair, side: str) -> None:
    engine = pair.prefill.engine if side == "prefill" else pair.decode.engine
    gate = engine.gate("event")
    case = pair.case(200)
    if side == "prefill":
        receiving, sending = pair.begin(case)
        sending.push(case.span(0, 64, pair.prefill.memory.pools), span=(0, 64))
        assert receiving.reach(Status.TRANSFERRING).status is Status.TRANSFERRING
        before = pair.decode.memory.copy()
        sending.push(case.span(64, 200, pair.prefill.memory.pools), span=(64, 200), ready=gate)
    else:
        before = pair.decode.memory.copy()
        receiving, sending = pair.receive(case, ready=gate), pair.send(case)
        pair.push(sending, case)
    deadline = time.monotonic() + 20
    while engine(Host.asked, "event") < 20 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert engine(Host.asked, "event") >= 20, "it is looked at again and again"
    assert pair.decode.memory.differences(before) == []
    assert receiving.see().status < Status.SUCCEEDED
    assert not sending.see().quiesced, "its memory will still be read"
    engine.release("event")
    pair.ended(case, receiving, sending)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_ready_event_raises(pair: Pair, side: str) -> None:
    engine = pair.prefill.engine if side == "prefill" else pair.decode.engine
    gate = engine.gate("bad", raises="device lost")
    case = pair.case(200)
    # On decode, the room fails before it asks, and ends prefill's room only if nobody else will ask.
    receiving = pair.receive(case, **({"ready": gate} if side == "decode" else {}))
    sending = pair.send(case)
    pair.push(sending, case, **({"ready": gate} if side == "prefill" else {}))
    text = failed_alike(receiving, sending)
    assert "the engine's ready event failed" in text
    assert text.endswith("device lost")
    pair.spoilt(case)


def test_many_rooms_at_once(pair: Pair) -> None:
    """Opened, accepted and pushed in different orders on both sides; some fail, the others do not notice."""
    order = random.Random(5)
    cases = [pair.case(tokens, prefix) for tokens, prefix in [(16, 0), (40, 16), (64, 48), (30, 0), (48, 48), (9, 0)]]
    receiving: dict[int, RoomHandle] = {}
    sending: dict[int, RoomHandle] = {}

    def receive(case: Case) -> None:
        receiving[case.room] = pair.receive(case)

    def send(case: Case) -> None:
        sending[case.room] = pair.send(case)
        pair.push(sending[case.room], case, *range(16, case.tokens, 16))

    for _ in range(3):
        steps = [(call, case) for case in cases for call in (receive, send)]
        order.shuffle(steps)
        for call, case in steps:
            call(case)
        unlucky = cases[order.randrange(len(cases))]
        receiving[unlucky.room].abort("unlucky")
        for case in cases:
            if case is not unlucky:
                receiving[case.room].succeeded()
                sending[case.room].succeeded()
        for each in (receiving, sending):
            assert each[unlucky.room].wait(quiesced=True).quiesced
        for case in cases:
            if case is not unlucky or receiving[case.room].see().status is Status.SUCCEEDED:
                carry([pair.prefill.memory], pair.expected, case)
            else:
                pair.pardon(case)
        pair.verify()
        pair.idle()
    for case in cases:
        pair.done(case)
