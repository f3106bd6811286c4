"""Waiting for a transfer without holding a thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statelink.backend import Transfer

    from ._node import Node

__all__ = ["await_transfer"]

log = logging.getLogger("statelink.link")

NAP, BROKEN = 0.001, 1.0
"""Seconds between polls; the latter after one that raised."""


def await_transfer(node: Node, transfer: Transfer, then: Callable[[bool], None]) -> None:
    """Poll one transfer until it ends. For data threads.

    Args:
        node: The link's control thread.
        transfer: Of its backend.
        then: Called on the control thread with whether it succeeded.
    """
    nap = NAP
    if transfer.outcome is None:
        try:
            node.backend.poll([transfer])
        except BaseException:
            log.exception("backend %s failed to poll", node.backend.name)
            nap = BROKEN
    outcome = transfer.outcome
    if outcome is not None:
        node.post(lambda: then(outcome.ok))
        return
    again = partial(await_transfer, node, transfer, then)
    node.post(lambda: node.after(nap, lambda: node.fences.submit(("await", id(transfer)), again)))
