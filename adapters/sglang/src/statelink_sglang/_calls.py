"""A thread that makes calls to the link, in order, so that the scheduler's thread does not have to make them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from statelink.backend import logger

__all__ = ["Calls"]

log = logger("statelink.sglang")

Call = tuple[Callable[..., object], tuple[Any, ...]]
"""A function and its arguments."""


class Calls:
    """Makes calls one after the other, on one thread, in the order in which they were put.

    A scheduler puts two calls for each request, and has to go on at once. No executor of the standard library is used:
    the object that it makes for each call, of which nobody here wants the result, takes longer than many a call.

    Nothing closes it: SGLang keeps its manager for as long as the process lives, and the thread, a daemon, ends then.

    Attributes:
        put: Takes a call: a function and its arguments. Does not block. Any thread. What the function raises is logged.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call] = SimpleQueue()
        self.put: Callable[[Call], None] = self._calls.put
        threading.Thread(target=self._run, name="statelink-calls", daemon=True).start()

    def drain(self, timeout: float | None = None) -> bool:
        """Block until every call that was put before has returned. Any thread but that of the calls.

        Args:
            timeout: Seconds to wait at most; ``None`` waits for as long as it takes.

        Returns:
            Whether they have returned.
        """
        reached = threading.Event()
        self.put((reached.set, ()))
        return reached.wait(timeout)

    def _run(self) -> None:
        while True:
            each = self._calls.get()
            call, arguments = each
            try:
                call(*arguments)
            except Exception:
                log.exception("a call to the link failed")
            del each, call, arguments  # while nothing comes, no request is held
