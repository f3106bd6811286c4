"""Every message survives the trip, and only messages do."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
import numpy as np
import pytest

from statelink import state, wire
from statelink.backend import Moved
from statelink.errors import PeerError, Reason, WireError

from .samples import LINK, REASON, USE, card, messages

SAMPLES = messages()


def bad(kind: bytes, body: bytes) -> WireError:
    with pytest.raises(WireError) as caught:
        wire.decode([kind, body])
    return caught.value


def changed(kind: str, **fields: Any) -> bytes:
    """The sample's body with some fields replaced."""
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(SAMPLES[kind]))
    return msgspec.msgpack.encode({**raw, **fields})


def test_there_is_a_sample_of_every_kind() -> None:
    assert {kind.decode() for kind in wire.KINDS} == set(SAMPLES)


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_message_survives_the_trip(kind: str) -> None:
    frames = wire.encode(SAMPLES[kind])
    assert len(frames) == 2
    assert frames[0] == kind.encode()
    back = wire.decode(frames)
    assert type(back) is type(SAMPLES[kind])
    assert back == SAMPLES[kind]
    # A set of fields that a default could hide would not be noticed above.
    assert msgspec.structs.asdict(back) == msgspec.structs.asdict(SAMPLES[kind])


@pytest.mark.parametrize("kind", SAMPLES)
def test_unknown_fields_are_ignored_and_missing_ones_are_an_error(kind: str) -> None:
    body = changed(kind, of_a_later_version={"nested": [1, None, "x"]})
    assert wire.decode([kind.encode(), body]) == SAMPLES[kind]
    error = bad(kind.encode(), b"\x80")
    assert error.code == "wire.body"
    assert str(error).startswith(f"malformed {kind} message: ")
    assert "missing required field `sender`" in str(error)


def test_fields_with_defaults_may_be_missing() -> None:
    body = msgspec.msgpack.encode({"sender": "a", "room": 1, "generation": 0, "tokens": 5, "prefix": 0})
    got = wire.decode([b"request", body])
    assert got == wire.Request(sender="a", to="", room=1, generation=0, tokens=5, prefix=0, items={}, prepared={})


def test_unknown_kinds_and_frame_counts_have_codes_of_their_own() -> None:
    assert bad(b"teleport", b"\x80").code == "wire.kind"
    assert bad(b"", b"").code == "wire.kind"
    assert str(bad(b"\xff" * 1000, b"")).count("xff") == 32, "a frame's contents are quoted without limit"
    for frames in ([], [b"ping"], [b"ping", b"\x80", b""]):
        with pytest.raises(WireError) as caught:
            wire.decode(frames)
        assert caught.value.code == "wire.frames"


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("ping", {"sender": "x" * 513}),
        ("ping", {"to": "x" * 513}),
        ("ping", {"sender": 5}),
        ("ping", {"sender": None}),
        ("request", {"room": 0}),
        ("request", {"room": -1}),
        ("request", {"room": 1.0}),
        ("request", {"generation": -1}),
        ("request", {"generation": 1 << 63}),
        ("request", {"tokens": (1 << 40) + 1}),
        ("request", {"tokens": -1}),
        ("request", {"prefix": -1}),
        ("request", {"prefix": True}),
        ("request", {"items": {"kv": [-1, b""]}}),
        ("request", {"items": {"kv": {"first": (1 << 40) + 1, "ids": b""}}}),
        ("request", {"items": {"kv": {"first": 0, "ids": b"\x00" * ((32 << 20) + 8)}}}),
        ("request", {"items": {"k" * 513: {"first": 0, "ids": b""}}}),
        ("request", {"prepared": {"kv": "text"}}),
        ("attach", {"destinations": 0}),
        ("attach", {"destinations": (1 << 16) + 1}),
        ("attach", {"digest": b"\x00" * 65}),
        ("attached", {"digest": b"\x00" * 65}),
        ("finished", {"digest": b"\x00" * 65}),
        ("finished", {"chunks": -1}),
        ("finished", {"moved": {"kv": {"nbytes": -1, "blocks": 1}}}),
        ("finished", {"moved": {"kv": {"nbytes": 1, "blocks": -1}}}),
        ("chunk", {"number": -1}),
        ("chunk", {"granules": {"kv": [0, 1, 2]}}),
        ("chunk", {"granules": {"kv": [-1, 1]}}),
        ("chunk", {"nbytes": 1 << 63}),
        ("note", {"payload": b"\x00" * ((64 << 10) + 1)}),
        ("failed", {"reason": {"code": "x", "what": "y" * 9000}}),
        ("failed", {"reason": {"code": "x" * 300, "what": "y"}}),
        ("failed", {"reason": {"code": "x", "what": "y", "who": {str(n): "" for n in range(33)}}}),
        ("refuse", {"reason": None}),
    ],
)
def test_what_is_out_of_bounds_is_refused(kind: str, fields: dict[str, Any]) -> None:
    name = next(iter(fields))
    error = bad(kind.encode(), changed(kind, **fields))
    assert error.code == "wire.body"
    assert f"$.{name}" in str(error)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("request", {"room": 1, "tokens": 0}),
        ("request", {"room": (1 << 64) - 1, "tokens": 1 << 40}),
        ("note", {"payload": b"\x00" * (64 << 10)}),
        ("attach", {"destinations": 1}),
        ("request", {"items": {"k" * 512: {"first": 1 << 40, "ids": b""}}}),
    ],
)
def test_what_is_just_inside_the_bounds_is_taken(kind: str, fields: dict[str, Any]) -> None:
    got = wire.decode([kind.encode(), changed(kind, **fields)])
    assert type(got) is type(SAMPLES[kind])


