"""The memory that a writer is granted, where the backend lets the memory's owner grant and revoke."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from statelink.plan import Items, PairPlan
    from statelink.state import Inventory

__all__ = ["Grantable"]

U64 = npt.NDArray[np.uint64]


class _Buffers(NamedTuple):
    """The buffers of one component that a writer writes to; a row each.

    Attributes:
        component: Name of the component.
        base: Address of item 0; uint64, ``[buffers, 1]``.
        stride: Bytes from one item to the next; likewise.
        nbytes: Bytes of an item; uint64, ``[buffers]``.
    """

    component: str
    base: U64
    stride: U64
    nbytes: U64


class Grantable:
    """The memory that a writer may be granted. Immutable; worked out once for its part.

    Args:
        inventory: This rank's inventory.
        plan: What the writer writes.
    """

    def __init__(self, inventory: Inventory, plan: PairPlan) -> None:
        self._shares: list[_Buffers] = []
        for share in plan.assignment.shares:
            chosen = set(share.buffers)
            buffers = [each for each in inventory.component(share.component).buffers if each.name in chosen]
            base = np.array([inventory.regions[each.region].address + each.offset for each in buffers], np.uint64)
            stride = np.array([each.stride for each in buffers], np.uint64)
            nbytes = np.array([each.layout.nbytes for each in buffers], np.uint64)
            self._shares.append(_Buffers(share.component, base[:, None], stride[:, None], nbytes))
        # Taken in this order, ranges are sorted, unless one buffer lies between the items of another.
        self._order = sorted(
            (int(base), number, row)
            for number, share in enumerate(self._shares)
            for row, base in enumerate(share.base[:, 0])
        )

    def count(self, items: Mapping[str, Items]) -> int:
        """Most ranges that these items become."""
        return sum(len(items[share.component].ids) * len(share.nbytes) for share in self._shares)

    def ranges(self, items: Mapping[str, Items], elsewhere: Collection[str]) -> tuple[U64, U64]:
        """The address ranges of accepted items, in the buffers that the writer writes to. Items are granted whole.

        Args:
            items: Accepted items per component.
            elsewhere: Components whose bytes go to the strategy's own memory.

        Returns:
            Addresses and lengths in bytes; sorted, disjoint, and merged where they touch.
        """
        starts: dict[int, U64] = {}
        for number, share in enumerate(self._shares):
            ids = items[share.component].ids
            if share.component in elsewhere or not len(ids):
                continue
            if not (ids[1:] >= ids[:-1]).all():
                ids = np.sort(ids)
            starts[number] = share.base + share.stride * ids.view(np.uint64)
        if not starts:
            return np.empty(0, np.uint64), np.empty(0, np.uint64)
        chosen = [(number, row) for _, number, row in self._order if number in starts]
        low = np.concatenate([starts[number][row] for number, row in chosen])
        size = np.concatenate(
            [self._shares[number].nbytes[row].repeat(starts[number].shape[1]) for number, row in chosen]
        )
        end = low + size
        if not (low[1:] >= low[:-1]).all():
            order = low.argsort(kind="stable")
            low, end = low[order], end[order]
        end = np.maximum.accumulate(end)
        apart = low[1:] > end[:-1]
        if apart.all():
            return low, end - low
        first = np.flatnonzero(np.concatenate(([True], apart)))
        last = np.append(first[1:], len(low)) - 1
        return low[first], end[last] - low[first]
