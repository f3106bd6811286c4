"""Requests whose state has not come, until there is room to compute them here.

vLLM computes such a request again. It puts the request in front of all that wait, and looks at none of them while the
request does not fit. Requests whose state has come wait behind it, and hold the blocks that it needs. So vLLM hears of
a failed request when there is room for it, and its old blocks are given back at once.
"""

from __future__ import annotations

from typing import Any

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
            needed = self._needed(request)
            if needed <= left:
                left -= needed
                found.add(name)
                del self._waiting[name]
        return found

    def _needed(self, request: Any) -> int:
        """Blocks that vLLM needs to begin with the request, if its cache has none of the request's tokens."""
        manager = self._manager
        tokens = min(request.num_tokens, manager.max_model_len)
        needed: int = manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=tokens,
            new_computed_blocks=manager.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=0,
            num_local_computed_tokens=0,
            num_tokens_main_model=tokens,
            apply_admission_cap=True,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
        )
        return needed

    def __bool__(self) -> bool:
        """Whether any request waits."""
        return bool(self._waiting)
