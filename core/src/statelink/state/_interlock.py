"""Checks that two buffers share no byte if their items take turns in memory, as keys and values in one page do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from statelink.errors import StateError

from ._effort import spend

if TYPE_CHECKING:
    from ._inventory import Buffer
    from ._layout import Layout

__all__ = ["Interlock", "extents_apart"]

MAX_STRETCHES = 1 << 20
"""Most contiguous pieces that an item of each buffer may have together."""


def extents_apart(first: Buffer, second: Buffer, after: int, stride: int) -> bool:
    """Whether each item of one buffer lies between two items of the other.

    Args:
        first: A buffer.
        second: Another one with the same stride.
        after: Bytes from an item of the first to the next item of the second.
        stride: Bytes between neighbouring items of either.
    """
    return first.layout.nbytes <= after and after + second.layout.nbytes <= stride


class Interlock:
    """Compares buffers of one component, and remembers each answer, because the buffers of many layers are alike."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int, int], bool] = {}

    def apart(self, first: Buffer, second: Buffer, after: int, stride: int) -> bool:
        """Whether no byte belongs to items of both buffers. See `extents_apart` for the arguments.

        Raises:
            StateError: The items consist of too many pieces to be compared.
        """
        spend(1)
        if extents_apart(first, second, after, stride):
            return True
        a, b = first.layout, second.layout
        if max(a.nbytes, b.nbytes) > stride:
            return False
        key = id(a), id(b), after, stride
        if key not in self._known:
            pieces = a.stretch_count + b.stretch_count
            if pieces > MAX_STRETCHES:
                raise StateError(
                    f"buffers {first.name!r} and {second.name!r} interlock in too many pieces",
                    cause=f"{pieces} contiguous pieces of an item, and at most {MAX_STRETCHES} can be compared",
                )
            spend(pieces)
            self._known[key] = _apart(a, b, after, stride)
        return self._known[key]


def _apart(a: Layout, b: Layout, after: int, stride: int) -> bool:
    """Whether no byte belongs to items of both layouts, if the items repeat at every stride without end.

    So a piece that crosses the end of a stride continues at the beginning of the stride.
    """
    (low_a, high_a), (low_b, high_b) = a.stretches(), b.stretches()
    starts = np.concatenate((low_a, (low_b + after) % stride))
    sizes = np.concatenate((high_a - low_a, high_b - low_b))
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], (starts + sizes)[order]
    return bool((starts[1:] >= ends[:-1]).all() and ends[-1] - stride <= starts[0])
