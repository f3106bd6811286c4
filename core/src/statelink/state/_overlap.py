"""Checks that the buffers of a component do not overlap."""

from __future__ import annotations

import bisect
import heapq
from typing import TYPE_CHECKING

from statelink.errors import StateError

if TYPE_CHECKING:
    from ._inventory import Buffer, Component

__all__ = ["check_apart"]


def check_apart(component: Component) -> None:
    """Check that no byte belongs to two buffers of a component. It would be written twice.

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
        if not one_after_another and not _nested(buffers):
            _compare(component, buffers)


def _nested(buffers: list[Buffer]) -> bool:
    """Whether all buffers are side by side in one item with one stride, as in an envelope of several layers."""
    stride = buffers[0].stride
    sizes = [buffer.layout.nbytes for buffer in buffers]
    side_by_side = all(a.offset + size <= b.offset for a, size, b in zip(buffers, sizes, buffers[1:], strict=False))
    inside = buffers[-1].offset - buffers[0].offset + sizes[-1] <= stride
    return side_by_side and inside and all(buffer.stride == stride for buffer in buffers)


def _compare(component: Component, buffers: list[Buffer]) -> None:
    """Check that buffers with overlapping extents have one stride and different phases.

    Buffers come in the order of offsets. Those whose extents reach the next buffer are kept in the order of phases, so
    that only its two neighbours can overlap it. The time is nearly linear.
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
        phase, size = buffer.offset % stride, buffer.layout.nbytes
        place = bisect.bisect_left(phases, (phase, number))
        for other_phase, other in (phases[place - 1], phases[place % len(phases)]) if phases else ():
            before = (phase - other_phase) % stride  # how far this buffer's items begin after the other's
            one_stride = max(buffer.stride, 1) == stride and buffers[other].stride == buffer.stride
            if not one_stride or before < buffers[other].layout.nbytes or before + size > stride:
                raise StateError(
                    f"buffers {buffers[other].name!r} and {buffer.name!r} of component {component.name!r} "
                    "overlap in memory",
                    cause="a byte that belongs to both would be written twice",
                )
        phases.insert(place, (phase, number))
        heapq.heappush(ends, (buffer.end, phase, number))
