"""What a room demands of the engines on both sides, and what it lets them do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from tests.helpers.pair import Pair, items

from statelink import Pages, Status
from statelink.errors import ClosedError, ConfigError, RoomError

if TYPE_CHECKING:
    from tests.helpers.engine import RoomHandle
    from tests.helpers.expect import Case

TCP = pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")


def test_token_counts_disagree(pair: Pair) -> None:
    case = pair.case(200)
    receiving, sending = pair.receive(case), pair.prefill.send(case.room, 201)
    said = {receiving.failed(), sending.failed()}
    assert said == {
        "the two sides disagree on the number of tokens "
        f"(room {case.room}, peer {pair.decode.name}, backend {pair.backend}): 201 on prefill, 200 on decode"
    }
    assert receiving.wait(quiesced=True).quiesced
    pair.spoilt(case)


def test_token_counts_disagree_and_prefill_is_late(pair: Pair) -> None:
    case = pair.case(200)
    receiving = pair.receive(case)
    receiving.reach(Status.WAITING)
    sending = pair.prefill.send(case.room, 184)
    assert "184 on prefill, 200 on decode" in sending.failed()
    assert "184 on prefill, 200 on decode" in receiving.failed()
    pair.spoilt(case)


WRONG_TARGETS: list[tuple[str, Any, str]] = [
    ("kv", [0] * 13, "item 0 of component 'kv' is named twice"),
    ("kv", list(range(14)), "14 items of component 'kv'"),
    ("kv", list(range(12)), "12 items of component 'kv'"),
    ("kv", [], "0 items of component 'kv'"),
    ("kv", [*range(12), 48], "index 48 of component 'kv' is out of range"),
    ("kv", [*range(12), -1], "index -1 of component 'kv' is out of range"),
    ("kv", np.arange(13.0), "are not a list of integers"),
    ("kv", np.arange(13).reshape(13, 1), "are not a list of integers"),
    ("kv", np.full(13, 2**63, np.uint64), "out of range"),
    ("kv", [None] * 13, "component 'kv'"),
    ("kv", ["0"] * 13, "are not a list of integers"),
    ("kv", [True] * 13, "are not a list of integers"),
    ("kv", {"a": 1}, "component 'kv'"),
    ("kv", 7, "component 'kv'"),
    ("kv", Pages(list(range(13)), 16), "13 items from item 1 of the sequence of component 'kv'"),
    ("kv", Pages(list(range(13)), -16), "component 'kv'"),
    ("kv", Pages(list(range(13)), cast("Any", 0.0)), "component 'kv'"),
    ("kv", Pages(list(range(13)), cast("Any", None)), "component 'kv'"),
    ("swa", [0, 1, 2, 3], "4 items of component 'swa'"),
    ("swa", list(range(8)), "8 items of component 'swa'"),
    ("mamba", [10], "index 10 of component 'mamba' is out of range"),
    ("mamba", [1, 2], "2 items of component 'mamba'"),
    ("mamba", [], "0 items of component 'mamba'"),
    ("mamba", 3.5, "component 'mamba'"),
    ("mamba", [[1]], "component 'mamba'"),
    ("aux", [], "0 items of component 'aux'"),
    ("aux", None, "accept lacks component 'aux'"),
    ("kvv", [1], "hint: did you mean 'kv'?"),
]


def test_items_that_decode_may_not_name(pair: Pair) -> None:
    case = pair.case(200)
    receiving = pair.decode.receive(case.room, pair.prefill.address, 200)
    for name, given, text in WRONG_TARGETS:
        with pytest.raises(RoomError) as error:
            receiving.accept(items(case, **{name: given}))
        assert text in str(error.value), (name, given)
        assert error.value.reason.who["room"] == str(case.room)
        assert receiving.see().quiesced, "nothing was named"
    with pytest.raises(RoomError):  # and the room is not there if it all comes in one call
        pair.decode.receive(case.room + 500_000, pair.prefill.address, 200, items(case, kv=[]))
    receiving.accept(case.target)
    sending = pair.send(case)
    pair.push(sending, case)
    pair.ended(case, receiving, sending)


@TCP
@pytest.mark.parametrize("prefix", [-16, 201, 8, 16.0, None, "16", True])
def test_prefixes_that_are_none(pair: Pair, prefix: Any) -> None:
    case = pair.case(200)
    many = {**case.target, "kv": list(range(14)), "dsa": list(range(14))}
    for given in (case.target, many, items(case, kv=[], swa=[], dsa=[])):
        with pytest.raises(RoomError):
            pair.decode.receive(case.room, pair.prefill.address, 200, given, prefix=prefix)
    assert not any(pair.decode.snapshot()["rooms"].values()), "a refused call leaves no room"
    pair.done(case)


def test_numpy_integers_are_integers(pair: Pair) -> None:
    """What an engine computes with numpy is as good as an int, wherever a number is asked for."""
    n = np.int64
    case = pair.case(200, 32)
    receiving = pair.decode.receive(np.uint64(case.room), pair.prefill.address, n(200))
    receiving.accept(
        {**case.target, "kv": Pages(np.array(case.target["kv"], np.int32), n(32)), "mamba": n(case.target["mamba"][0])},
        prefix=np.int32(32),
    )
    sending = pair.prefill.send(np.uint64(case.room), np.int32(200))
    first = case.span(0, 64, pair.prefill.memory.pools)
    sending.push({**first, "kv": Pages(np.array(first["kv"]), n(0))}, span=(n(0), n(64)), layers=(n(0), np.uint8(8)))
    sending.push(case.span(64, 200, pair.prefill.memory.pools), span=np.array([64, 200]), last=np.bool_(True))
    pair.ended(case, receiving, sending)


WRONG_PUSHES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"kv": 12}, {"span": (0, 200)}, "12 items of component 'kv' for span [0, 200): 13 pages of 16 tokens"),
    ({"kv": 14}, {"span": (0, 200)}, "14 items of component 'kv' for span [0, 200)"),
    ({"swa": 8}, {"span": (0, 200)}, "8 items of component 'swa' for span [0, 200)"),
    ({"kv": 13}, {"span": (0, 201)}, "the end of the span of a push is 201: a whole number from 0 to 200 is expected"),
    (
        {"kv": 13},
        {"span": (-16, 200)},
        "the start of the span of a push is -16: a whole number from 0 to 200 is expected",
    ),
    ({"kv": 13}, {"span": (200, 0)}, "span [200, 0) of a push: it ends before it begins"),
    ({"kv": 5}, {"span": (8, 80)}, "span [8, 80) splits a page of component 'kv': a page has 16 tokens"),
    ({"kv": 5}, {"span": (0, 72)}, "span [0, 72) splits a page of component 'kv'"),
    ({"kv": 13}, {"span": (0.0, 200.0)}, "span"),
    ({"kv": 13}, {"span": (0,)}, "span"),
    ({"kv": 13}, {"span": "ab"}, "span"),
    ({"kv": 13}, {"layers": (2, 2)}, "layers (2, 2) of a push"),
    ({"kv": 13}, {"layers": (-1, 2)}, "the start of the layers of a push is -1"),
    ({"kv": 13}, {"layers": (0.5, 2)}, "layers"),
    ({"kv": 13}, {"layers": (0, 1 << 70)}, "layers"),
    ({"mamba": 1}, {"span": (0, 64)}, "component 'mamba' is pushed with span [0, 64)"),
    (
        {"aux": 1},
        {"last": False},
        "component 'aux' is pushed with span [0, 200): its row is final only in the last push",
    ),
    ({"aux": 2}, {}, "2 items of component 'aux'"),
    ({"mamba": 2}, {}, "2 items of component 'mamba': type 'mamba' has exactly one slot a request"),
    ({"kv": 13, "mamba": 1}, {}, "the last push of a room lacks component 'aux'"),
    ({"kv": 13, "aux": 1}, {}, "the last push of a room lacks component 'mamba'"),
    ({"kvv": 13}, {}, "a push names component 'kvv'"),
]


def test_pushes_that_do_not_fit(pair: Pair) -> None:
    case = pair.case(200)
    receiving, sending = pair.begin(case)
    for counts, named, text in WRONG_PUSHES:
        given = {name: list(range(count)) for name, count in counts.items()}
        with pytest.raises(RoomError) as error:
            sending.push(given, **named)
        reason = error.value.reason
        assert text in f"{reason.what}: {reason.cause}", (counts, named)
        assert reason.who == {"room": str(case.room), "backend": pair.backend}
        assert ("did you mean 'kv'?" in reason.hint) is ("kvv" in counts)
    with pytest.raises(RoomError, match=r"begins at 0 and ends at 200: name span=\(first, last\) in a push of a part"):
        sending.push({"kv": list(range(5))})
    for bad in ([48] * 13, [-1] * 13, np.arange(13.0), np.zeros((13, 1), int)):
        with pytest.raises(RoomError, match="component 'kv'") as error:
            sending.push({**case.whole(pair.prefill.memory.pools), "kv": bad})
        assert "span" not in error.value.hint, "the number of pages is right"
    with pytest.raises(
        RoomError, match=r"items of component 'kv' leave the pushed span.*2 pages of 16 tokens from position 64"
    ):
        sending.push({"kv": Pages([1, 2], 64)}, span=(0, 80))
    assert sending.see().quiesced, "nothing was named"
    pair.push(sending, case)
    pair.ended(case, receiving, sending)


@TCP
@pytest.mark.parametrize("room", [0, -1, 1 << 64, 1.0, "7", None, True, b"\x01"])
def test_ids_that_are_none(pair: Pair, room: Any) -> None:
    for side in ("prefill", "decode"):
        with pytest.raises(RoomError, match=r"a room id is .*from 1 to 2\^64 - 1 is expected"):
            opened(pair, side, room, 64)


@TCP
@pytest.mark.parametrize("tokens", [0, -5, 1.5, True, 1 << 60])
def test_numbers_of_tokens_that_are_none(pair: Pair, tokens: Any) -> None:
    for side in ("prefill", "decode"):
        with pytest.raises(RoomError, match=r"the number of tokens of room 9 is .*from 1 to "):
            opened(pair, side, 9, tokens)


def opened(pair: Pair, side: str, room: Any, tokens: Any) -> RoomHandle:
    if side == "prefill":
        return pair.prefill.send(room, tokens)
    return pair.decode.receive(room, pair.prefill.address, tokens)


@TCP
@pytest.mark.parametrize("peer", [(), 7, None, b"tcp://127.0.0.1:1", [5]])
def test_peers_that_are_none(pair: Pair, peer: Any) -> None:
    with pytest.raises((RoomError, ConfigError)):
        pair.decode.receive(8, peer, 64)


@TCP
@pytest.mark.parametrize("peer", ["tcp://127.0.0.1", ["tcp://127.0.0.1:1", ""], "", "tcp://127.0.0.1:99999"])
def test_addresses_that_are_none(pair: Pair, peer: Any) -> None:
    """Refused by the call, or at once after it; never a silence."""
    with pytest.raises((RoomError, ConfigError)):  # noqa: PT012 - either of the two
        receiving = pair.decode.receive(8, peer, 64, deadline=20)
        assert "deadline" not in receiving.failed(10)
        receiving.check()


@pytest.mark.parametrize("room", [1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_every_id_that_fits_in_64_bits(pair: Pair, room: int) -> None:
    pair.run(room=room)


def test_a_room_is_used_twice(pair: Pair) -> None:
    case = pair.case()
    receiving, sending = pair.begin(case)
    for again in (pair.send, pair.receive):
        with pytest.raises(RoomError, match=f"room {case.room} is in use") as error:
            again(case)
        assert error.value.code == "room.in_use"
    with pytest.raises(RoomError, match="take another id"):
        pair.receive(case)
    with pytest.raises(ClosedError, match="it was accepted before"):
        receiving.accept(case.target)
    pair.push(sending, case)
    pair.ended(case, receiving, sending)
    with pytest.raises(ClosedError, match="its last push was made"):
        sending.push({"kv": []})


def test_a_room_id_is_used_again(pair: Pair) -> None:
    for _ in range(5):
        pair.run(room=77)
    for _ in range(3):
        case = pair.case(room=77)
        receiving, sending = pair.begin(case)
        sending.push(case.span(0, 64, pair.prefill.memory.pools), span=(0, 64))
        sending.abort("not now")
        assert "not now" in receiving.failed()
        assert "not now" in sending.failed()
        assert receiving.wait(quiesced=True).quiesced
        assert sending.wait(quiesced=True).quiesced
        pair.spoilt(case)
        pair.run(room=77)


PREFIXES = [(200, 16), (200, 128), (200, 176), (200, 192), (200, 200), (256, 240), (256, 256), (16, 16), (1, 0), (1, 1)]


@pytest.mark.parametrize(("tokens", "prefix"), PREFIXES)
@pytest.mark.parametrize("knows", [True, False])
def test_prefix_hits(pair: Pair, tokens: int, prefix: int, knows: bool) -> None:
    """Also where nothing of the pages is left; prefill need not know."""
    case = pair.case(tokens, prefix)
    if not knows:
        sending = pair.send(case)
        pair.push(sending, case)
        receiving = pair.receive(case)
    else:
        receiving, sending = pair.begin(case)
        seen = sending.reach(Status.WAITING)
        assert seen.prefix == prefix
        pages = {name: ids for name, ids in case.whole(pair.prefill.memory.pools).items() if name in ("kv", "dsa")}
        first = prefix // 16 if prefix < tokens else -(-tokens // 16)
        tail = {name: Pages(ids[first:], min(prefix, first * 16)) for name, ids in pages.items()}
        if prefix == tokens:
            tail = {}
        rest = case.span(0, tokens, pair.prefill.memory.pools)
        sending.push({**rest, **tail, **({} if tail else {"kv": rest["kv"], "dsa": rest["dsa"]})}, span=(0, tokens))
    pair.ended(case, receiving, sending)
    moved = receiving.see().report.moved
    assert ("kv" in moved) == (prefix < tokens)
    assert {"mamba", "aux"} <= moved.keys()


def test_an_unaligned_prefix_is_refused(pair: Pair) -> None:
    case = pair.case(200)
    receiving = pair.decode.receive(case.room, pair.prefill.address, 200)
    with pytest.raises(RoomError) as error:
        receiving.accept(case.target, prefix=24)
    assert "prefix 24 ends inside a page of component 'kv'" in str(error.value)
    assert "hint: use the last page boundary, 16" in str(error.value)
    receiving.accept(case.target)
    sending = pair.send(case)
    pair.push(sending, case)
    pair.ended(case, receiving, sending)


def test_ends_are_reported(pair: Pair) -> None:
    case: Case = pair.case(200, 16)
    pair.prefill.changes()
    pair.decode.changes()
    receiving, sending = pair.begin(case)
    pair.push(sending, case, 64, 128)
    pair.ended(case, receiving, sending)
    for link, room in ((pair.prefill, sending), (pair.decode, receiving)):
        ours = [each for each in link.changes() if each[0] == case.room]
        assert ours[-1][1:] == (Status.SUCCEEDED, True)
        report = room.see().report
        assert (report.room, report.tokens, report.prefix, report.chunks) == (case.room, 200, 16, 3)
        assert report.status == "succeeded"
        assert report.reason is None
        page = 2 * 4 * 16 * 4 * 16 * 2  # K and V of 4 layers
        assert report.moved["kv"].nbytes == 12 * page
        assert report.transferred > 0
