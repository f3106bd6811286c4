"""Admitting writers to decode's memory and shutting them out again, where this side can do so alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from statelink.backend import Fence, Fencing, Op, Side

from ._awaiting import await_transfer

if TYPE_CHECKING:
    from ._node import Node
    from ._receiving import Receiving, Writer

__all__ = ["Granting"]

U64 = npt.NDArray[np.uint64]


class Granting:
    """The fence of the backend, where memory's owner has one; otherwise only the end of what writes there helps.

    Args:
        node: The link's control thread.

    Attributes:
        fencing: The backend, if it has such a fence.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        backend = node.backend
        owner = backend.capabilities.fences.get((Op.WRITE, Side.TARGET)) is Fence.OWNER
        self.fencing = backend if owner and isinstance(backend, Fencing) else None

    def grant(self, room: Receiving, writer: Writer) -> None:
        """Let a writer into the items of a room that its plan names. May block; data threads only."""
        if self.fencing is not None:
            addresses, nbytes = _named(room, writer)
            self.fencing.grant(writer.source.name, room.room, room.generation, addresses, nbytes)

    def revoke(self, room: Receiving, writer: Writer, closed: Callable[[Receiving, str], None]) -> None:
        """Shut a writer out, behind what is under way for the room. Does not block.

        Args:
            room: The room.
            writer: The writer.
            closed: Called on the control thread with the room and the writer's name, once nothing of it can land.
        """
        fencing, name = self.fencing, writer.source.name
        if fencing is None:
            return

        def job() -> None:
            transfer = fencing.revoke(name, room.room, room.generation)
            await_transfer(self._node, transfer, lambda ok: closed(room, name) if ok else None)

        self._node.fences.submit(("room", room.room), job)


def _named(room: Receiving, writer: Writer) -> tuple[U64, U64]:
    """Whole items of the buffers that a writer writes to: addresses and lengths, sorted, disjoint, merged."""
    inventory = room._node.inventory
    lows, sizes = [], []
    for share in writer.plan.assignment.shares:
        if not writer.hooks[share.component].in_place:
            continue  # it writes to memory of the strategy's
        component = inventory.component(share.component)
        chosen = set(share.buffers)
        buffers = [buffer for buffer in component.buffers if buffer.name in chosen]
        ids = np.sort(room._items[share.component].ids)
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
