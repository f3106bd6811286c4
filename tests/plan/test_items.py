"""From lists of indices to positions: exactly what must arrive, or an error that says what was expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from statelink import plan, state
from statelink.errors import RoomError
from statelink.plan import Pages
from statelink.state import Component, Memory

from .small import pointer

PAGED = state.mla_pages({0: pointer(1, 100, 16, 1)}).component
WINDOWED = state.kv_pages({0: (pointer(1, 100, 16, 1, 1), pointer(2, 100, 16, 1, 1))}, heads=1, window=40).component
CHUNKED = state.kv_pages(
    {0: (pointer(1, 100, 16, 1, 1), pointer(2, 100, 16, 1, 1))}, heads=1, attention_chunk=40
).component


SLOT = state.mamba_slots(conv={0: pointer(1, 10, 4, 2)}, ssm={}).component
ROW = state.aux_rows({"row": pointer(1, 10, 4)}).component


def refused(
    component: Component, tokens: int, prefix: Any, given: Any, push: tuple[int, int] | None = None
) -> RoomError:
    with pytest.raises(RoomError) as caught:
        attempt(component, tokens, prefix, given, push)
    return caught.value


def attempt(component: Component, tokens: int, prefix: Any, given: Any, push: tuple[int, int] | None) -> plan.Items:
    if push is None:
        return plan.required(component, tokens, prefix, given)
    return plan.pushed(component, tokens, prefix, push, given)


@pytest.mark.parametrize(
    ("component", "tokens", "prefix", "span"),
    [
        (PAGED, 100, 0, (0, 100)),
        (PAGED, 100, 48, (48, 100)),
        (PAGED, 96, 96, (96, 96)),
        (PAGED, 90, 90, (90, 90)),
        (WINDOWED, 100, 0, (60, 100)),
        (WINDOWED, 100, 64, (64, 100)),
        (WINDOWED, 100, 70, (70, 100)),
        (WINDOWED, 30, 0, (0, 30)),
        (WINDOWED, 100, 100, (100, 100)),
        (CHUNKED, 100, 0, (80, 100)),
        (CHUNKED, 100, 90, (90, 100)),
        (CHUNKED, 80, 0, (80, 80)),
        (CHUNKED, 30, 0, (0, 30)),
    ],
)
def test_what_must_arrive(component: Component, tokens: int, prefix: int, span: tuple[int, int]) -> None:
    assert plan.required_span(component, tokens, prefix) == span
    first, last = span[0] // 16, -(-span[1] // 16)
    count = last - first if span[0] < span[1] else 0
    items = plan.required(component, tokens, prefix, list(range(50, 50 + count)))
    assert items.ids.tolist() == list(range(50, 50 + count))
    if count:
        assert items.first == first
        again = plan.required(component, tokens, prefix, Pages(range(50, 50 + count), first * 16))
        assert again.first == items.first
    for wrong in {max(count - 1, 0), count + 1} - {count}:
        error = refused(component, tokens, prefix, list(range(wrong)))
        assert error.code == "room.items"
        assert str(error) == (
            f"{wrong} items of component {component.name!r}: positions [{span[0]}, {span[1]}) need {count} pages of 16 "
            f"tokens from item {items.first}\nhint: both sides name the same positions; nothing is trimmed"
        )


@pytest.mark.parametrize("prefix", [1, 15, 17, 90])
def test_a_prefix_that_ends_inside_a_page_is_refused_with_the_last_boundary(prefix: int) -> None:
    error = refused(PAGED, 100, prefix, [1])
    assert error.code == "room.prefix"
    assert str(error) == (
        f"prefix {prefix} ends inside a page of component 'kv': a page has 16 tokens\n"
        f"hint: use the last page boundary, {prefix // 16 * 16}"
    )
    with pytest.raises(RoomError, match=r"ends inside a page"):
        plan.required_span(PAGED, 100, prefix)


def test_pages_at_another_position_are_refused() -> None:
    for start in (0, 32, 64):
        assert refused(PAGED, 100, 48, Pages([1, 2, 3, 4], start)).code == "room.items"
    assert plan.required(PAGED, 100, 48, Pages([1, 2, 3, 4], 48)).first == 3
    error = refused(PAGED, 100, 48, Pages([1, 2, 3, 4], 49))
    assert "no item begins there; a page has 16 tokens" in str(error)


@pytest.mark.parametrize("far", [9, 9999])
def test_a_page_has_one_position(far: int) -> None:
    """Decode's would be written twice, and prefill's has the bytes of one position only."""
    component = state.mla_pages({0: pointer(1, 10000, 16, 1)}).component
    twice = "item 7 of component 'kv' is named twice: in places 0 and 2 of the list"
    assert twice in str(refused(component, 100, 48, [7, 8, 7, far]))
    assert twice in str(refused(component, 64, None, [7, 8, 7, far], (0, 64)))
    assert "in places 1 and 3" in str(refused(component, 64, 16, Pages([8, 7, 8, 7], 0), (0, 64)))
    # What decode holds, and what lies before the window, is not read.
    assert len(plan.pushed(component, 64, 48, (0, 64), [7, 7, 7, far]).ids) == 4
    assert len(plan.pushed(WINDOWED, 100, None, (0, 100), Pages([0, 0, 0, 1, 2, 3, 4], 0)).ids) == 7
    # Where no layer has items, nothing is addressed.
    nothing = state.index_pages({0: pointer(1, 0, 16, 1)}).component
    assert plan.required(nothing, 32, 0, [7, 7]).ids.tolist() == [7, 7]


def test_a_page_has_one_position_in_all_pushes_of_a_room() -> None:
    component = state.mla_pages({0: pointer(1, 100, 16, 1)}).component

    def check(*pieces: tuple[int, list[int]], prefix: int | None = None) -> None:
        plan.check_pieces(component, 96, prefix, [plan.Items(np.array(ids), first) for first, ids in pieces])

    check((0, [7, 8]), (2, [9]))
    check((0, [7, 8]), (0, [7, 8]), (1, [8]))  # those of other layers
    check((0, [7, 8]), (2, [7, 9]), prefix=32)  # decode holds the first two
    with pytest.raises(
        RoomError, match="item 8 of component 'kv' is pushed for two positions: as item 1 and as item 3"
    ):
        check((0, [7, 8]), (2, [9, 8]))


@pytest.mark.parametrize(
    ("given", "code", "text"),
    [
        ([100], "room.indices", "index 100 of component 'kv' is out of range: its buffers have 100 items"),
        ([-1], "room.indices", "index -1 of component 'kv' is out of range: its buffers have 100 items"),
        ([1 << 63], "room.indices", f"index {1 << 63} of component 'kv' is out of range"),
        (np.array([1 << 63], np.uint64), "room.indices", f"index {1 << 63} of component 'kv' is out of range"),
        ([1 << 70], "room.indices", "indices of component 'kv' are not a list of integers: got shape (1,) of object"),
        ([1.0], "room.indices", "indices of component 'kv' are not a list of integers: got shape (1,) of float64"),
        ([True], "room.indices", "indices of component 'kv' are not a list of integers: bools are among them"),
        (["1"], "room.indices", "indices of component 'kv' are not a list of integers"),
        ([[1]], "room.indices", "indices of component 'kv' are not a list of integers: got shape (1, 1) of int64"),
        (5, "room.indices", "indices of component 'kv' are not a list of integers: got shape () of int64"),
        (None, "room.indices", "indices of component 'kv' are not a list of integers"),
        ([[1], [2, 3]], "room.indices", "indices of component 'kv' cannot be read: "),
        ({1: 2}, "room.indices", "indices of component 'kv' are not a list of integers"),
    ],
)
def test_what_are_no_indices_is_refused_on_both_sides(given: Any, code: str, text: str) -> None:
    for error in (refused(PAGED, 16, 0, given), refused(PAGED, 16, 0, given, push=(0, 16))):
        assert error.code == code
        assert str(error).startswith(text)


@pytest.mark.parametrize(
    "given",
    [
        [3, 1, 2],
        (3, 1, 2),
        np.array([3, 1, 2], np.int32),
        np.array([3, 1, 2], np.uint64),
        np.array([3, 0, 1, 0, 2, 0])[::2],
        torch.tensor([3, 1, 2]),
    ],
)
def test_any_list_of_integers_will_do_and_is_copied(given: Any) -> None:
    items = plan.required(PAGED, 48, 0, given)
    assert items.ids.dtype == np.int64
    assert items.ids.tolist() == [3, 1, 2]
    if not isinstance(given, (list, tuple)):
        given[0] = 9
    assert items.ids.tolist() == [3, 1, 2]


@pytest.mark.parametrize("component", [SLOT, ROW])
def test_a_slot_or_row_is_one_index(component: Component) -> None:
    for given in (4, [4], np.int32(4), np.array([4]), Pages([4], 0)):
        for items in (
            plan.required(component, 7, 0, given),
            plan.required(component, 7, 7, given),
            plan.pushed(component, 7, None, (0, 7), given),
        ):
            assert items.ids.tolist() == [4]
    name, index = component.kind.name, component.kind.index.value
    for wrong in ([], [1, 2]):
        assert str(refused(component, 7, 0, wrong)) == (
            f"{len(wrong)} items of component {name!r}: type {name!r} has exactly one {index} a request"
        )
    assert refused(component, 7, 0, [10]).code == "room.indices"


@pytest.mark.parametrize(
    ("component", "prefix", "span", "count", "first"),
    [
        (PAGED, None, (0, 100), 7, 0),
        (PAGED, 48, (0, 100), 7, 0),
        (PAGED, 48, (0, 100), 4, 3),
        (PAGED, 48, (48, 100), 4, 3),
        (PAGED, 48, (0, 48), 0, 3),
        (PAGED, None, (32, 64), 2, 2),
        (PAGED, None, (96, 100), 1, 6),
        (PAGED, None, (48, 48), 0, 3),
        (WINDOWED, None, (0, 100), 4, 3),
        (WINDOWED, 64, (0, 100), 3, 4),
        (WINDOWED, None, (0, 48), 0, 3),
        (WINDOWED, None, (0, 64), 1, 3),
        (WINDOWED, None, (64, 100), 3, 4),
    ],
)
def test_bare_lists_of_a_push_are_what_the_span_needs(
    component: Component, prefix: int | None, span: tuple[int, int], count: int, first: int
) -> None:
    ids = list(range(20, 20 + count))
    items = plan.pushed(component, 100, prefix, span, ids)
    assert items.ids.tolist() == ids
    if count:
        assert items.first == first


@pytest.mark.parametrize(
    ("component", "prefix", "span", "count", "expected"),
    [
        (PAGED, None, (0, 100), 6, "7 pages"),
        (PAGED, 48, (0, 100), 5, "4 or 7 pages"),
        (WINDOWED, None, (0, 100), 7, "4 pages"),
        (WINDOWED, 64, (0, 100), 2, "3 or 4 pages"),
        (WINDOWED, None, (64, 100), 2, "3 pages"),
        (PAGED, None, (32, 64), 3, "2 pages"),
    ],
)
def test_any_other_length_says_what_is_expected(
    component: Component, prefix: int | None, span: tuple[int, int], count: int, expected: str
) -> None:
    windowed = component is WINDOWED and span[0] < 60
    why = ": a request of 100 tokens needs only positions [60, 100)" if windowed else ""
    error = refused(component, 100, prefix, list(range(count)), push=span)
    assert error.code == "room.items"
    assert str(error) == (
        f"{count} items of component {component.name!r} for span [{span[0]}, {span[1]}): {expected} of 16 tokens are "
        f"expected there{why}\n"
        "hint: name the position of the first page with statelink.Pages(ids, start) where the lists differ"
    )


@pytest.mark.parametrize("start", [0, 16, 80, 96])
def test_named_pages_may_be_any_inside_the_span(start: int) -> None:
    items = plan.pushed(PAGED, 100, None, (0, 100), Pages([5], start))
    assert (items.first, items.ids.tolist()) == (start // 16, [5])


@pytest.mark.parametrize(("start", "count"), [(0, 3), (16, 1), (64, 1), (48, 2), (32, 3)])
def test_named_pages_outside_the_span_are_refused(start: int, count: int) -> None:
    error = refused(PAGED, 100, None, Pages(list(range(count)), start), push=(32, 64))
    assert error.code == "room.items"
    assert str(error) == (
        f"items of component 'kv' leave the pushed span: {count} pages of 16 tokens from position {start}, "
        "span [32, 64)\n"
        "hint: name a span that has the positions of all lists, and Pages for each list that has fewer"
    )


@pytest.mark.parametrize("start", [-16, 5, 1.0, None, "0", 1 << 50])
def test_a_start_that_is_no_page_is_refused(start: Any) -> None:
    assert refused(PAGED, 100, None, Pages([1], start), push=(0, 100)).code in ("room.items", "room.number")


def test_indices_are_checked_against_the_smallest_buffer() -> None:
    arrays = {0: pointer(1, 100, 16, 1), 1: pointer(2, 30, 16, 1), 2: Memory.pointer(0, (0, 16, 1), "uint8", 1)}
    component = state.index_pages(arrays).component
    assert plan.required(component, 16, 0, [29]).ids.tolist() == [29]
    assert "its buffers have 30 items" in str(refused(component, 16, 0, [30]))


def test_where_no_buffer_has_items_any_index_is_taken() -> None:
    component = state.index_pages({0: Memory.pointer(0, (0, 16, 1), "uint8", 1)}).component
    assert plan.required(component, 32, 0, [1000, 7]).ids.tolist() == [1000, 7]
    assert refused(component, 32, 0, [-1, 7]).code == "room.indices"
