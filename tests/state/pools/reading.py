"""What a description of pools says, and whether each element of it is the model's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from statelink import state
from statelink.errors import StateError
from statelink.state import Described, PoolGeometry

from ..look import elements
from ..look import names as names
from .fakes import Array, noise

PAGES, TOKENS, HEADS, DIM = 3, 4, 4, 2


def geometry(layers: int, **more: Any) -> PoolGeometry:
    return PoolGeometry(layers=layers, dtype="bfloat16", **more)


def kinds(found: list[Described]) -> list[tuple[str, str]]:
    return [(each.component.name, each.component.type) for each in found]


def agrees(described: Described, buffer: str, full: Array) -> set[tuple[int, ...]]:
    """Every described element is ``full``'s element of those coordinates; returns the coordinates."""
    inventory = state.describe("i", [described])
    found = elements(inventory, described.component.name, buffer)
    assert found
    for coordinate, raw in found.items():
        assert raw == full[coordinate].tobytes(), (buffer, coordinate)
    return set(found)


def whole(described: Described, buffer: str, array: Array) -> None:
    """The buffer holds exactly these items, byte by byte."""
    raw = array.view(np.uint8).reshape(len(array), -1)
    assert len(agrees(described, buffer, raw)) == raw.size


def cut(full: list[Array], heads: slice, layout: str | None = None) -> list[Array]:
    parts = [each[:, :, heads] for each in full]
    return [np.ascontiguousarray(each.swapaxes(1, 2) if layout == "hnd" else each) for each in parts]


def keys(layers: int, *, heads: int = HEADS, dim: int = DIM) -> list[Array]:
    return [noise(PAGES, TOKENS, heads, dim) for _ in range(layers)]


def planar(tokens: int, *widths: int) -> tuple[Array, list[Array]]:
    """Pages of all keys and then all scales, and each of them on its own."""
    parts = [noise(PAGES, tokens, width, dtype="uint8") for width in widths]
    return np.concatenate([part.reshape(PAGES, -1) for part in parts], axis=1), parts


def refused(match: str, pool: Any, given: PoolGeometry, **more: Any) -> None:
    with pytest.raises(StateError, match=match):
        state.from_pools(pool, geometry=given, **more)
