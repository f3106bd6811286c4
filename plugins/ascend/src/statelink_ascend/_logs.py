"""The library's log, which it writes to standard output, led to `logging`.

Its traces pass every level that can be set, and its own hook for a logger does not get what the bindings write. So the
bindings are told to write nothing, and the hook takes the rest.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import logging
import os
import sys
from typing import Any

from statelink.backend.native import environment

__all__ = ["imported", "lead", "level"]

log = logging.getLogger("statelink.ascend")

SET = ("MF_LOG_LEVEL", "ASCEND_MF_LOG_LEVEL")
"""With one of these, whoever runs the process has said what to write, and nothing is changed."""
ERRORS, NOTHING = 3, "4"
LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
"""By the library's numbers; what is above is a trace."""


def imported() -> tuple[Any, bool]:
    """The library, and whether its log is ours to lead: it reads its level when it is imported."""
    ours = "memfabric_hybrid" not in sys.modules and not any(name in os.environ for name in SET)
    with environment({"MF_LOG_LEVEL": NOTHING}) if ours else contextlib.nullcontext():
        module = importlib.import_module("memfabric_hybrid")
    return module, ours and hasattr(module, "set_extern_logger")


def lead(module: Any) -> None:
    """Lead its lines to the logger ``statelink.ascend``."""
    module.set_extern_logger(_line)
    atexit.register(_mute)


def level(module: Any) -> None:
    """Let errors through again, which a start of the engine has undone."""
    module.set_log_level(ERRORS)


def _line(severity: int, text: str) -> None:
    """Take one line. Called from the library's threads, which an exception would end."""
    with contextlib.suppress(Exception):
        log.log(LEVELS[severity] if 0 <= severity < len(LEVELS) else logging.DEBUG, "%s", text)


def _mute() -> None:
    """Have it call a function of C that does nothing: its threads outlive the interpreter."""
    with contextlib.suppress(AttributeError, OSError):
        everything: Any = ctypes.CDLL(None)
        everything.smem_set_extern_logger(everything.abs)
