"""The field's codec for descriptors: to the byte where the field is right, and strict where it is not."""

from __future__ import annotations

from typing import Any

import pytest

from statelink import backend
from statelink.errors import WireError


@pytest.mark.parametrize(
    ("given", "nested", "expected"),
    [
        ([[b"\x01\x02", None], [], [b"\xaa"]], True, "93 92 c4 02 01 02 c0 90 91 c4 01 aa"),
        ([[], []], True, "92 90 90"),
        ([], True, ""),
        ([b"\x01\x02", b"\xaa"], False, "92 c4 02 01 02 c4 01 aa"),
        ([], False, ""),
    ],
)
def test_descriptors_have_the_layout_of_the_field(given: Any, nested: bool, expected: str) -> None:
    packed = backend.pack_descriptors(given)
    assert packed == bytes.fromhex(expected)
    assert backend.unpack_descriptors(packed, nested=nested) == given


@pytest.mark.parametrize(
    "given",
    [[None], [b"a", None], ["a"], [[1]], [[bytearray(b"a")]], [b"a", [b"b"]], [[b"a"], b"b"], [[], None], 5, 0, None],
)
def test_what_is_no_list_of_descriptors_is_not_encoded(given: Any) -> None:
    with pytest.raises(WireError, match="descriptor") as caught:
        backend.pack_descriptors(given)
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
