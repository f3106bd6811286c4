"""Hooks on decode's prefix cache and scheduler, for the linker: SGLang does not tell it all that it needs.

Everything here runs on the scheduler's one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

from ._behaviour import BEHAVIOUR

__all__ = ["AROUND", "CacheLinker", "linker_of", "offered_node"]


class CacheLinker(Protocol):
    """What the scheduler's manager needs of the linker: see `statelink_sglang.linker.Linker`."""

    def open(self, manager: Any, bootstrap: str) -> None: ...
    def shut(self) -> None: ...
    def step(self, scheduler: Any) -> None: ...


offered_node: ContextVar[Any] = ContextVar("statelink_sglang_offered_node", default=None)
"""The node of SGLang's tree that is offered at this moment."""


def around_offload_node(original: Callable[..., Any], wrapper: Any, node_id: Any, transfers: Any) -> Any:
    """Around ``UnifiedCacheLinkerWrapper._offload_node``, which does not tell a linker the node."""
    token = offered_node.set(node_id)
    try:
        return original(wrapper, node_id, transfers)
    finally:
        offered_node.reset(token)


def around_process_decode_queue(original: Callable[..., Any], scheduler: Any) -> Any:
    """Around ``SchedulerDisaggregationDecodeMixin.process_decode_queue``.

    Decode's loop never asks a linker what has completed. So SGLang would keep what is offered locked for ever.
    """
    linker = getattr(scheduler.disagg_decode_prealloc_queue.kv_manager, "linker", None)
    if linker is not None:
        linker.step(scheduler)
    return original(scheduler)


def linker_of(scheduler: Any) -> CacheLinker | None:
    """The linker of a scheduler's prefix cache, if it is Statelink's; else ``None``."""
    found = getattr(getattr(getattr(scheduler, "tree_cache", None), "linker", None), "cache_linker", None)
    return found if hasattr(found, "open") and hasattr(found, "step") else None


AROUND: dict[str, Callable[..., Any]] = {}
"""Each target, and its hook."""
if BEHAVIOUR.loads_linkers:
    AROUND |= {
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper._offload_node": (
            around_offload_node
        ),
        "sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin.process_decode_queue": (
            around_process_decode_queue
        ),
    }
