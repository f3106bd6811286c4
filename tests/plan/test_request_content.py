"""The content of a request: golden values, another way to make them, and what is refused."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import pytest

from statelink import content_of
from statelink.errors import RoomError

GOLDEN = [
    ([], {}, "5f1e2ac1583b5e737a24dcbe971dfdd3"),
    ([1, 2, 3], {}, "f4a28f39e7a5335546c7f9e95aeb5136"),
    ([1, 2, 3], {"adapter": "sql"}, "682af42c462fc6ef6567347c1be07618"),
    ([1, 2, 3], {"salt": "tenant 7", "adapter": "sql", "items": ["a1", "b2"]}, "433271ed2b694ddfb96973f5e30101f9"),
    ([-1, (1 << 63) - 1, 151655], {"salt": "grüße"}, "d9e54928526980feeb8b181a8a4e4694"),
]
"""Tokens, extras, and the content. They are also in the guide."""


def by_hand(tokens: list[int], extras: dict[str, Any]) -> str:
    """The documented bytes, made with struct."""
    raw = b"statelink content 1\n" + struct.pack(f"<Q{len(tokens)}q", len(tokens), *tokens)
    for name in sorted(extras):
        values = extras[name] if isinstance(extras[name], list) else [extras[name]]
        raw += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<Q", len(values))
        for value in values:
            encoded = value.encode()
            raw += struct.pack("<Q", len(encoded)) + encoded
    return hashlib.sha256(raw).hexdigest()[:32]


@pytest.mark.parametrize(("tokens", "extras", "expected"), GOLDEN)
def test_golden_values(tokens: list[int], extras: dict[str, Any], expected: str) -> None:
    assert content_of(tokens, **extras).hex() == by_hand(tokens, extras) == expected


def test_every_form_of_the_same_tokens_has_one_content() -> None:
    expected = content_of([5, 6, 7])
    wide = np.array([5, 0, 6, 0, 7, 0], np.int32)
    forms = [(5, 6, 7), range(5, 8), np.array([5, 6, 7], np.uint64), np.array([5, 6, 7], ">i4"), wide[::2]]
    assert all(content_of(each) == expected for each in forms)
    torch = pytest.importorskip("torch")
    assert content_of(torch.tensor([5, 6, 7], dtype=torch.int32)) == expected


def test_what_is_not_given_counts_as_nothing() -> None:
    assert content_of([1], adapter=None, items=[]) == content_of([1])
    assert content_of([1], adapter="") != content_of([1])
    assert content_of([1], items="a") == content_of([1], items=["a"]) == content_of([1], items=(b"a",))


def test_different_requests_differ() -> None:
    different = [
        content_of([1, 2]),
        content_of([2, 1]),
        content_of([1]),
        content_of([1, 2, 0]),
        content_of([1, 2], adapter="a"),
        content_of([1, 2], salt="a"),
        content_of([1, 2], items=["ab", "c"]),
        content_of([1, 2], items=["a", "bc"]),
        content_of([1, 2], items=["abc"]),
        content_of([1, 2], items=["c", "ab"]),
        content_of([1, 2], adapter="a", salt="b"),
        content_of([1, 2], adapter="b", salt="a"),
        content_of([1, 2], salt="\ud800"),
    ]
    assert len(set(different)) == len(different)
    assert {len(each) for each in different} == {16}


@pytest.mark.parametrize(
    "tokens",
    [None, 5, "abc", [1.5], [[1, 2]], [1, "a"], [True], [1 << 63], [1 << 70], np.array([1 << 63], np.uint64), {}],
)
def test_tokens_that_are_none_are_refused(tokens: Any) -> None:
    with pytest.raises(RoomError, match="the token ids of a request are") as caught:
        content_of(tokens)
    assert caught.value.code == "room.content"


@pytest.mark.parametrize("value", [5, 1.5, [5], {"a": 1}, [None], True])
def test_extras_that_are_no_text_are_refused(value: Any) -> None:
    with pytest.raises(RoomError, match="the extra 'adapter' of a request's content is") as caught:
        content_of([1], adapter=value)
    assert caught.value.code == "room.content"
