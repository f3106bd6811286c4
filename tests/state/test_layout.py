"""Boxes of the global item, and what of them makes no sense."""

from __future__ import annotations

from typing import Any

import pytest

from statelink.errors import StateError
from statelink.state import Layout, Slab

BOX = Slab((0, 0), (4, 3), 0, (6, 2))


def layout(*slabs: Slab, **fields: Any) -> Layout:
    given: dict[str, Any] = {"dtype": "bfloat16", "itemsize": 2, "shape": (4, 3), "axes": ("head", "dim"), **fields}
    return Layout(slabs=slabs, **given)


def test_a_layout_counts_what_it_holds() -> None:
    made = layout(Slab((0, 0), (1, 3), 10, (6, 2)), Slab((2, 0), (4, 3), 20, (8, 2)))
    assert made.held == 2 * (3 + 6)
    assert made.nbytes == 20 + 8 + 4 + 2
    assert [slab.counts for slab in made.slabs] == [(1, 3), (2, 3)]
    assert [slab.end(2) for slab in made.slabs] == [16, 34]


def test_steps_leave_coordinates_out() -> None:
    slab = Slab((1, 0), (8, 3), 0, (6, 2), (3, 1))
    assert slab.counts == (3, 3)
    assert slab.stepped
    assert not BOX.stepped
    assert not Slab((0,), (4,), 0, (2,), (1,)).stepped
    assert layout(slab, shape=(8, 3)).held == 18


@pytest.mark.parametrize(
    ("fields", "slabs", "text"),
    [
        ({"shape": ()}, [BOX], "a layout has 1 to 8 named axes: shape (), axes ('head', 'dim')"),
        ({"axes": ("head",)}, [BOX], "a layout has 1 to 8 named axes: shape (4, 3), axes ('head',)"),
        ({"shape": (1,) * 9, "axes": tuple("abcdefghi")}, [BOX], "a layout has 1 to 8 named axes"),
        ({"itemsize": 0}, [BOX], "an element has 1 to 64 bytes: itemsize is 0"),
        ({"itemsize": 65}, [BOX], "an element has 1 to 64 bytes: itemsize is 65"),
        ({"shape": (4, 0)}, [BOX], "every axis of an item has at least one element: shape is (4, 0)"),
        ({"shape": (-4, 3)}, [BOX], "every axis of an item has at least one element: shape is (-4, 3)"),
        ({"position": 2}, [BOX], "the position axis is not an axis of the item: 2 of 2"),
        ({"position": -1}, [BOX], "the position axis is not an axis of the item: -1 of 2"),
        ({}, [], "a layout has 1 to 64 slabs: 0 given"),
        ({}, [Slab((0,), (4,), 0, (6,))], "a slab names every axis of its layout once: Slab("),
        ({}, [Slab((0, 0), (4,), 0, (6, 2))], "a slab names every axis of its layout once: Slab("),
        ({}, [Slab((0, 0), (4, 3), 0, (6, 2), (1,))], "a slab names every axis of its layout once: Slab("),
        ({}, [Slab((0, 0), (4, 3), 0, (6, 2), (0, 1))], "the step of a slab is at least 1: step is (0, 1)"),
        ({}, [Slab((0, 0), (5, 3), 0, (6, 2))], "a slab leaves the item on axis 'head': [0, 5) is not within [0, 4)"),
        ({}, [Slab((0, -1), (4, 3), 0, (6, 2))], "a slab leaves the item on axis 'dim': [-1, 3) is not within [0, 3)"),
        ({}, [Slab((2, 0), (2, 3), 0, (6, 2))], "a slab leaves the item on axis 'head': [2, 2) is not within [0, 4)"),
        ({}, [Slab((0, 0), (4, 3), -1, (6, 2))], "a slab has offsets and strides of zero or more bytes: offset -1"),
        ({}, [Slab((0, 0), (4, 3), 0, (6, -2))], "a slab has offsets and strides of zero or more bytes: offset 0"),
        ({}, [Slab((0, 0), (4, 3), 1 << 62, (6, 2))], "a slab has offsets and strides of zero or more bytes"),
        ({}, [Slab((0, 0), (4, 3), 0, (6, 1))], "the elements of a slab overlap in memory: strides (6, 1)"),
        ({}, [Slab((0, 0), (4, 3), 0, (5, 2))], "the elements of a slab overlap in memory: strides (5, 2)"),
        ({}, [Slab((0, 0), (4, 3), 0, (2, 2))], "the elements of a slab overlap in memory: strides (2, 2)"),
        ({}, [Slab((0, 0), (4, 3), 0, (0, 2))], "the elements of a slab overlap in memory: strides (0, 2)"),
        (
            {},
            [Slab((0, 0), (2, 3), 0, (6, 2)), Slab((1, 0), (4, 3), 100, (6, 2))],
            "two slabs of a layout hold the same coordinates: Slab(",
        ),
        (
            {},
            [Slab((0, 0), (2, 3), 0, (6, 2)), Slab((2, 0), (4, 3), 10, (6, 2))],
            "two slabs of a layout stand on the same bytes: ",
        ),
        (
            {},
            [Slab((0, 0), (2, 3), 0, (12, 2)), Slab((2, 0), (4, 3), 5, (12, 2))],
            "two slabs of a layout stand on the same bytes: ",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], slabs: list[Slab], text: str) -> None:
    with pytest.raises(StateError) as caught:
        layout(*slabs, **fields)
    assert str(caught.value).startswith(text)
    assert caught.value.code == "state"


def test_axes_of_one_element_may_have_any_stride() -> None:
    assert layout(Slab((1, 0), (2, 3), 0, (0, 2))).held == 6


def test_slabs_may_interleave_as_long_as_they_stand_apart() -> None:
    made = layout(Slab((0, 0), (2, 3), 0, (12, 2)), Slab((2, 0), (4, 3), 6, (12, 2)))
    assert made.nbytes == 24
    assert made.held == 24


def test_there_is_a_bound_on_slabs_and_pieces() -> None:
    fine = [Slab((n, 0), (n + 1, 3), 6 * n, (6, 2)) for n in range(64)]
    assert layout(*fine, shape=(65, 3)).held == 64 * 6
    with pytest.raises(StateError, match="a layout has 1 to 64 slabs: 65 given"):
        layout(*fine, Slab((64, 0), (65, 3), 6 * 64, (6, 2)), shape=(65, 3))
    wide = [Slab((n, 0), (n + 1, 1 << 17), n * (1 << 20), (4, 4)) for n in range(2)]
    with pytest.raises(StateError, match="the slabs of a layout fall apart into too many pieces: 262144 "):
        layout(*wide, shape=(2, 1 << 17))
