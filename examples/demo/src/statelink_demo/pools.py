"""All state memory of one engine, and who holds which part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from statelink_demo.allocator import OutOfItemsError, ScatteredAllocator
from statelink_demo.kv_pool import KvPool
from statelink_demo.row_pool import RowPool
from statelink_demo.slot_pool import SlotPool

if TYPE_CHECKING:
    from statelink_demo.layout import PoolLayout
    from statelink_demo.shape import StateShape

__all__ = ["Allocation", "StatePools"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What one request holds: pages in the order of its tokens, one slot and one metadata row."""

    pages: tuple[int, ...]
    slot: int
    row: int

    def ids(self, index: str) -> tuple[int, ...]:
        """Return the ids in one index space: `page`, `slot` or `row`."""
        return {"page": self.pages, "slot": (self.slot,), "row": (self.row,)}[index]


class StatePools:
    """Pools and allocators of one engine. Memory that nobody holds is poisoned.

    Args:
        shape: The model's state.
        pages: Pages of the key and value pools.
        page_size: Tokens per page.
        slots: Slots of the linear-attention pools.
        rows: Metadata rows.
        seed: Determines the order in which ids are handed out.
    """

    def __init__(
        self,
        shape: StateShape,
        *,
        pages: int = 64,
        page_size: int = 16,
        slots: int = 8,
        rows: int = 8,
        seed: int = 0,
    ) -> None:
        self.shape = shape
        self.kv = KvPool(shape, pages=pages, page_size=page_size)
        self.slots = SlotPool(shape, slots=slots)
        self.rows = RowPool(rows=rows)
        self._pages = ScatteredAllocator("page", pages, seed)
        self._slots = ScatteredAllocator("slot", slots, seed + 1)
        self._rows = ScatteredAllocator("row", rows, seed + 2)
        for layout in self.layouts():
            layout.poison()

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.kv.page_size

    def layouts(self) -> tuple[PoolLayout, ...]:
        """Describe every pool, in an order that depends on the model alone."""
        return self.kv.layouts() + self.slots.layouts() + self.rows.layouts()

    def pages_for(self, tokens: int) -> int:
        """Return how many pages hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, tokens: int) -> Allocation:
        """Take memory for a request of `tokens` tokens.

        Raises:
            OutOfItemsError: One of the pools is exhausted; nothing is taken.
        """
        if not self._slots.free or not self._rows.free:
            raise OutOfItemsError(f"{self._slots.free} slots and {self._rows.free} rows free, one of each needed")
        pages = self._pages.allocate(self.pages_for(tokens))
        (slot,), (row,) = self._slots.allocate(1), self._rows.allocate(1)
        return Allocation(pages=pages, slot=slot, row=row)

    def release(self, allocation: Allocation) -> None:
        """Give a request's memory back and poison it. The caller vouches that nothing still moves it."""
        self._pages.release(allocation.pages)
        self._slots.release((allocation.slot,))
        self._rows.release((allocation.row,))
        for layout in self.layouts():
            layout.poison(allocation.ids(layout.index))
