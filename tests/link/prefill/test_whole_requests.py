"""Small requests that one push brings: what is listed in one expression is what each component would list by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.links import Rank

from statelink import Pages, Status
from statelink.backend import DIRECT

if TYPE_CHECKING:
    from collections.abc import Iterator

    import statelink

PAGE = 16
OFTEN = 5
"""Requests after which their shape is known."""
ORDERS = [3, 4, 5], [3, 5, 4], [7, 4, 5]
Links = tuple["statelink.Link", "statelink.Link", Rank, Rank]


@pytest.fixture
def links() -> Iterator[Links]:
    source, target = Rank("p", 1), Rank("d")
    config = {"role": "prefill", "backend": "tcp", "deadline": 20.0}
    with source.open(config) as prefill, target.open(config, role="decode") as decode:
        yield prefill, decode, source, target


def moved(links: Links, room: int, ids: list[int], there: list[int]) -> tuple[Any, ...]:
    """Play a room of these pages, look at all of decode's memory, and return what both sides say that moved."""
    prefill, decode, source, target = links
    tokens = PAGE * len(ids)
    target.arrays[...] = 0
    sending = prefill.send(room, tokens)
    sending.push({"kv": ids})
    receiving = decode.receive(room, prefill.address, tokens, {"kv": there})
    assert receiving.wait(20, quiesced=True) is sending.wait(20, quiesced=True) is Status.SUCCEEDED
    expected = np.zeros_like(target.arrays)
    expected[:, there] = source.arrays[:, ids]
    np.testing.assert_array_equal(target.arrays, expected)
    return sending.report.moved, receiving.report.moved, sending.report.chunks, receiving.report.chunks


def test_both_ways_move_and_report_the_same(links: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[bool, list[Any]] = {True: [], False: []}
    room = 0
    for plain, seen in found.items():
        monkeypatch.setattr(type(DIRECT.sender()), "plain", plain)
        for there in ORDERS:
            for ids in ORDERS:
                for _ in range(OFTEN):
                    room += 1
                    seen.append(moved(links, room, ids, there))
    assert found[True] == found[False]
    assert {each[0]["kv"].blocks for each in found[True]} == {2, 4, 6}


def failed(sending: statelink.Sending, receiving: statelink.Receiving) -> str:
    assert sending.wait(20) is receiving.wait(20) is Status.FAILED
    assert sending.reason is not None
    return sending.reason.code


@pytest.mark.parametrize("known", [False, True])
def test_a_push_that_lacks_something_fails_its_room(links: Links, known: bool) -> None:
    prefill, decode, *_ = links
    for room in range(1, known * OFTEN + 1):
        moved(links, room, [1, 2, 3], [4, 5, 6])
    sending = prefill.send(100, 3 * PAGE)
    sending.push({"kv": Pages([1, 2], PAGE)})  # without the first page
    receiving = decode.receive(100, prefill.address, 3 * PAGE, {"kv": [4, 5, 6]})
    assert failed(sending, receiving) == "room.incomplete"


@pytest.mark.parametrize("known", [False, True])
def test_pushes_in_pieces_are_compared_with_each_other(links: Links, known: bool) -> None:
    prefill, decode, *_ = links
    for room in range(1, known * OFTEN + 1):
        moved(links, room, [1, 2], [4, 5])
    sending = prefill.send(100, 2 * PAGE)
    receiving = decode.receive(100, prefill.address, 2 * PAGE, {"kv": [4, 5]})
    sending.push({"kv": [1]}, span=(0, PAGE))
    sending.push({"kv": [1, 2]}, span=(0, 2 * PAGE))
    assert failed(sending, receiving) == "room.overlap"
    moved(links, 101, [1, 2], [4, 5])
