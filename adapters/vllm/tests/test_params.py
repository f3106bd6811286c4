"""What routers and clients write into ``kv_transfer_params``, and the places of requests in what a client asked for."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.values import ANYTHING, FIELDS

import statelink
from statelink import Status, state
from statelink_vllm.connector import (
    Options,
    Place,
    Prefix,
    Source,
    Wanted,
    answer,
    place_of,
    read_options,
    refusal,
    wanted,
)

pytestmark = pytest.mark.smoke

HERE = "tcp://127.0.0.1:7100"
KEY = "A" * 43
PREFILL, DECODE, BOTH = (read_options(role, {}) for role in ("kv_producer", "kv_consumer", "kv_both"))
NAMED = read_options("kv_consumer", {"peers": {"prefill-0": [HERE]}})
OPEN = read_options("kv_consumer", {"insecure": True})
HUGE = pytest.param(10**5000, id="huge")
ALONE = Place(0, 0, "request", several=False)


def read(said: Any, options: Options, place: Place = ALONE, secret: bytes = b"secret") -> Wanted:
    return wanted(said, place, options, secret)


def received(options: Options = DECODE, place: Place = ALONE, **said: Any) -> Wanted:
    return read({"do_remote_prefill": True, "do_remote_decode": False, **said}, options, place)


def sent(options: Options = PREFILL, place: Place = ALONE, **said: Any) -> Wanted:
    return read({"do_remote_prefill": False, "do_remote_decode": True, **said}, options, place)


# What routers pass.


@pytest.mark.parametrize("said", [None, {}, {"do_remote_prefill": False, "do_remote_decode": None}, {"other": [1]}])
@pytest.mark.parametrize("options", [PREFILL, DECODE, BOTH])
def test_nothing_is_wanted_where_nothing_is_said(said: Any, options: Options) -> None:
    assert read(said, options) == Wanted()


def test_decode_reads_what_prefill_answers() -> None:
    room = sent().room
    said = answer([Prefix(room, 9, b"\x01\xff"), Prefix(8, 5, b"x")], "prefill-0", [HERE])
    assert said["do_remote_prefill"] is True
    made = read(json.loads(json.dumps(said)), DECODE)
    offered = (Prefix(room, 9, b"\x01\xff"), Prefix(8, 5, b"x"))
    assert made == Wanted(Source(room, (HERE,)), answered=b"\x01\xff", offered=offered)


def test_an_answer_survives_a_router_that_rounds_numbers() -> None:
    said = answer([Prefix((1 << 63) - 1, 9, b"x")], "prefill-0", [HERE])
    assert said["room"] == str((1 << 63) - 1)


def test_decode_computes_what_prefill_refused() -> None:
    said = refusal("this server sends nothing")
    assert "this server sends nothing" in said.values()
    for options in (PREFILL, DECODE, BOTH):
        assert read(said, options) == Wanted()


def test_both_servers_make_one_room_of_a_routers_id() -> None:
    rooms = {sent(transfer_id=name).room for name in ("xfer-7", "xfer-8", "7", "-7")}
    assert len(rooms) == 4
    for name in ("xfer-7", 7, -7, "\ud800"):
        at = received(NAMED, transfer_id=name, remote_engine_id="prefill-0").source
        assert at == (sent(transfer_id=name).room, "prefill-0")


def test_rooms_that_prefill_draws_differ() -> None:
    rooms = {sent().room for _ in range(100)}
    assert len(rooms) == 100
    assert all(0 < room < 1 << 63 for room in rooms)
    assert not sent().known
    assert sent(transfer_id="xfer-7").known


def test_a_server_of_both_roles_receives_and_sends() -> None:
    made = read({"do_remote_prefill": True, "do_remote_decode": True, "room": 7, "peer": [HERE]}, BOTH)
    assert made.source == (7, (HERE,))
    assert made.room
    assert not made.not_received + made.not_sent


@pytest.mark.parametrize(("options", "role"), [(DECODE, "kv_consumer"), (PREFILL, "kv_producer")])
def test_what_a_role_does_not_do_is_said(options: Options, role: str) -> None:
    made = read({"do_remote_prefill": True, "do_remote_decode": True, "room": 7, "peer": [HERE]}, options)
    assert (made.source is None) == ("no" in made.not_received) == (options is PREFILL)
    assert (made.room == 0) == ("no" in made.not_sent) == (options is DECODE)
    assert f"kv_role '{role}'" in made.not_received + made.not_sent


# What they must not write.


@pytest.mark.parametrize("said", ["text", 7, True, [], [{}], 1.5, ""])
def test_what_is_no_object_is_no_use(said: Any) -> None:
    made = read(said, BOTH)
    assert made.not_received == made.not_sent
    assert "no object" in made.not_sent
    assert made._replace(not_received="", not_sent="") == Wanted()


@pytest.mark.parametrize("value", ["true", "false", 1, 0, 1.0, [], {}, [True], ""])
@pytest.mark.parametrize("key", ["do_remote_prefill", "do_remote_decode"])
def test_a_wish_is_true_or_false(key: str, value: Any) -> None:
    made = read({"room": 7, "peer": [HERE], key: value}, BOTH)
    assert (made.source, made.room) == (None, 0)
    assert f"{key!r} is " in made.not_sent


@pytest.mark.parametrize("room", [7, "7", 1, (1 << 64) - 1, str((1 << 64) - 1), "007"])
def test_a_room_is_a_whole_number(room: Any) -> None:
    made = received(room=room, peer=[HERE])
    assert made.source == (int(room), (HERE,))


@pytest.mark.parametrize(
    "room",
    [
        *(True, False, 0, -1, 1 << 64, HUGE, 1.0, 7.5, 1e300, math.inf, -math.inf, math.nan),
        *("", "0", "-7", "+7", " 7", "7 ", "7\n", "1_0", "7.0", "1e3", "0x7", "seven", "٣", "\ud800", "7\0"),
        *(str(1 << 64), "9" * 20, "9" * 5000, [], [7], {}, {"room": 7}),
    ],
)
def test_what_is_no_room_is_refused(room: Any) -> None:
    made = received(room=room, peer=[HERE])
    assert made.source is None
    assert "'room' is " in made.not_received


@pytest.mark.parametrize("given", [7, True, [], {}, "", "xyz", "0", "0 0", "0x00", "00\n", 1.5, "\ud800", "0" * 130])
def test_what_is_no_content_is_refused(given: Any) -> None:
    made = received(room=7, peer=[HERE], content=given)
    assert made.source is None
    assert "'content' is " in made.not_received


@pytest.mark.parametrize("name", [True, False, "", 1.5, [], ["a"], {}, 1 << 64, -(1 << 64), HUGE, "x" * 2000])
def test_what_is_no_id_of_a_router_is_refused_on_both_sides(name: Any) -> None:
    assert "'transfer_id' is " in sent(transfer_id=name).not_sent
    assert "'transfer_id' is " in received(transfer_id=name, peer=[HERE]).not_received


@pytest.mark.parametrize(
    "peer",
    [
        *([HERE], [HERE, "tcp://127.0.0.1:7101"], ["tcp://localhost:1"], ["tcp://[::1]:65535"], [f"{HERE}@{KEY}"]),
        [f"tcp://127.0.0.1:{1 + port}" for port in range(512)],
    ],
)
def test_addresses_are_taken_as_they_are(peer: list[str]) -> None:
    assert received(room=7, peer=peer).source == (7, tuple(peer))


NO_LISTS: list[Any] = [HERE, [], {}, {HERE: 1}, 7, True, ""]
NO_TEXTS: list[Any] = [7, None, True, [HERE], {}, "", "tcp://", "prefill-0"]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"peer": [HERE]}, "neither a 'room' nor a 'transfer_id'"),
        ({"room": 7}, "no 'peer'"),
        *[({"room": 7, "peer": peer}, "'peer' is ") for peer in NO_LISTS],
        *[({"room": 7, "peer": [each]}, "no address") for each in NO_TEXTS],
        *[
            ({"room": 7, "peer": [f"tcp://{each}"]}, "no address")
            for each in (
                *("127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1: 1"),
                *(f"127.0.0.1:{'9' * 5000}", "127.0.0.1:٣", "127.0.0.1:1\n", "127.0.0.1\0:1", "127.0.0.1\ud800:1"),
                *("127.0.0.1:0;10.0.0.9:7100", "127.0.0.1;10.0.0.9:7100", "127.0.0.1/.evil.example:7100"),
                *("127.0.0.1#.evil.example:7100", "127.0.0.1?.evil.example:7100", "user@127.0.0.1:7100"),
                *("127.0.0.1:1,tcp://10.0.0.9:1", f"{'x' * 300}:1", "[::1:1"),
                *("127.0.0.1:1@short", f"127.0.0.1:1@{KEY}x"),
            )
        ],
        ({"room": 7, "peer": [HERE, HERE]}, "an address twice"),
        ({"room": 7, "peer": [f"tcp://127.0.0.1:{1 + port}" for port in range(513)]}, "at most 512"),
        ({"room": 7, "peer": ["tcp://10.0.0.9:7100"]}, "without keys only loopback"),
        ({"room": 7, "peer": [HERE, "tcp://127.0.0.1.evil.example:7100"]}, "without keys only loopback"),
        ({"room": 7, "peer": ["tcp://[fe80::1%lo]:7100"]}, "without keys only loopback"),
    ],
)
def test_what_a_request_may_not_say(said: dict[str, Any], why: str) -> None:
    made = received(**said)
    assert made.source is None
    assert why in made.not_received


def test_any_host_is_an_address_where_the_operator_admits_it() -> None:
    for each in ("tcp://10.0.0.9:7100", "tcp://node_7.fleet:1", "tcp://[fe80::1%eth0]:7100"):
        assert received(OPEN, room=7, peer=[each]).source == (7, (each,))
    assert received(OPEN, room=7, peer=["tcp://127.0.0.1:0;10.0.0.9:7100"]).source is None


def test_configured_peers_are_found_by_name_and_never_by_a_request() -> None:
    made = received(NAMED, room=7, peer=["tcp://127.0.0.1:9"], remote_engine_id="prefill-0")
    assert made.source == (7, "prefill-0")
    assert "no 'remote_engine_id'" in received(NAMED, room=7, peer=[HERE]).not_received


@pytest.mark.parametrize("found", [{"peers": {"prefill-0": [HERE]}}, {"rendezvous": HERE}])
@pytest.mark.parametrize(
    "name",
    [
        "tcp://10.0.0.9:7100",
        f"tcp://10.0.0.9:7100@{KEY}",
        "tcp://10.0.0.9:7100,tcp://10.0.0.9:7101",
        HERE,  # also one that is configured
        "tcp://",
        "tcp://prefill-0",
    ],
)
def test_an_address_is_no_name_of_a_peer(found: dict[str, Any], name: str) -> None:
    options = read_options("kv_consumer", {**found, "insecure": True})
    assert "'remote_engine_id' is an address" in received(options, room=7, remote_engine_id=name).not_received


@pytest.mark.parametrize(
    "name", [[HERE], [], "", 7, True, {HERE: 1}, "x" * 300, "prefill\n0", "prefill\0", "\ud800", 1.5]
)
def test_what_is_no_text_is_no_name_of_a_peer(name: Any) -> None:
    assert "no name of" in received(NAMED, room=7, remote_engine_id=name).not_received


def test_every_other_text_is_looked_up_and_never_dialled() -> None:
    """What passes as a name is a name to a link, too: the room fails at once, since no peer has it."""
    options = read_options("kv_consumer", {"peers": {"prefill-0": [HERE]}, "backend": "tcp"})
    pages = torch.zeros(4, 16, 1, 8)
    inventory = state.describe("decode", [state.kv_pages({0: (pages, pages.clone())}, heads=1)])
    with statelink.open(options.link, inventory) as link:
        for number, name in enumerate(
            ("TCP://10.0.0.9:7100", " tcp://10.0.0.9:7100", "a,tcp://10.0.0.9:7100", "10.0.0.9:71")
        ):
            source = received(options, room=1 + number, remote_engine_id=name).source
            assert source is not None
            assert source.peer == name
            room = link.receive(source.room, source.peer, 16, {"kv": [1]})
            assert room.wait(30) is Status.FAILED
            assert room.reason is not None
            assert room.reason.code == "peer.unknown"


@given(ANYTHING | FIELDS, st.sampled_from([PREFILL, DECODE, BOTH, NAMED, OPEN]))
@settings(deadline=None)
def test_whatever_is_written_is_read(said: Any, options: Options) -> None:
    """It is never an error, and what comes out is what a link takes. What is not done has a short reason."""
    made = read(said, options)
    if made.source is not None:
        assert type(made.source.room) is int
        assert 0 < made.source.room < 1 << 64
        assert made.source.peer
        assert isinstance(made.source.peer, str) == options.addressed_by_name
    assert 0 <= made.room < 1 << 64
    if isinstance(said, dict):
        assert bool(made.source) + bool(made.not_received) <= 1
        if said.get("do_remote_prefill") not in (None, False):
            assert made.source or made.not_received
        if said.get("do_remote_decode") not in (None, False):
            assert made.room or made.not_sent
    for why in (made.not_received, made.not_sent):
        assert len(why) < 400
        assert why.isprintable()


# Lists of prompts, and several answers.


def named(name: str, *, rejected: bool = False) -> Place:
    return place_of(SimpleNamespace(request_id=name, abort_immediately=rejected))


@pytest.mark.parametrize(
    ("name", "prompt", "answer"),
    [
        ("cmpl-0f3a-0-0123abcd", 0, 0),
        ("cmpl-0f3a-0-01234567", 0, 0),
        ("cmpl-0f3a-12-0123abcd", 12, 0),
        ("3_cmpl-0f3a-12-01234567", 12, 3),
        ("chatcmpl-0f3a-0123abcd", 0, 0),
        ("chatcmpl-own-7-0123abcd", 0, 0),
        ("2_chatcmpl-0f3a-0123abcd", 0, 2),
        ("cmpl-7_8-9-0-0123abcd", 0, 0),
        ("cmpl-a\nb-2-0123abcd", 2, 0),
        (f"cmpl-a-{'9' * 5000}-0123abcd", 0, 0),
        (f"{'9' * 5000}_a", 0, 0),
        ("request7", 0, 0),
        ("", 0, 0),
        ("_", 0, 0),
    ],
)
def test_the_place_of_a_request_is_in_vllms_id(name: str, prompt: int, answer: int) -> None:
    place = named(name)
    assert (place.prompt, place.answer, place.several) == (prompt, answer, "_cmpl" in name or "_chat" in name)
    assert named(name, rejected=True) == Place(0, 0, name, several=False)


def test_without_vllms_random_digits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    assert named("1_cmpl-0f3a-12") == Place(12, 1, "cmpl-0f3a-12", several=True)


def test_each_prompt_of_a_list_has_a_room_of_its_own_where_a_router_sends_it_to_both() -> None:
    places = [named(f"cmpl-prefill-{number}-0123abcd") for number in range(20)]
    others = [named(f"cmpl-decode-{number}-89abcdef") for number in range(20)]
    rooms = [sent(place=place, transfer_id="xfer-7").room for place in places]
    assert len(set(rooms)) == 20
    sources = [received(NAMED, place, transfer_id="xfer-7", remote_engine_id="prefill-0").source for place in others]
    assert sources == [(room, "prefill-0") for room in rooms]


def test_of_a_list_of_prompts_only_the_first_is_sent_where_vllm_answers_for_that_one_alone() -> None:
    first, second = (named(f"cmpl-0f3a-{number}-0123abcd") for number in range(2))
    assert sent(place=first).room
    made = sent(place=second)
    assert (made.room, made.usual) == (0, True)
    assert "not the first of a list" in made.not_sent
    assert received(place=first, room=7, peer=[HERE]).source == (7, (HERE,))
    made = received(place=second, room=7, peer=[HERE])
    assert (made.source, made.usual) == (None, True)
    assert "not the first of a list" in made.not_received


@pytest.mark.parametrize("said", [{}, {"transfer_id": "xfer-7"}])
def test_several_answers_to_a_prompt_have_one_room_which_the_first_sends(said: dict[str, Any]) -> None:
    made = [sent(place=named(f"{number}_cmpl-0f3a-0-0123abcd"), **said) for number in range(3)]
    assert len({each.room for each in made}) == 1
    assert [each.another for each in made] == [False, True, True]
    assert all(each.known and not each.not_sent for each in made)
    other = sent(place=named("0_cmpl-0f3b-0-0123abcd"))
    assert other.room != made[0].room


def test_several_answers_that_several_ranks_may_have() -> None:
    """Prefill's answer may be that of a rank that has no state. A router that gives an id has named the rank itself."""
    asks = {"do_remote_decode": True}
    for more, sends in (({}, [False, False]), ({"transfer_id": "xfer-7"}, [True, False])):
        places = [named(f"{number}_cmpl-0f3a-0-0123abcd") for number in range(2)]
        made = [wanted({**asks, **more}, place, PREFILL, b"secret", spread=True) for place in places]
        assert [bool(each.room) for each in made] == sends
        assert all(each.room or "another rank" in each.not_sent for each in made)
    assert wanted(asks, ALONE, PREFILL, b"secret", spread=True).room


