"""Hooks on SGLang's loop for pipeline stages: every stage ends a request in the same way, in the same round.

Each stage makes its batches from queues of its own, and waits for the others in every round. So all stages must take a
request from their queues in the same round and with the same verdict, and give its memory back in the same round. Each
round, a list goes from the first stage to the last, which completes it. The complete list goes to the first stage, and
from there to the others.

SGLang's own list has the requests that have ended on every stage, and not how. If a request has failed on one stage
alone, the other stages compute it, and wait for that one for ever. The first stage passes on only the requests that
have succeeded there, so later stages keep the others for ever. The list here says how each request has ended, and whose
memory is free:

- a request fails if it has failed on any stage, and succeeds when it has succeeded on all;
- the memory of a failed request is given back when nothing writes to it on any stage.

On prefill, SGLang's own list says which new requests have failed on any stage. In some releases, a stage besides fails
others alone.

Everything here runs on the scheduler's one thread, on every rank of every stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ._behaviour import BEHAVIOUR
from ._deferred import free_entries, resolving
from ._hooks import moves_state
from ._transfer import FAILED, SUCCESS

__all__ = ["AROUND", "Ended", "around_list_ended", "around_take_ended"]


class Ended(NamedTuple):
    """What goes from stage to stage: ids of requests that decode's transfer queue has or had.

    Attributes:
        succeeded: They have succeeded on every stage that the list has passed.
        failed: They have failed on one of them.
        free: They failed in an earlier round, and nothing writes to their memory on any of these stages.
    """

    succeeded: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    free: frozenset[str] = frozenset()


def around_list_ended(original: Callable[..., Any], scheduler: Any) -> Any:
    """Around ``_pp_pd_get_decode_transferred_ids``: take the list of the stage before, and add what this one knows."""
    if not moves_state(scheduler.disagg_decode_prealloc_queue.kv_manager):
        return original(scheduler)
    first = scheduler.pp_group.is_first_rank
    before: Ended | None = None if first else scheduler._pp_recv_pyobj_from_prev_stage()
    queue = scheduler.disagg_decode_transfer_queue
    succeeded, failed = map(frozenset, scheduler.get_rids(queue.queue, False, [SUCCESS], [FAILED]))
    free = frozenset(map(_id, free_entries(queue, scheduler.disagg_decode_prealloc_queue.kv_manager)))
    if before is None:
        return Ended(succeeded, failed, free)
    return Ended(before.succeeded & succeeded, before.failed | failed, before.free & free)


def around_take_ended(original: Callable[..., Any], scheduler: Any, release_rids: Any) -> Any:
    """Around ``process_decode_transfer_queue``: do what the complete list says. Returns what later stages have to do.

    SGLang's queue would give back what is free on this stage alone, so it sees only the requests that are free on all.
    """
    if not moves_state(scheduler.disagg_decode_prealloc_queue.kv_manager):
        return original(scheduler, release_rids)
    ended: Ended = Ended() if release_rids is None else release_rids
    queue = scheduler.disagg_decode_transfer_queue
    for each in queue.queue:
        # A request of SGLang's own health checks is of another class. It is not moved, and fails nowhere alone.
        if each.req.rid in ended.failed and hasattr(each.kv_receiver, "overrule"):
            each.kv_receiver.overrule()
    free = [each for each in queue._deferred_releases if _id(each) in ended.free]
    resolving(queue, free, lambda: original(scheduler, ended.succeeded | ended.failed))
    # SGLang may have a reason to take a request in a later round. Later stages then have to wait, too.
    left = {each.req.rid for each in queue.queue}
    return Ended(ended.succeeded - left, ended.failed - left, ended.free)


def around_pop_bootstrapped(original: Callable[..., Any], queue: Any, *args: Any, **named: Any) -> Any:
    """Around ``PrefillBootstrapQueue.pop_bootstrapped``, where a stage of prefill fails a new request alone.

    The others would compute it, and wait for that stage for ever. So SGLang sees only requests on which the stages
    have agreed. A failed one gets into the list of every stage in a later round.
    """
    lists = named.get("pp_good_rids"), named.get("pp_bad_rids")
    if None in lists or not moves_state(queue.kv_manager):  # one stage, or another backend
        return original(queue, *args, **named)
    agreed = {rid for each in lists for rid in each or ()}
    whole = queue.queue
    queue.queue = [each for each in whole if each.rid in agreed]
    try:
        return original(queue, *args, **named)
    finally:
        left = set(map(id, queue.queue))
        queue.queue = [each for each in whole if each.rid not in agreed or id(each) in left]


def _id(entry: Any) -> str:
    """The id of a request whose memory SGLang keeps."""
    found: str = entry[0].req.rid
    return found


PIPELINE = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin"
AROUND: dict[str, Callable[..., Any]] = {
    f"{PIPELINE}._pp_pd_get_decode_transferred_ids": around_list_ended,
    f"{PIPELINE}.process_decode_transfer_queue": around_take_ended,
}
"""Each target, and its hook."""
if not BEHAVIOUR.stages_agree:
    AROUND["sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.pop_bootstrapped"] = around_pop_bootstrapped
