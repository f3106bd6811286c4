"""Which requests may begin to be received: those that find blocks for the rest of their prompts, too.

vLLM reserves too few blocks for that where there are windows: it counts at most the blocks of a window, also where a
request holds these and needs further ones. A received request then waits for blocks that others hold, and vLLM looks at
none behind it, so that all of them would wait for each other.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

__all__ = ["Admission", "blocks_needed"]


def blocks_needed(
    manager: Any, request: Any, *, local: int = 0, computed: int = 0, beyond: int = 0, capped: bool = False
) -> int:
    """Blocks of vLLM's that a request needs to compute the rest of its prompt, besides those that it holds.

    Args:
        manager: vLLM's ``KVCacheManager``.
        request: vLLM's ``Request``.
        local: Tokens that this server's own cache has.
        computed: Tokens that need not be computed.
        beyond: Tokens behind the request's own that need blocks, for drafts.
        capped: Whether windows count with at most the blocks that they need at a time, as when vLLM begins a request.
    """
    tokens = min(request.num_tokens, manager.max_model_len)
    needed: int = manager.coordinator.get_num_blocks_to_allocate(
        request_id=request.request_id,
        num_tokens=tokens + beyond,
        new_computed_blocks=manager.empty_kv_cache_blocks.blocks,
        num_encoder_tokens=0,
        total_computed_tokens=computed,
        num_local_computed_tokens=local,
        num_tokens_main_model=tokens,
        apply_admission_cap=capped,
        prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
    )
    return needed


class Admission:
    """Knows the requests that have begun to be received. Runs on the thread of the engine core.

    Args:
        beyond: Tokens behind a request's own for which vLLM reserves blocks, for drafts.
    """

    def __init__(self, beyond: int) -> None:
        self._beyond = beyond
        self._manager: Any = None
        self._begun: dict[str, Any] = {}
        """Requests that have blocks to be received, until they are computed or have failed."""
        self._full = False
        """Whether a request was refused in this step. One behind it must not take the blocks that it waits for."""

    def bind(self, manager: Any) -> None:
        """Take vLLM's ``KVCacheManager``."""
        self._manager = manager

    def begin(self, request: Any) -> None:
        """A request has blocks to be received."""
        self._begun[request.request_id] = request

    def end(self, name: str) -> None:
        """A request has the blocks for the rest of its prompt, or has ended."""
        self._begun.pop(name, None)

    def next_step(self) -> None:
        """The scheduler has looked at all requests that wait, and begins with the first one again."""
        self._full = False

    def fits(self, request: Any, local: int, computed: int) -> bool:
        """Whether each request that has begun, and this one, finds blocks for the rest of its prompt.

        Hits of this server's own cache count as needed, too.

        Args:
            request: One that waits.
            local: Tokens that this server's own cache has.
            computed: Tokens that it has when its state has come.
        """
        if not self._begun:
            return True
        if self._full:
            return False
        needed = blocks_needed(self._manager, request, local=local, computed=computed, beyond=self._beyond)
        for each in self._begun.values():
            held = each.num_computed_tokens
            needed += blocks_needed(self._manager, each, local=held, computed=held, beyond=self._beyond)
        self._full = needed > self._manager.block_pool.get_num_free_blocks()
        return not self._full

    def needed(self, loading: Container[str]) -> int:
        """Blocks that the first request needs whose state has come, and that waits for the rest; 0 if there is none.

        vLLM asks nothing of a connector before it looks for blocks for such a request.

        Args:
            loading: Requests whose state has not come.
        """
        for name, each in self._begun.items():
            if name not in loading:
                held = each.num_computed_tokens
                return blocks_needed(self._manager, each, local=held, computed=held, beyond=self._beyond)
        return 0

    def __bool__(self) -> bool:
        """Whether any request has begun, and has not been computed."""
        return bool(self._begun)
