"""The interpreter's switch interval, which links of this process may shorten while they are open.

A thread that has waited gets the interpreter back from a thread that runs Python only after this interval
(`sys.setswitchinterval`). It belongs to the process, so all links share it.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import ClassVar

from statelink._logs import logger

__all__ = ["SwitchInterval"]

log = logger("statelink.link")

PYTHON = 0.005
"""Python's own interval, in seconds. Any other one was set by somebody, who had a reason."""


class SwitchInterval:
    """One link's part in the interval of the process. Thread-safe.

    While links ask for intervals, the shortest of them counts. The interval is only ever shortened, and only from
    Python's own one. Whatever somebody else sets, before or meanwhile, stays. The last link that gives up its part
    restores Python's interval.

    Args:
        seconds: What this link asks for; ``None`` asks for nothing.
    """

    _guard: ClassVar = threading.RLock()
    """The code of a signal handler may close a link on the thread that holds it."""
    _asked: ClassVar[list[float]] = []
    """By all links of the process."""
    _set: ClassVar[float | None] = None
    """What links have set. The interpreter counts in microseconds, so this is what it answers."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        if seconds is not None:
            with SwitchInterval._guard:
                SwitchInterval._asked.append(seconds)
                SwitchInterval._settle()

    def give_up(self) -> None:
        """Ask for nothing from now on. Does nothing the second time."""
        with SwitchInterval._guard:
            if self._seconds is not None:
                SwitchInterval._asked.remove(self._seconds)
                self._seconds = None
                SwitchInterval._settle()

    @classmethod
    def forget(cls) -> None:
        """Restore Python's interval in a forked child, where no link is open. Only the thread that forked is there."""
        cls._guard = threading.RLock()  # another thread of the parent may hold that of before
        cls._asked = []
        if cls._set is not None:
            cls._settle()

    @classmethod
    def _settle(cls) -> None:
        """Set the interval that counts. The caller holds the guard."""
        found = sys.getswitchinterval()
        if found != (PYTHON if cls._set is None else cls._set):
            cls._set = None
            log.info("the interpreter's switch interval stays at %g ms, which somebody else has set", found * 1e3)
            return
        sys.setswitchinterval(min([PYTHON, *cls._asked]))
        settled = sys.getswitchinterval()
        cls._set = settled if cls._asked else None
        if settled != found:
            log.info("the interpreter's switch interval is %g ms; it was %g ms", settled * 1e3, found * 1e3)


os.register_at_fork(after_in_child=SwitchInterval.forget)
