"""Groups of layers: quarters, then halves of what is left."""

from __future__ import annotations

from typing import Any

import pytest

import statelink
from statelink.errors import RoomError


@pytest.mark.parametrize(
    ("layers", "ends"),
    [
        (0, ()),
        (1, (1,)),
        (2, (1, 2)),
        (8, (2, 4, 6, 7, 8)),
        (32, (8, 16, 24, 28, 30, 31, 32)),
        (80, (20, 40, 60, 70, 75, 77, 78, 79, 80)),
    ],
)
def test_quarters_and_then_halves_of_what_is_left(layers: int, ends: tuple[int, ...]) -> None:
    assert statelink.layer_groups(layers) == ends


@pytest.mark.parametrize("layers", [-1, 1 << 40, 1.5, "8", None])
def test_what_is_no_number_of_layers(layers: Any) -> None:
    with pytest.raises(RoomError, match="the number of layers"):
        statelink.layer_groups(layers)
