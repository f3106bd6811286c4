"""The memory that a writer is granted, where the backend lets the memory's owner grant and revoke."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from statelink.plan import Items, PairPlan
    from statelink.state import Inventory

__all__ = ["granted_ranges"]

U64 = npt.NDArray[np.uint64]


def granted_ranges(
    inventory: Inventory, plan: PairPlan, items: Mapping[str, Items], elsewhere: Collection[str]
) -> tuple[U64, U64]:
    """The address ranges of the accepted items, in the buffers that a writer writes to. Items are granted whole.

    Args:
        inventory: This rank's inventory.
        plan: What the writer writes.
        items: Accepted items per component.
        elsewhere: Components whose bytes go to the strategy's own memory.

    Returns:
        Addresses and lengths in bytes; sorted, disjoint, and merged where they touch.
    """
    lows, sizes = [], []
    for share in plan.assignment.shares:
        if share.component in elsewhere:
            continue
        component = inventory.component(share.component)
        chosen = set(share.buffers)
        buffers = [buffer for buffer in component.buffers if buffer.name in chosen]
        ids = np.sort(items[share.component].ids)
        if not len(ids):
            continue
        base = np.array([inventory.regions[b.region].address + b.offset for b in buffers], np.uint64)
        stride = np.array([b.stride for b in buffers], np.uint64)
        nbytes = np.array([b.layout.nbytes for b in buffers], np.uint64)
        lows.append((base[:, None] + stride[:, None] * ids.astype(np.uint64)).ravel())
        sizes.append(np.repeat(nbytes, len(ids)))
    if not lows:
        return np.empty(0, np.uint64), np.empty(0, np.uint64)
    low, size = np.concatenate(lows), np.concatenate(sizes)
    order = np.argsort(low, kind="stable")
    low, end = low[order], np.maximum.accumulate((low + size)[order])
    first = np.flatnonzero(np.concatenate(([True], low[1:] > end[:-1])))
    last = np.append(first[1:], len(low)) - 1
    return low[first], end[last] - low[first]