def test_nobody_can_guess_the_room_of_several_answers() -> None:
    place = named("0_cmpl-0f3a-0-0123abcd")
    said = {"do_remote_decode": True}
    assert read(said, PREFILL, place, b"one").room != read(said, PREFILL, place, b"other").room


def test_of_several_answers_the_first_receives_the_state() -> None:
    made = [received(place=named(f"{number}_cmpl-d-0-0123abcd"), room=7, peer=[HERE]) for number in range(2)]
    assert made[0].source == (7, (HERE,))
    assert (made[1].source, made[1].usual) == (None, True)
    assert "('n')" in made[1].not_received


@pytest.mark.parametrize(
    ("said", "words"),
    [
        *(({"hold": each}, "'hold'") for each in ("60", -1, 1e9, [1], math.nan)),
        ({"cached": 1}, "'cached'"),
        ({"extend": "seven"}, "'extend'"),
    ],
)
def test_what_is_said_of_a_turn_to_come_is_read_strictly(said: dict[str, Any], words: str) -> None:
    made = sent(BOTH, **said)
    assert made.room == made.extend == 0
    assert words in made.not_sent


@pytest.mark.parametrize(
    "said", [{"tokens": 0}, {"tokens": "9"}, {"prefixes": 7}, {"prefixes": [7]}, {"prefixes": [{"room": "8"}]}]
)
def test_what_an_answer_offers_is_read_strictly(said: dict[str, Any]) -> None:
    made = received(BOTH, **{"room": 7, "peer": [HERE], "content": "0f", "tokens": 9, **said})
    assert made.source is None
    assert next(iter(said)) in made.not_received or "tokens" in made.not_received
