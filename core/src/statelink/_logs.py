"""Loggers whose handlers cannot break a link, and counts, so that a flood of one thing does not fill the log."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from typing import Any

__all__ = ["Tally", "logger"]


class _Log(logging.LoggerAdapter):  # type: ignore[type-arg]  # Python 3.10 has no type arguments here
    """A logger that raises nothing. The engine adds handlers and filters, and they may raise anything.

    A thread of a link that logs goes on in any case. On the main thread, an interrupt (KeyboardInterrupt) that comes
    while it logs is not the handler's, and is raised.
    """

    def log(self, level: int, msg: object, *args: Any, stacklevel: int = 1, **named: Any) -> None:
        """As `logging.Logger.log`."""
        ours = threading.current_thread() is not threading.main_thread()
        with contextlib.suppress(BaseException if ours else Exception):
            self.logger.log(level, msg, *args, stacklevel=stacklevel + 1, **named)


def logger(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """The logger of this name, whose calls raise nothing that a handler or a filter of the engine raises. Any thread.

    For code that must go on: a thread of a backend's own that logs would otherwise end with the handler's exception.
    """
    return _Log(logging.getLogger(name), {})


class Tally(Counter[str]):
    """How often something has happened, by kind. Belongs to one thread; any thread may read it."""

    def note(self, kind: str) -> bool:
        """Count one more of a kind. Returns whether to log it: the 1st, 2nd, 4th, 8th, and so on."""
        self[kind] += 1
        return self[kind].bit_count() == 1
