"""The numbers that the specification gives for indices: windows, tails, rings, pending groups, dealt positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from statelink import plan, state
from statelink.errors import RoomError, StateError

from .small import pointer

if TYPE_CHECKING:
    from statelink.state import Component, Partition


def window(width: int, page: int) -> Component:
    arrays = pointer(1, 2000, page, 1, 1), pointer(2, 2000, page, 1, 1)
    return state.kv_pages({0: arrays}, heads=1, window=width).component


@pytest.mark.parametrize(
    ("tokens", "width", "page", "prefix", "start", "pages"),
    [
        (1000, 128, 64, 0, 832, 3),
        (1000, 128, 64, 960, 960, 1),
        (1000, 128, 1, 0, 872, 128),
        (100, 128, 64, 0, 0, 2),
        (1024, 128, 64, 0, 896, 2),
        (1000, 4096, 64, 512, 512, 8),
        (1151, 128, 64, 0, 960, 3),
        (1152, 128, 64, 0, 1024, 2),
    ],
)
def test_windows(tokens: int, width: int, page: int, prefix: int, start: int, pages: int) -> None:
    """§2.2: they begin at the page that they reach into, on both sides and from either of the engine's tables."""
    component = window(width, page)
    assert plan.required_span(component, tokens, prefix) == (max(prefix, tokens - width, 0), tokens)
    ids = plan.indices_of(component, tokens, prefix, pages=np.arange(2000))
    assert ids.tolist() == list(range(start // page, start // page + pages))
    table = np.arange(2000) + 64
    assert plan.indices_of(component, tokens, prefix, table=table).tolist() == (ids + 64 // page).tolist()
    assert plan.required(component, tokens, prefix, ids).first * page == start
    # Prefill gives its pages of the window, and the rest of it where it does not know of a prefix.
    assert plan.pushed(component, tokens, prefix, (0, tokens), ids).first * page == start


def test_a_window_of_each_request() -> None:
    """§2.2, the variant: page ``(slot * cap + t mod cap) div G``, one for one with decode's list; it wraps here."""
    found = plan.indices_of(window(128, 64), 1000, slot=3, ring=320)
    assert found.tolist() == [(3 * 320 + t % 320) // 64 for t in (832, 896, 960)] == [18, 19, 15]
    assert plan.indices_of(window(128, 64), 1000, 960, slot=3, ring=320).tolist() == [15]
    assert len(found) == len(plan.indices_of(window(128, 64), 1000, pages=np.arange(16)))
    with pytest.raises(RoomError, match="a window of 200 positions is no multiple of pages of 64"):
        plan.indices_of(window(128, 64), 1000, slot=3, ring=200)
    with pytest.raises(RoomError, match="a whole number from 192"):
        plan.indices_of(window(128, 64), 1000, slot=3, ring=128)


def ring(number: int, slots: int, length: int, width: int, **fields: Any) -> state.Described:
    return state.ring_rows({0: {"rows": pointer(number, slots, length, width)}}, **fields)


@pytest.mark.parametrize(
    ("group", "tokens", "length", "expected"),
    [
        (128, 129, 128, [3]),
        (128, 129, 256, [7]),
        (128, 300, 128, [3]),
        (128, 300, 256, [6]),
        (128, 384, 128, []),
        (128, 384, 256, []),
        (2, 7, 2, [3]),
        (2, 8, 2, []),
    ],
)
def test_a_pending_group(group: int, tokens: int, length: int, expected: list[int]) -> None:
    """§2.7, for slot 3."""
    component = state.whole_items({"rest": pointer(1, 8, 4)}, type="c128_state", page=group, group=group).component
    assert plan.indices_of(component, tokens, slot=3, ring=length).tolist() == expected


@pytest.mark.parametrize(
    ("tokens", "length", "expected"),
    [
        (10, 8, [4, 5, 6, 7, 0, 1]),
        (10, 16, [4, 5, 6, 7, 8, 9]),
        (16, 8, [4, 5, 6, 7]),
        (16, 16, [12, 13, 14, 15]),
        (3, 8, [0, 1, 2]),
    ],
)
def test_live_rows_of_a_compressors_ring(tokens: int, length: int, expected: list[int]) -> None:
    """§6.5: the last ``N mod 4 + 4`` positions, wherever a side's ring has them."""
    component = ring(1, 4, length, 1, type="dsv4_c4_state", group=4, keep=4).component
    rows = plan.indices_of(component, tokens, slot=2, ring=length) - 2 * length
    assert rows.tolist() == expected


def latents(number: int, page: int, name: str = "kv", partition: Partition | None = None) -> state.Described:
    return state.mla_pages({0: pointer(number, 64, page, 1)}, name=name, partition=partition)


def test_pages_that_begin_later_are_counted_from_where_they_begin() -> None:
    component = latents(1, 4).component
    assert plan.indices_of(component, 20, 12, pages=plan.Pages([7, 8, 9], 8)).tolist() == [8, 9]
    assert plan.indices_of(component, 20, 12, pages=plan.Pages([5, 6, 7, 8, 9], 0)).tolist() == [8, 9]
    with pytest.raises(RoomError, match="no item begins there"):
        plan.indices_of(component, 20, 12, pages=plan.Pages([8, 9], 10))
    with pytest.raises(RoomError, match="entries -1 to 0 are needed of a list of 1"):
        plan.indices_of(component, 20, 12, pages=plan.Pages([9], 16))


@pytest.mark.parametrize("given", [[[1, 2], [3]], [1.0, 2.0], [[1, 2]], object(), [1], torch.zeros(2, device="meta")])
def test_what_is_no_list_of_pages_is_refused(given: Any) -> None:
    for name in ("pages", "table"):
        with pytest.raises(RoomError, match="cannot be computed") as caught:
            plan.indices_of(latents(1, 4).component, 8, **{name: given})
        assert caught.value.code == "room.indices"


@pytest.mark.parametrize(
    ("given", "got"),
    [("kv", "got 'kv'"), (latents(1, 4), "got Described"), (None, "got NoneType"), ({"kv": 1}, "got dict")],
    ids=["name", "constructed", "none", "dict"],
)
def test_what_is_no_component_is_refused_with_what_to_pass(given: Any, got: str) -> None:
    with pytest.raises(StateError, match="indices are computed for a component of an inventory") as caught:
        plan.indices_of(given, 8, pages=[1, 2])
    assert caught.value.reason.cause == got
    assert 'link.inventory.component("kv")' in caught.value.hint


@pytest.mark.parametrize("table", [[62, 63], range(62, 70)], ids=["too short", "inside a page"])
def test_page_ids_that_are_passed_as_token_slots(table: Any) -> None:
    with pytest.raises(
        RoomError, match=r"entries 0 to 4 are needed of|begins at token slot 62, inside a page"
    ) as caught:
        plan.indices_of(latents(1, 4).component, 8, table=table)
    assert "a list of page ids is passed as 'pages'" in caught.value.hint
    assert plan.indices_of(latents(1, 4).component, 8, pages=[62, 63]).tolist() == [62, 63]
