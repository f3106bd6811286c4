"""What a request must be like for a queue to take it. A client chooses these values.

SGLang's own lines end the server for some of them, with any transfer backend: a room or a number of logprobs that its
metadata row does not hold, and an address that is no text. So a request is looked at before its queue takes it, and is
marked as rejected if the queue must not have it. The queue then answers it as SGLang answers every rejected request,
with the status 400. Everything here runs on the scheduler's one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, is_aborted

__all__ = ["AROUND", "address_problem", "around_decode_add", "around_prefill_add", "transfer_problem"]

ROOM_LIMIT = 1 << 63
"""SGLang writes the room into a tensor as a signed number of 64 bits."""
LONGEST_HOST = 255
"""Characters of a host's name, as in DNS."""


def around_prefill_add(original: Callable[..., Any], queue: Any, req: Any, num_kv_heads: int) -> Any:
    """Around ``PrefillBootstrapQueue.add``."""
    _reject(req, transfer_problem(req, _most_logprobs(queue)))
    return original(queue, req, num_kv_heads)


def around_decode_add(
    original: Callable[..., Any], queue: Any, req: Any, is_retracted: bool = False, is_rebootstrap: bool = False
) -> Any:
    """Around ``DecodePreallocQueue.add``. A request that comes back to the queue was looked at when it came first."""
    if not is_retracted and not is_rebootstrap:
        _reject(req, transfer_problem(req, _most_logprobs(queue)) or address_problem(req))
    return original(queue, req, is_retracted=is_retracted, is_rebootstrap=is_rebootstrap)


def transfer_problem(req: Any, most_logprobs: int) -> str:
    """Why a request's state cannot be moved, whatever the server's role; empty if it can.

    Args:
        req: SGLang's ``Req``.
        most_logprobs: The most top logprobs of a token that a metadata row holds.
    """
    # SGLang's own checks of its health send such requests, which are not moved, in the room 0.
    moved = req.bootstrap_host != FAKE_BOOTSTRAP_HOST
    room, logprobs = req.bootstrap_room, req.logprob.top_logprobs_num
    if not isinstance(room, int) or not int(moved) <= room < ROOM_LIMIT:
        return f"the request has the room {room!r:.80}; a number above zero and below 2^63 is needed"
    if req.return_logprob and logprobs > most_logprobs:
        return f"the request asks for {logprobs} top logprobs, and the row of a request holds {most_logprobs}"
    return ""


def address_problem(req: Any) -> str:
    """Why a request does not say where prefill is; empty if it does.

    Args:
        req: SGLang's ``Req``.
    """
    host, port = req.bootstrap_host, req.bootstrap_port
    if not isinstance(host, str) or not 0 < len(host) <= LONGEST_HOST or not host.isprintable():
        return f"the request has the bootstrap_host {host!r:.80}; the name or address of prefill's host is needed"
    if not isinstance(port, int) or not 0 < port < 1 << 16:
        return f"the request has the bootstrap_port {port!r:.80}; a number from 1 to 65535 is needed"
    return ""


def _most_logprobs(queue: Any) -> int:
    return int(queue.metadata_buffers.output_top_logprobs_val.shape[1])


def _reject(req: Any, problem: str) -> None:
    if problem and not is_aborted(req):  # else SGLang has rejected it already, with a reason of its own
        req.set_finish_with_abort(problem)


AROUND: dict[str, Callable[..., Any]] = {
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.add": around_prefill_add,
    "sglang.srt.disaggregation.decode.DecodePreallocQueue.add": around_decode_add,
}
"""Each target, and its hook."""