def test_a_message_has_a_largest_size() -> None:
    big = wire.Request(
        **USE,
        tokens=1,
        prefix=0,
        prepared={str(number): b"\x00" * (1 << 20) for number in range(65)},
    )
    with pytest.raises(WireError) as caught:
        wire.encode(big)
    assert caught.value.code == "wire.size"
    assert str(caught.value).startswith("a request message of 6")
    assert str(caught.value).endswith(f": it may have at most {wire.limit_of(wire.Request)}")


def test_a_value_that_no_frame_can_hold_is_one_error() -> None:
    with pytest.raises(WireError) as caught:
        wire.encode(wire.Received(sender="a", room=1 << 64, generation=0))
    assert caught.value.code == "wire.encode"


def test_reasons_are_clipped_rather_than_lost() -> None:
    reason = Reason("c" * 999, "w" * 99_999, {str(n): "v" * 99_999 for n in range(99)}, "\udcff", "h" * 99_999)
    for message in (
        wire.Refuse(**LINK, reason=reason),
        wire.Failed(**USE, reason=reason),
    ):
        back = wire.decode(wire.encode(message))
        assert isinstance(back, (wire.Refuse, wire.Failed))
        assert back.reason.what == "w" * len(back.reason.what)
        assert 1000 < len(back.reason.what) < 10_000
        assert len(back.reason.who) == 32
        assert back.reason.code.startswith("ccc")
    short = wire.decode(wire.encode(wire.Refuse(**LINK, reason=REASON)))
    assert isinstance(short, wire.Refuse)
    assert short.reason == REASON


def test_a_card_survives_the_trip() -> None:
    sent = card()
    got = wire.decode(wire.encode(wire.Hello(**LINK, handshake=wire.write_handshake(sent))))
    assert isinstance(got, wire.Hello)
    back = wire.read_handshake(got.handshake)
    assert back == sent
    assert back.inventory.digest() == sent.inventory.digest()
    assert back.inventory.regions == sent.inventory.regions


