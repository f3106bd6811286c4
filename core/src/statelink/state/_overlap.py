"""Checks that the buffers of a component do not overlap, nor the bytes of two whose items take turns in memory."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from statelink.errors import StateError

from ._effort import spend

if TYPE_CHECKING:
    from ._inventory import Buffer, Component
    from ._layout import Layout

__all__ = ["Interlock", "check_apart", "extents_apart"]

MAX_STRETCHES = 1 << 20
"""Most contiguous pieces that an item of each buffer may have together."""

Apart = Callable[["Buffer", "Buffer", int, int], bool]
"""See `extents_apart`."""


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


def check_apart(component: Component) -> None:
    """Check that no byte belongs to two buffers of a component. It would be written twice.

    Items of two buffers may interlock, as keys and values that take turns in a page: then their bytes are compared.
    Buffers of different components may share bytes, because unified memory is described as KV and as Mamba state.

    Raises:
        StateError: Two buffers overlap. The error names them.
    """
    regions: dict[int, list[Buffer]] = {}
    for buffer in component.buffers:
        if buffer.count:
            regions.setdefault(buffer.region, []).append(buffer)
    for buffers in regions.values():
        buffers.sort(key=lambda buffer: buffer.offset)
        ends = [buffer.end for buffer in buffers]
        one_after_another = all(end <= after.offset for end, after in zip(ends, buffers[1:], strict=False))
        if one_after_another or _nested(buffers):
            continue
        if _overlapping(buffers, extents_apart, reach=0):
            reach = max(buffer.layout.nbytes for buffer in buffers)
            found = _overlapping(buffers, Interlock().apart, reach=reach)
            if found:
                raise StateError(
                    f"buffers {found[0].name!r} and {found[1].name!r} of component {component.name!r} "
                    "overlap in memory",
                    cause="a byte that belongs to both would be written twice",
                )


def _nested(buffers: list[Buffer]) -> bool:
    """Whether all buffers are side by side in one item with one stride, as in an envelope of several layers."""
    stride = buffers[0].stride
    sizes = [buffer.layout.nbytes for buffer in buffers]
    side_by_side = all(a.offset + size <= b.offset for a, size, b in zip(buffers, sizes, buffers[1:], strict=False))
    inside = buffers[-1].offset - buffers[0].offset + sizes[-1] <= stride
    return side_by_side and inside and all(buffer.stride == stride for buffer in buffers)


def _overlapping(buffers: list[Buffer], apart: Apart, *, reach: int) -> tuple[Buffer, Buffer] | None:
    """The first two buffers that are not apart. Buffers with overlapping extents must have one stride.

    Buffers come in the order of offsets. Those whose extents reach the next buffer are kept in the order of phases. As
    long as their items are apart from each other, only its two neighbours can overlap it, and the time is nearly
    linear. Items that interlock reach further: ``reach`` is the length of the longest.
    """
    ends: list[tuple[int, int, int]] = []  # end, phase and number of each buffer that the next one may reach
    phases: list[tuple[int, int]] = []  # phase and number of the same buffers, in the order of phases
    stride = 0
    for number, buffer in enumerate(buffers):
        while ends and ends[0][0] <= buffer.offset:
            _, phase, gone = heapq.heappop(ends)
            del phases[bisect.bisect_left(phases, (phase, gone))]
        if not ends:
            stride = max(buffer.stride, 1)
        phase = buffer.offset % stride
        place = bisect.bisect_left(phases, (phase, number))
        for other_phase, other in _near(phases, place, phase, stride, reach, buffer.layout.nbytes):
            one_stride = max(buffer.stride, 1) == stride and buffers[other].stride == buffer.stride
            if not one_stride or not apart(buffers[other], buffer, (phase - other_phase) % stride, stride):
                return buffers[other], buffer
        phases.insert(place, (phase, number))
        heapq.heappush(ends, (buffer.end, phase, number))
    return None


def _near(
    phases: list[tuple[int, int]], place: int, phase: int, stride: int, reach: int, size: int
) -> Iterator[tuple[int, int]]:
    """The buffers, before and behind a place in ``phases``, whose items may overlap an item at ``phase``.

    These are at least its neighbours. The phases form a circle: the first one follows the last one.
    """
    count = len(phases)
    for step in range(1, count + 1):
        before = phases[(place - step) % count]
        yield before
        if (phase - before[0]) % stride >= reach:
            break
    for step in range(count):
        behind = phases[(place + step) % count]
        yield behind
        if not reach or (behind[0] - phase) % stride >= size:
            break
