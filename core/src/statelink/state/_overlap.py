"""Whether the buffers of a component stand on bytes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from statelink.errors import StateError

if TYPE_CHECKING:
    from ._inventory import Buffer, Component

__all__ = ["check_apart"]

MAX_TANGLED = 4096
"""Bound on buffers of one region that are compared pair by pair."""


def check_apart(component: Component) -> None:
    """Check that no byte belongs to two buffers of a component, which would have to be written twice.

    Buffers of different components may share bytes: unified memory is described as KV and as Mamba state at once.

    Raises:
        StateError: Two buffers overlap; names them.
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
    """Whether all buffers lie side by side inside one item of one stride: an envelope of several layers."""
    stride = buffers[0].stride
    sizes = [buffer.layout.nbytes for buffer in buffers]
    side_by_side = all(a.offset + size <= b.offset for a, size, b in zip(buffers, sizes, buffers[1:], strict=False))
    inside = buffers[-1].offset - buffers[0].offset + sizes[-1] <= stride
    return side_by_side and inside and all(buffer.stride == stride for buffer in buffers)


def _compare(component: Component, buffers: list[Buffer]) -> None:
    """Pair by pair: buffers whose extents meet need one stride and different phases."""
    if len(buffers) > MAX_TANGLED:
        raise StateError(
            f"buffers of component {component.name!r} lie in one region in no order that can be checked",
            cause=f"{len(buffers)} buffers, at most {MAX_TANGLED} are compared pair by pair",
        )
    low = np.array([buffer.offset for buffer in buffers], np.int64)
    high = np.array([buffer.end for buffer in buffers], np.int64)
    stride = np.array([buffer.stride for buffer in buffers], np.int64)
    size = np.array([buffer.layout.nbytes for buffer in buffers], np.int64)
    for i in range(len(buffers) - 1):
        rest = slice(i + 1, None)
        meets = low[rest] < high[i]
        # Distance from this buffer's items to the other's, around the stride that they share.
        phase = (low[rest] - low[i]) % max(int(stride[i]), 1)
        apart = (stride[rest] == stride[i]) & (phase >= size[i]) & (phase + size[rest] <= stride[i])
        clash = np.flatnonzero(meets & ~apart)
        if len(clash):
            other = buffers[i + 1 + int(clash[0])]
            raise StateError(
                f"buffers {buffers[i].name!r} and {other.name!r} of component {component.name!r} overlap in memory",
                cause="a byte that belongs to both would be written twice",
            )
