"""The field's list codecs: to the byte where they are right, and strict where the usual decoders are not."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statelink import backend, wire
from statelink.errors import WireError

PROFILE = settings(derandomize=True, database=None, deadline=None, max_examples=300)

VECTORS: list[tuple[list[list[int]], Any, str]] = [
    ([[7], [3, 4, 5], []], "i", "03000000 04000000 0c000000 00000000 07000000 030000000400000005000000"),
    ([], "i", ""),
    ([[]], "i", "01000000 00000000"),
    ([[-1]], "i", "01000000 04000000 ffffffff"),
    (
        [[0x7F1234000000, 0x7F1235000000], [0x10]],
        "Q",
        "02000000 10000000 08000000 00000034127f0000 00000035127f0000 1000000000000000",
    ),
    ([[2048, 32]], "I", "01000000 08000000 00080000 20000000"),
    ([[(1 << 64) - 1, 0]], "Q", "01000000 10000000 ffffffffffffffff 0000000000000000"),
]


@pytest.mark.parametrize(("lists", "code", "expected"), VECTORS)
def test_integer_lists_have_the_layout_of_the_field(lists: list[list[int]], code: Any, expected: str) -> None:
    packed = wire.pack_int_lists(lists, code)
    assert packed == bytes.fromhex(expected)
    assert [each.tolist() for each in wire.unpack_int_lists(packed, code)] == lists
    arrays = [np.array(each, {"i": "<i4", "I": "<u4", "Q": "<u8"}[code]) for each in lists]
    assert wire.pack_int_lists(arrays, code) == packed


def test_a_component_without_a_list_keeps_its_place() -> None:
    assert wire.pack_int_lists([None, [7], None], "i") == wire.pack_int_lists([[], [7], []], "i")
    assert wire.pack_int_lists([None], "Q") == bytes.fromhex("01000000 00000000")


def test_scalar_arrays_are_integers_too() -> None:
    assert wire.pack_int_lists([[np.array(7), np.uint8(9)]], "i") == wire.pack_int_lists([[7, 9]], "i")


def test_lists_of_another_width_are_what_their_bytes_are() -> None:
    """Nothing in the layout says the width: two i32 are one u64, and only an odd number of them is refused."""
    two, three = wire.pack_int_lists([[1, 2]], "i"), wire.pack_int_lists([[1, 2, 3]], "i")
    assert [each.tolist() for each in wire.unpack_int_lists(two, "Q")] == [[8589934593]]
    with pytest.raises(WireError, match="list 0 of 12 bytes, with elements of 8"):
        wire.unpack_int_lists(three, "Q")


def test_buffers_have_the_layout_of_the_field() -> None:
    packed = wire.pack_list_of_buffers([b"\x01\x02", b"", bytearray(b"\xaa"), memoryview(b"zz")])
    assert packed == struct.pack("<5I", 4, 2, 0, 1, 2) + b"\x01\x02\xaazz"
    assert [bytes(each) for each in wire.unpack_list_of_buffers(packed)] == [b"\x01\x02", b"", b"\xaa", b"zz"]
    assert wire.pack_list_of_buffers([]) == b""
    assert wire.pack_list_of_buffers([b""]) == b"\x01\x00\x00\x00\x00\x00\x00\x00"
    assert wire.unpack_list_of_buffers(b"") == []


@pytest.mark.parametrize(
    ("nested", "expected"),
    [
        ([[b"\x01\x02", None], [], [b"\xaa"]], "93 92 c4 02 01 02 c0 90 91 c4 01 aa"),
        ([[], []], "92 90 90"),
        ([], ""),
    ],
)
def test_nested_descriptors_have_the_layout_of_the_field(nested: list[list[bytes | None]], expected: str) -> None:
    packed = backend.pack_descriptors(nested)
    assert packed == bytes.fromhex(expected)
    assert backend.unpack_descriptors(packed, nested=True) == nested


def test_flat_descriptors_have_the_layout_of_the_field() -> None:
    packed = backend.pack_descriptors([b"\x01\x02", b"\xaa"])
    assert packed == bytes.fromhex("92 c4 02 01 02 c4 01 aa")
    assert backend.unpack_descriptors(packed, nested=False) == [b"\x01\x02", b"\xaa"]


@pytest.mark.parametrize(
    "given", [[None], [b"a", None], ["a"], [[1]], [[bytearray(b"a")]], [b"a", [b"b"]], [[b"a"], b"b"], [[], None]]
)
def test_what_is_no_list_of_descriptors_is_not_encoded(given: Any) -> None:
    with pytest.raises(WireError, match="is no descriptor") as caught:
        backend.pack_descriptors(given)
    assert caught.value.code == "wire.list"


@pytest.mark.parametrize("given", [5, 0, None, 1.5])
def test_what_is_no_list_at_all_is_refused(given: Any) -> None:
    calls: list[Callable[[Any], object]] = [
        lambda each: wire.pack_int_lists(each, "i"),
        lambda each: wire.unpack_int_lists(each, "i"),
        wire.pack_list_of_buffers,
        wire.unpack_list_of_buffers,
        backend.pack_descriptors,
    ]
    for call in calls:
        with pytest.raises(WireError) as caught:
            call(given)
        assert caught.value.code == "wire.list"


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    "data",
    [
        b"\x90",
        b"\xc0",
        b"\x92\x90",
        b"\x91\x05",
        b"\x91\x90\x90",
        b"\x91\xa1x",
        b"\x91\xa1\xff",
        b"\x91\x91\xa1\xff",
        b"\xdd\xff\xff\xff\xff",
    ],
)
def test_malformed_descriptors_are_refused(data: bytes, nested: bool) -> None:
    with pytest.raises(WireError) as caught:
        backend.unpack_descriptors(data, nested=nested)
    assert caught.value.code == "wire.list"


def packed(*lengths: int, n: int | None = None, payload: bytes = b"") -> bytes:
    count = len(lengths) if n is None else n
    return struct.pack(f"<{1 + len(lengths)}I", count, *lengths) + payload


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (packed(4, 12, 0, payload=b"\x00" * 12), "lengths that end at byte 32 of 28"),
        (packed(4, 12, 0, payload=b"\x00" * 14), "lengths that end at byte 32 of 30"),
        (packed(4, payload=b"\x00" * 5), "lengths that end at byte 12 of 13"),
        (packed(1 << 31, payload=b"\x00" * 4), "lengths that end at byte 2147483656 of 12"),
        (packed(0xFFFFFFFF, 5, payload=b"\x00" * 4), "lengths that end at byte 4294967312 of 16"),
        (b"\x00\x00\x00\x00", "a count of zero; an empty list is zero bytes"),
        (b"\x01", "a header of 1 bytes"),
        (b"\x01\x00\x00", "a header of 3 bytes"),
        (b"\x01\x00\x00\x00", "a count of 1 in 4 bytes"),
        (packed(4, n=2, payload=b""), "a count of 2 in 8 bytes"),
        (packed(4, n=0xFFFFFFFF, payload=b"\x00" * 4), "a count of 4294967295 in 12 bytes"),
    ],
)
def test_what_the_usual_decoders_take_silently_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(WireError) as caught:
        wire.unpack_list_of_buffers(data)
    assert str(caught.value) == f"a malformed list of buffers: {why}"
    assert caught.value.code == "wire.list"


def test_lists_that_were_cut_inside_an_element_are_refused() -> None:
    odd = packed(4, 12, payload=b"\x00" * 16)
    assert [len(each) for each in wire.unpack_int_lists(odd, "i")] == [1, 3]
    with pytest.raises(WireError, match="list 0 of 4 bytes, with elements of 8"):
        wire.unpack_int_lists(odd, "Q")


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ([1 << 31], "i"),
        ([-(1 << 31) - 1], "i"),
        ([1 << 32], "I"),
        ([-1], "I"),
        ([-1], "Q"),
        ([1 << 64], "Q"),
        ([1.0], "i"),
        ([True], "i"),
        ([None], "i"),
        (5, "i"),
        (["5"], "i"),
        ([[1]], "i"),
        ([np.array([3])], "i"),
        ([np.int64(-1)], "I"),
        ([np.int64(1 << 40)], "i"),
        ([np.float32(1.5)], "i"),
        ([np.bool_(True)], "i"),
        (np.array([[1, 2]]), "i"),
        (np.array([1.0]), "i"),
        (np.array([-1]), "I"),
        (np.array([1 << 40]), "I"),
        (np.array([True]), "i"),
        (range(1 << 31, (1 << 31) + 2), "i"),
        ([1], "x"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_encoder(value: Any, code: Any) -> None:
    with pytest.raises(WireError) as caught:
        wire.pack_int_lists([value], code)
    assert caught.value.code == "wire.list"


@PROFILE
@given(st.lists(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=6), max_size=6))
def test_any_lists_survive_the_trip(lists: list[list[int]]) -> None:
    data = wire.pack_int_lists(lists, "i")
    back = wire.unpack_int_lists(data, "i")
    assert [each.tolist() for each in back] == lists
    assert not any(each.flags.writeable for each in back)
    # By hand, as any engine would lay it out.
    flat = [struct.pack(f"<{len(each)}i", *each) for each in lists]
    assert data == (struct.pack(f"<{1 + len(flat)}I", len(flat), *map(len, flat)) + b"".join(flat) if lists else b"")


@PROFILE
@given(st.binary(max_size=40))
def test_whatever_decodes_is_what_encodes_to_it(data: bytes) -> None:
    """There is one encoding of each list, so that no two inputs mean the same."""
    buffers = None
    with contextlib.suppress(WireError):
        buffers = wire.unpack_list_of_buffers(data)
    assert buffers is None or wire.pack_list_of_buffers(buffers) == data
