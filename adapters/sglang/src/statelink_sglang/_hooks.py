"""Hooks on SGLang's two queues. They pass on what SGLang does not: the pools, and the tokens of a request.

A manager is made without the pools, and senders and receivers without the request. The queue that makes them has both.
Everything here runs on the scheduler's one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from ._content import content_of_request

__all__ = ["AROUND", "Announced", "announced", "announcing", "around_init_kv_manager", "making_manager", "moves_state"]


class Announced(NamedTuple):
    """The request for which a sender or a receiver is made.

    Attributes:
        room: SGLang's ``bootstrap_room``.
        tokens: N: the tokens whose state is moved.
        request: SGLang's ``Req``.
        content: Which request it is; ``None`` if nobody says.
        wrong: Why the request has no content, if something that its client gave has none; empty otherwise.
    """

    room: Any
    tokens: int
    request: Any = None
    content: bytes | None = None
    wrong: str = ""


making_manager: ContextVar[Any] = ContextVar("statelink_sglang_making_manager", default=None)
"""The queue that makes a manager at this moment; ``None`` if the hook is not in place."""
_making_room: ContextVar[Announced | None] = ContextVar("statelink_sglang_making_room", default=None)
"""The request for which a sender or a receiver is made at this moment."""


def announced(room: Any) -> Announced | None:
    """The request for which a queue makes a sender or a receiver at this moment; ``None`` if it is not this room's."""
    request = _making_room.get()
    return request if request is not None and request.room == room else None


@contextmanager
def announcing(request: Announced) -> Iterator[None]:
    """Within the block, a sender or a receiver that is made is for this request."""
    token = _making_room.set(request)
    try:
        yield
    finally:
        _making_room.reset(token)


def around_init_kv_manager(original: Callable[..., Any], queue: Any) -> Any:
    """Around ``_init_kv_manager`` of both queues."""
    token = making_manager.set(queue)
    try:
        return original(queue)
    finally:
        making_manager.reset(token)


def around_create_sender(original: Callable[..., Any], queue: Any, req: Any, num_kv_heads: int) -> Any:
    """Around ``PrefillBootstrapQueue.create_sender``."""
    with announcing(_announced_by(queue, req, len(req.origin_input_ids))):
        return original(queue, req, num_kv_heads)


def around_create_receiver(original: Callable[..., Any], queue: Any, req: Any, is_rebootstrap: bool = False) -> Any:
    """Around ``DecodePreallocQueue._create_receiver_and_enqueue``."""
    with announcing(_announced_by(queue, req, queue._rebootstrap_prefill_len(req))):
        return original(queue, req, is_rebootstrap=is_rebootstrap)


def around_resolve_dp_rank(original: Callable[..., Any], queue: Any, req: Any) -> Any:
    """Around ``DecodePreallocQueue._resolve_prefill_dp_rank``: another backend's manager is asked by SGLang itself."""
    find = getattr(queue.kv_manager, "find_dp_rank", None)
    return original(queue, req) if find is None else find(req)


def around_ensure_prefill_info(original: Callable[..., Any], queue: Any, waiting: dict[str, list[Any]]) -> Any:
    """Around ``DecodePreallocQueue._ensure_prefill_info``.

    SGLang would ask for the DP ranks of all requests whose server is known, and wait for the answer. So a request whose
    rank is not known yet is handed back with those whose server is not.
    """
    ready, remaining = original(queue, waiting)
    find = getattr(queue.kv_manager, "find_dp_rank", None)
    if find is None:
        return ready, remaining
    known: dict[str, list[Any]] = {}
    for address, requests in ready.items():
        for each in requests:
            (known.setdefault(address, []) if find(each.req) is not None else remaining).append(each)
    return known, remaining


def around_prefetch_dp_ranks(original: Callable[..., Any], queue: Any) -> Any:
    """Around ``DecodePreallocQueue.prefetch_prefill_dp_rank_queries``: the manager has asked already."""
    return None if moves_state(queue.kv_manager) else original(queue)


def moves_state(manager: Any) -> bool:
    """Whether a queue's manager is Statelink's, and not another backend's."""
    return hasattr(manager, "find_dp_rank")


def _announced_by(queue: Any, req: Any, tokens: int) -> Announced:
    content, wrong = None, ""
    try:
        content = content_of_request(req, tokens, queue.scheduler)
    except Exception as error:  # a client gave what it is made of: it ends this request, and nothing else
        wrong = f"it cannot be said which request this is: {type(error).__name__}: {error}"
    return Announced(req.bootstrap_room, tokens, req, content, wrong)


AROUND: dict[str, Callable[..., Any]] = {
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager": around_init_kv_manager,
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender": around_create_sender,
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager": around_init_kv_manager,
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue": around_create_receiver,
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._resolve_prefill_dp_rank": around_resolve_dp_rank,
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._ensure_prefill_info": around_ensure_prefill_info,
    "sglang.srt.disaggregation.decode.DecodePreallocQueue.prefetch_prefill_dp_rank_queries": around_prefetch_dp_ranks,
}
"""Each target, and its hook."""
