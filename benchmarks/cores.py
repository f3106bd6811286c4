"""A core of its own for the thread that computes prefill's forward pass, as a card has processors of its own.

On a CPU, a forward pass computes on the same cores as TCP, the links of both sides, and decode's engine. So it takes
longer beside a transfer for a reason that a machine with a card does not have. With a core of its own, it loses what
the engine's own thread does for the transfer, and the time for which that thread waits for the interpreter.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

__all__ = ["missing", "set_apart"]


def missing() -> str:
    """Why no core can be set apart; empty if one can be."""
    return "" if len(os.sched_getaffinity(0)) > 1 else "there is only one core: give --shared-cores"


def set_apart(computes: int, others: Iterable[int]) -> None:
    """Keep a thread on the first core of this process, and others off it.

    Args:
        computes: The id of the thread that computes.
        others: Ids of threads. Those that have ended are left out, and so is ``computes``.
    """
    first, *rest = sorted(os.sched_getaffinity(0))
    for thread in others:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, rest)
    os.sched_setaffinity(computes, {first})
