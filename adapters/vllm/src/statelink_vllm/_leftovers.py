"""Zeroes blocks that are received only in part.

vLLM zeroes new blocks of some models. An earlier request may have left NaN there, and attention also touches what it
masks. vLLM does not zero blocks that are received, since they may be written at any moment. But the last of them may
end behind the tokens that come, and the first block of a window or an attention chunk may begin before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._events import recorded

if TYPE_CHECKING:
    from ._inventory import Group

__all__ = ["Leftovers"]


class Leftovers:
    """Runs on a worker's main thread.

    Args:
        config: vLLM's ``KVCacheConfig``.
        caches: The tensor of each layer by its name, ``[items, heads, tokens, content]``.
        groups: How block tables become indices.
    """

    def __init__(self, config: Any, caches: Mapping[str, Any], groups: Sequence[Group]) -> None:
        self._groups = [group for group in groups if not group.recurrent] if config.needs_kv_cache_zeroing else []
        self._caches = [[caches[name] for name in group.layers] for group in self._groups]

    def zero(self, items: Mapping[str, Any]) -> Any:
        """Zero the blocks that come only in part, before they are received. Does not block.

        Args:
            items: For each component the indices of what is received.

        Returns:
            An event after which the blocks are zeroed; ``None`` if they are.
        """
        device = None
        for group, caches in zip(self._groups, self._caches, strict=True):
            indices = items[group.component.name]
            if not len(indices):
                continue
            ends = [indices[0], indices[-1]] if group.begins_inside else indices[-1:]
            for block in {int(index) // group.ratio for index in ends}:
                for cache in caches:
                    cache[block * group.ratio : (block + 1) * group.ratio].zero_()
                    device = cache.device
        return None if device is None else recorded(device)
