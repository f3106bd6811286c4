"""A room of its own for each sample of a request.

SGLang sends a request with ``n`` above 1 to its scheduler n + 1 times: once alone, so that the prompt is cached, and
then once for each sample. All have the room of the request, and a room moves the state of one. Both servers number the
samples alike, so each sample gets a room that both derive from the request's and from the number. Everything here runs
in the process that takes requests, on its one thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any

__all__ = ["AROUND", "STRIDE", "room_of_sample"]

STRIDE = 720_720 << 24
"""Between the rooms of two samples. A multiple of every number of DP ranks up to 16, and of 32, 48 and 64, so that all
samples go to the DP rank with the prompt's pages, where the room chooses the rank."""
ROOMS = 1 << 63
"""SGLang's rooms are below this number."""

_samples: ContextVar[dict[int, int] | None] = ContextVar("statelink_sglang_samples", default=None)
"""How often each room of a request with several samples was sent; ``None`` for any other request."""


def room_of_sample(room: int, number: int) -> int:
    """The room of a sample. Sample 0 is the prompt alone, and has the request's own room.

    Raises:
        OverflowError: The request has so many samples that there is no such room.
    """
    up = room + number * STRIDE
    found = up if up < ROOMS else room - number * STRIDE
    if found < 1:
        raise OverflowError(f"room {room} has no room for sample {number}")
    return found


async def around_handle_batch(
    original: Callable[..., AsyncIterator[Any]], manager: Any, obj: Any, *arguments: Any
) -> AsyncIterator[Any]:
    """Around ``TokenizerManager._handle_batch_request``: counts the samples of this request."""
    several = getattr(obj, "parallel_sample_num", 1) > 1 and _is_ours(manager.server_args)
    _samples.set({} if several else None)  # every sample is sent before the first answer
    try:
        async for answer in original(manager, obj, *arguments):
            yield answer
    finally:
        _samples.set(None)


async def around_send(original: Callable[..., Any], manager: Any, tokenized: Any) -> Any:
    """Around ``TokenizerManager._send_one_request``."""
    sent, room = _samples.get(), getattr(tokenized, "bootstrap_room", None)
    if sent is not None and isinstance(room, int) and room > 0:
        number = sent[room] = sent.get(room, -1) + 1
        tokenized.bootstrap_room = room_of_sample(room, number)
    return await original(manager, tokenized)


def _is_ours(args: Any) -> bool:
    return bool(args.disaggregation_mode != "null" and args.disaggregation_transfer_backend == "statelink")


AROUND: dict[str, Callable[..., Any]] = {
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_batch_request": around_handle_batch,
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request": around_send,
}
"""Each target, and its hook."""
