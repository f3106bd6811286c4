"""Has prefill compute a request again that decode had to give up for new weights.

SGLang calls this a rebootstrap. Decode names memory for the request once more, under the same room, and then sends the
request's tokens to the HTTP port of the prefill server that had computed it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ._http import generate

if TYPE_CHECKING:
    from ._receiver import Receiver

__all__ = ["recompute"]

log = logging.getLogger("statelink.sglang")


def recompute(receiver: Receiver, http_port: int, payload: dict[str, Any], timeout: float) -> None:
    """Send the request to prefill, and wait until it is computed. If that fails, the request fails.

    Runs on a thread of a pool.
    """
    address = f"{receiver.bootstrap_addr.rpartition(':')[0]}:{http_port}"
    try:
        generate(address, payload, timeout)
    except Exception as error:  # whatever it is, the request must not wait for a prefill that will not come
        log.debug("prefill at %s", address, exc_info=True)
        why = str(error) or type(error).__name__
        receiver.fail(f"prefill was to compute a retracted request anew, and did not: {why}")
