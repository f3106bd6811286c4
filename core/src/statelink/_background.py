"""A daemon thread whose start is all or nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Background"]


class Background(threading.Thread):
    """A daemon thread that can be kept from running when its start fails.

    ``start`` may raise before the thread begins, as where the system has no thread left, and also after that: an
    interrupt (KeyboardInterrupt) comes between any two steps. Whoever catches what it raises asks `cancel` whether the
    thread runs.

    Args:
        work: What the thread does.
        name: Its name.
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._fate: dict[str, bool] = {}

    def run(self) -> None:
        """Do the work, unless `cancel` was called before."""
        if self._fate.setdefault("runs", True):  # one step: either this thread or the other one decides
            self._work()

    def cancel(self) -> bool:
        """Keep the thread from running, if it has not begun. Returns whether it never runs. Any other thread."""
        return not self._fate.setdefault("runs", False)
