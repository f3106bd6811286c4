"""What a request's items contain, in a form that two processes can compare without Statelink's help."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statelink_demo.layout import PoolLayout
    from statelink_demo.pools import Allocation, StatePools

__all__ = ["fingerprints", "label"]


def label(layout: PoolLayout) -> str:
    """Return the name of one pool, such as `k.3` (keys of layer 3) or `counts`."""
    return layout.name if layout.layer is None else f"{layout.name}.{layout.layer}"


def fingerprints(pools: StatePools, held: Allocation, tokens: int) -> dict[str, str]:
    """Return a digest per pool of what a request of `tokens` tokens holds there."""
    found = {}
    for layout in pools.layouts():
        items = layout.raw()[list(held.ids(layout.index))]
        if layout.tokens_per_item is not None:
            # The end of the last page belongs to no token.
            items = items.reshape(len(items) * layout.tokens_per_item, -1)[:tokens]
        found[label(layout)] = hashlib.blake2b(items.tobytes(), digest_size=8).hexdigest()
    return found
