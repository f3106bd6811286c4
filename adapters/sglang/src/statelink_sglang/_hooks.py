"""Hooks on SGLang's two queues. They pass on what SGLang does not: the pools, and the tokens of a request.

A manager is made without the pools, and a receiver without the number of tokens. The queue that makes them has both.
Everything here runs on the scheduler's one thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

__all__ = ["AROUND", "Announced", "announced", "queue_in_construction"]


class Announced(NamedTuple):
    """The request for which a receiver is made.

    Attributes:
        room: SGLang's ``bootstrap_room``.
        tokens: N: the tokens whose state is moved.
    """

    room: Any
    tokens: int


_queue: ContextVar[Any] = ContextVar("statelink_sglang_queue", default=None)
_request: ContextVar[Announced | None] = ContextVar("statelink_sglang_request", default=None)


def queue_in_construction() -> Any:
    """The queue that makes a manager at this moment; ``None`` if the hook is not in place."""
    return _queue.get()


def announced(room: Any) -> Announced | None:
    """The request that the queue makes a receiver for at this moment; ``None`` if it is not this room's."""
    request = _request.get()
    return request if request is not None and request.room == room else None


@contextlib.contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def around_init_kv_manager(original: Callable[..., Any], queue: Any) -> Any:
    """Around ``_init_kv_manager`` of both queues."""
    with _set(_queue, queue):
        return original(queue)


def around_create_receiver(original: Callable[..., Any], queue: Any, req: Any, is_rebootstrap: bool = False) -> Any:
    """Around ``DecodePreallocQueue._create_receiver_and_enqueue``."""
    with _set(_request, Announced(req.bootstrap_room, queue._rebootstrap_prefill_len(req))):
        return original(queue, req, is_rebootstrap=is_rebootstrap)


AROUND: dict[str, Callable[..., Any]] = {
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager": around_init_kv_manager,
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager": around_init_kv_manager,
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue": around_create_receiver,
}
"""Each target, and its hook."""
