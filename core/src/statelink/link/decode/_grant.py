"""The memory that a writer is granted, where the backend lets the memory's owner grant and revoke."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from statelink.plan import Items, PairPlan
    from statelink.state import Inventory

__all__ = ["Grantable"]

U64 = npt.NDArray[np.uint64]

TRUE: Final = np.ones(1, np.bool_)
SHORT: Final = 32
"""Most ranges that are worked out one by one, because numpy's calls then take longer."""


class Grantable:
    """The memory that a writer may be granted. Immutable; worked out once for its part.

    Args:
        inventory: This rank's inventory.
        plan: What the writer writes.
    """

    def __init__(self, inventory: Inventory, plan: PairPlan) -> None:
        found = []
        for share in plan.assignment.shares:
            chosen = set(share.buffers)
            for each in inventory.component(share.component).buffers:
                if each.name in chosen:
                    base = inventory.regions[each.region].address + each.offset
                    found.append((base, each.stride, each.layout.nbytes, share.component))
        # In this order, ranges are sorted, unless one buffer lies between the items of another.
        found.sort(key=lambda buffer: buffer[0])
        self._components = [component for *_, component in found]
        """The component of each buffer that the writer writes to."""
        self._numbers = [tuple(numbers) for *numbers, _ in found]
        """Of each of them: the address of item 0, the bytes from one item to the next, and the bytes of an item."""
        self._buffers = np.array(self._numbers, np.uint64).reshape(-1, 3).T.copy()
        """The same, a row each."""
        self._each = Counter(self._components)

    def count(self, items: Mapping[str, Items]) -> int:
        """Most ranges that these items become."""
        count = 0
        for component, buffers in self._each.items():
            count += buffers * len(items[component].ids)
        return count

    def ranges(self, items: Mapping[str, Items], elsewhere: Collection[str]) -> tuple[U64, U64]:
        """The address ranges of accepted items, in the buffers that the writer writes to. Items are granted whole.

        Args:
            items: Accepted items per component.
            elsewhere: Components whose bytes go to the strategy's own memory.

        Returns:
            Addresses and lengths in bytes; sorted, disjoint, and merged where they touch.
        """
        rows = [row for row, component in enumerate(self._components) if component not in elsewhere]
        if self.count(items) <= SHORT:
            return self._few(items, rows)
        ids = {component: _ascending(items[component].ids) for component in self._each}
        chosen = [ids[self._components[row]] for row in rows]
        counts = [len(each) for each in chosen]
        if not any(counts):
            return np.empty(0, np.uint64), np.empty(0, np.uint64)
        base, stride, nbytes = self._buffers[:, rows].repeat(counts, axis=1)
        low: U64 = base + stride * np.concatenate(chosen).view(np.uint64)
        end: U64 = low + nbytes
        if not (low[1:] >= low[:-1]).all():
            order = low.argsort(kind="stable")
            low, end = low[order], end[order]
        end = np.maximum.accumulate(end)
        apart = low[1:] > end[:-1]
        if apart.all():
            return low, end - low
        first = np.flatnonzero(np.concatenate((TRUE, apart)))
        last = np.append(first[1:], len(low)) - 1
        return low[first], end[last] - low[first]

    def _few(self, items: Mapping[str, Items], rows: list[int]) -> tuple[U64, U64]:
        """As `ranges`, without numpy."""
        ids = {component: items[component].ids.tolist() for component in self._each}
        named = [(*self._numbers[row], ids[self._components[row]]) for row in rows]
        found = sorted([(base + stride * item, nbytes) for base, stride, nbytes, each in named for item in each])
        low, high = [0] * len(found), [0] * len(found)
        count = end = 0
        for begin, nbytes in found:
            if begin > end or not count:
                low[count] = high[count] = end = begin
                count += 1
            if begin + nbytes > end:
                end = high[count - 1] = begin + nbytes
        addresses = np.array(low[:count], np.uint64)
        return addresses, np.array(high[:count], np.uint64) - addresses


def _ascending(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return ids if len(ids) < 2 or (ids[1:] >= ids[:-1]).all() else np.sort(ids)
