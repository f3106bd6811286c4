"""Has prefill compute a request again that decode had to give up for new weights.

SGLang calls this a rebootstrap. Decode names memory for the request once more, under the same room, and then sends the
request's tokens to the HTTP port of the prefill server that had computed it.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from ._http import generate

__all__ = ["Recomputed", "recompute"]

log = logging.getLogger("statelink.sglang")


class Recomputed(Protocol):
    """What a receiver says of its request."""

    bootstrap_addr: str
    dp_rank: int | None

    @property
    def failed(self) -> bool: ...
    def fail(self, reason: str) -> None: ...


def recompute(receiver: Recomputed, http_port: int, payload: dict[str, Any], timeout: float) -> None:
    """Send the request to prefill, and wait until it is computed. If that fails, the request fails.

    Runs on a thread of a pool.
    """
    if receiver.dp_rank is not None:
        payload = {**payload, "routed_dp_rank": receiver.dp_rank, "disagg_prefill_dp_rank": receiver.dp_rank}
    address = f"{receiver.bootstrap_addr.rpartition(':')[0]}:{http_port}"
    try:
        generate(address, payload, timeout)
    except Exception as error:  # whatever it is, the request must not wait for a prefill that will not come
        log.debug("prefill at %s", address, exc_info=True)
        why = str(error) or type(error).__name__
        receiver.fail(f"prefill was to compute a retracted request anew, and did not: {why}")
