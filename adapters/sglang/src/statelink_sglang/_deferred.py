"""The memory of failed requests on decode: every rank gives it back in the same round, and no flush of a pool does.

SGLang keeps the memory of a failed request until nothing writes to it any more, and each rank knows that of its own
memory alone. If one rank gave it back before another, they would make different batches, and wait for each other for
ever. Everything here runs on the scheduler's one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._behaviour import BEHAVIOUR
from ._hooks import moves_state

__all__ = ["AROUND", "free_entries", "resolving"]


def free_entries(queue: Any, manager: Any) -> list[Any]:
    """The entries of requests to whose memory nothing writes on any rank, or whose time limit is over on every rank.

    Every rank of the queue's group must call this, with the same entries.
    """
    now, held = time.monotonic(), queue._deferred_releases
    if not held:
        return []
    flags = [
        manager.is_abort_release_safe(each[0].req.bootstrap_room, 0) or now >= each[BEHAVIOUR.until] for each in held
    ]
    reduced = torch.tensor(flags, dtype=torch.int32)
    torch.distributed.all_reduce(reduced, op=torch.distributed.ReduceOp.MIN, group=queue.gloo_group)
    return [each for each, flag in zip(held, reduced.tolist(), strict=True) if flag]


def resolving(queue: Any, free: Sequence[Any], step: Callable[[], Any]) -> Any:
    """Let SGLang take a step in which it sees only the free ones of the entries. It gives back their memory."""
    held = queue._deferred_releases
    queue._deferred_releases = list(free)
    try:
        return step()
    finally:
        queue._deferred_releases[:0] = [each for each in held if not any(each is other for other in free)]


def around_resolve(original: Callable[..., Any], queue: Any) -> Any:
    """Around ``DecodeTransferQueue.resolve_deferred_releases``, where SGLang's ranks do not agree by themselves."""
    manager = queue.scheduler.disagg_decode_prealloc_queue.kv_manager
    if not moves_state(manager):
        return original(queue)
    return resolving(queue, free_entries(queue, manager), lambda: original(queue))


def around_is_fully_idle(
    original: Callable[..., bool], scheduler: Any, for_health_check: bool = False, ignore_waiting: bool = False
) -> bool:
    """Around ``Scheduler.is_fully_idle``, where SGLang does not count the memory that is still held.

    It would flush its pools while something writes to that memory, and then give it back a second time.
    """
    idle = original(scheduler, for_health_check, ignore_waiting)
    queue = getattr(scheduler, "disagg_decode_transfer_queue", None)
    return idle and (for_health_check or queue is None or not queue.has_pending_deferred_releases())


AROUND: dict[str, Callable[..., Any]] = {}
"""Each target, and its hook."""
if not BEHAVIOUR.agrees:
    AROUND["sglang.srt.disaggregation.decode.DecodeTransferQueue.resolve_deferred_releases"] = around_resolve
if not BEHAVIOUR.counts_held:
    AROUND["sglang.srt.managers.scheduler.Scheduler.is_fully_idle"] = around_is_fully_idle
