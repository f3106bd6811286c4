"""Lets an engine rest while all that it does is hold state for other servers.

vLLM steps an engine a thousand times a second for as long as a request that has ended holds blocks. Such a step has
nothing to do but to see whether the blocks are free. So it waits for a moment, and less if anything comes for the
engine. vLLM gives a connector no way to wait for that, so the engine is looked for among those who called.
"""

from __future__ import annotations

import inspect
import queue
from typing import Any

__all__ = ["rest"]

SECONDS = 0.1
"""For so long a step rests at most. Blocks are free for others as much later, while nobody needs them."""


def rest(*, awaited: bool) -> None:
    """Wait until something comes for the engine that has called this, or for `SECONDS`.

    Does not wait in a program that calls an engine of its own: it has no thread that takes what comes.

    Args:
        awaited: Whether other ranks of data parallelism wait for the end of each step while any of them has work.
    """
    engine = _engine()
    if engine is None or (awaited and engine.engines_running):
        return
    comes = engine.input_queue
    with comes.not_empty:
        if not comes.queue:
            comes.not_empty.wait(SECONDS)


def _engine() -> Any:
    """The engine core whose step this is; ``None`` if it has no queue of its own."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(getattr(found, "input_queue", None), queue.Queue):
            return found
        frame = frame.f_back
    return None
