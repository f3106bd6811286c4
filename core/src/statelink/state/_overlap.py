"""Checks that the buffers of a component do not overlap."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from statelink.errors import StateError

from ._interlock import Interlock, extents_apart

if TYPE_CHECKING:
    from ._inventory import Buffer, Component

__all__ = ["check_apart"]

Apart = Callable[["Buffer", "Buffer", int, int], bool]
"""See `extents_apart`."""


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
