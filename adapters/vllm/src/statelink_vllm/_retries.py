"""Requests whose state has not come, until there is room to compute them here.

vLLM computes such a request again. It puts the request in front of all that wait, and looks at none of them while the
request does not fit. Requests whose state has come wait behind it, and hold the blocks that it needs. So vLLM hears of
a failed request when there is room for it, and its old blocks are given back at once.
"""

from __future__ import annotations

from typing import Any

from ._admission import blocks_needed

__all__ = ["Retries"]


class Retries:
    """Keeps requests whose state has not come. Runs on the thread of the engine core."""

    def __init__(self) -> None:
        self._manager: Any = None
        self._waiting: dict[str, Any] = {}

    def bind(self, manager: Any) -> None:
        """Take vLLM's ``KVCacheManager``."""
        self._manager = manager

    def add(self, request: Any) -> None:
        """Give the blocks of a failed request back, and let it wait."""
        self._manager.free(request)
        self._waiting[request.request_id] = request

    def drop(self, name: str) -> bool:
        """Forget a request that has ended. Returns whether it waited."""
        return self._waiting.pop(name, None) is not None

    def ready(self) -> set[str]:
        """The requests for which there is room, all of them together. They wait no longer."""
        left = self._manager.block_pool.get_num_free_blocks() if self._waiting else 0
        found = set()
        for name, request in list(self._waiting.items()):
            needed = blocks_needed(self._manager, request, capped=True)  # if vLLM's cache has nothing of it
            if needed <= left:
                left -= needed
                found.add(name)
                del self._waiting[name]
        return found

    def __bool__(self) -> bool:
        """Whether any request waits."""
        return bool(self._waiting)
