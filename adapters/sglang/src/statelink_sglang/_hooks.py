"""Hooks on SGLang's two queues. They pass on what SGLang does not: the pools, and the tokens of a request.

A manager is made without the pools, and a receiver without the number of tokens. The queue that makes them has both.
Everything here runs on the scheduler's one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

__all__ = ["AROUND", "Announced", "announced", "announcing", "around_init_kv_manager", "making_manager"]


class Announced(NamedTuple):
    """The request for which a receiver is made.

    Attributes:
        room: SGLang's ``bootstrap_room``.
        tokens: N: the tokens whose state is moved.
        request: SGLang's ``Req``.
    """

    room: Any
    tokens: int
    request: Any = None


making_manager: ContextVar[Any] = ContextVar("statelink_sglang_making_manager", default=None)
"""The queue that makes a manager at this moment; ``None`` if the hook is not in place."""
_making_receiver: ContextVar[Announced | None] = ContextVar("statelink_sglang_making_receiver", default=None)
"""The request for which a receiver is made at this moment."""


def announced(room: Any) -> Announced | None:
    """The request that the queue makes a receiver for at this moment; ``None`` if it is not this room's."""
    request = _making_receiver.get()
    return request if request is not None and request.room == room else None


@contextmanager
def announcing(request: Announced) -> Iterator[None]:
    """Within the block, a receiver that is made is for this request."""
    token = _making_receiver.set(request)
    try:
        yield
    finally:
        _making_receiver.reset(token)


def around_init_kv_manager(original: Callable[..., Any], queue: Any) -> Any:
    """Around ``_init_kv_manager`` of both queues."""
    token = making_manager.set(queue)
    try:
        return original(queue)
    finally:
        making_manager.reset(token)


def around_create_receiver(original: Callable[..., Any], queue: Any, req: Any, is_rebootstrap: bool = False) -> Any:
    """Around ``DecodePreallocQueue._create_receiver_and_enqueue``."""
    with announcing(Announced(req.bootstrap_room, queue._rebootstrap_prefill_len(req), req)):
        return original(queue, req, is_rebootstrap=is_rebootstrap)


AROUND: dict[str, Callable[..., Any]] = {
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager": around_init_kv_manager,
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager": around_init_kv_manager,
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue": around_create_receiver,
}
"""Each target, and its hook."""