@pytest.mark.parametrize(
    "definition",
    [
        {"index": "slot", "coverage": "request"},
        {"index": "page", "coverage": "of a later version"},
        {"index": "of a later version", "coverage": "suffix"},
        {"coverage": 7, "more": True},
    ],
)
def test_a_card_with_a_type_that_is_unknown_here_is_refused_by_name(definition: dict[str, Any]) -> None:
    """Also where a later version defines it with words that are unknown here."""
    raw = msgspec.msgpack.decode(wire.write_handshake(card()))
    raw["kinds"].append({"name": "vendor_ring", **definition})
    raw["inventory"]["components"].append({"name": "ring", "type": "vendor_ring", "buffers": []})
    with pytest.raises(PeerError) as caught:
        wire.read_handshake(msgspec.Raw(msgspec.msgpack.encode(raw)))
    assert caught.value.code == "peer.state_type"
    known = ", ".join(kind.name for kind in state.state_types())
    assert str(caught.value) == (
        f"a peer holds state of type 'vendor_ring', which is not known here (peer decode.0-ab): known types: {known}\n"
        "hint: install the package that brings the type on this side too, or, if it is built in there, the peer's "
        "version of statelink, '0.1.0'"
    )


@pytest.mark.parametrize(
    "path", [field.encode_name for field in msgspec.structs.fields(wire.Handshake) if field.required]
)
def test_a_card_without_a_field_is_malformed(path: str) -> None:
    raw = msgspec.msgpack.decode(wire.write_handshake(card()))
    del raw[path]
    with pytest.raises(WireError) as caught:
        wire.read_handshake(msgspec.Raw(msgspec.msgpack.encode(raw)))
    assert caught.value.code == "wire.handshake"
    assert f"`{path}`" in str(caught.value)


def test_a_card_whose_inventory_contradicts_itself_is_malformed() -> None:
    raw = msgspec.msgpack.decode(wire.write_handshake(card()))
    raw["inventory"]["components"][0]["buffers"][0]["count"] = 1 << 40
    with pytest.raises(WireError, match=r"leaves its region"):
        wire.read_handshake(msgspec.Raw(msgspec.msgpack.encode(raw)))


def test_moved_is_what_both_sides_compare() -> None:
    sample = SAMPLES["finished"]
    assert isinstance(sample, wire.Finished)
    got = wire.decode(wire.encode(sample))
    assert isinstance(got, wire.Finished)
    assert got.moved == {"kv": Moved(1 << 40, 77)}


@pytest.mark.parametrize("ids", [[], [0], [7, 3, 3, (1 << 63) - 1], list(range(1000))])
def test_item_lists_travel_as_little_endian_arrays(ids: list[int]) -> None:
    back = wire.unpack_items(wire.ItemList(12, b"".join(number.to_bytes(8, "little") for number in ids)))
    assert back.dtype == np.int64
    assert back.tolist() == ids


@pytest.mark.parametrize("cut", range(1, 8))
def test_an_item_list_that_was_cut_inside_an_element_is_refused(cut: int) -> None:
    with pytest.raises(WireError, match=r"a list of indices is cut inside an element: \d+ bytes"):
        wire.unpack_items(wire.ItemList(0, bytes(16 - cut)))


def test_every_field_has_a_value_in_its_sample() -> None:
    """So each of them is encoded, decoded and attacked by the tests that use the samples."""
    unset = [
        f"{type(sample).__name__}.{field.name}"
        for sample in SAMPLES.values()
        for field in msgspec.structs.fields(type(sample))
        if not field.required and getattr(sample, field.name) == _default(field)
    ]
    assert unset == []


def _default(field: Any) -> Any:
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


RECORDED = Path(__file__).with_name("messages.txt")


def test_a_message_does_not_change_without_notice() -> None:
    """A peer with an older core ignores a new field, and a field that is missing has its default.

    So record a new one that has a default. For any other change, give the protocol a new number, too.
    """
    fields = [
        f"{name}.{field.name}{'' if field.required else '?'}: {_type(field.type)}"
        for name, sample in SAMPLES.items()
        for field in msgspec.structs.fields(type(sample))
    ]
    here = "\n".join([f"protocol {wire.PROTOCOL[1]}", *fields]) + "\n"
    if os.environ.get("STATELINK_TEST_RECORD"):
        RECORDED.write_text(here)
    assert here == RECORDED.read_text(), "see this test's docstring; STATELINK_TEST_RECORD=1 records what there is"


def _type(kind: Any) -> str:
    """A type as a text that is the same in every Python."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _type(arguments[0])
    if isinstance(kind, types.UnionType) or origin is Union:
        return " | ".join(map(_type, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type, arguments))}]"
    return "..." if kind is ... else kind.__name__
