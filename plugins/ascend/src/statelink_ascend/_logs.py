"""Sends the library's log to `logging`. The library writes it to standard output.

No level suppresses its traces, and its hook for a logger does not get what its Python bindings write. So the bindings
are told to write nothing, and the hook takes the rest.
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
"""If one of these variables is set, the user has chosen what to log, and nothing is changed."""
ERRORS, NOTHING = 3, "4"
LEVELS = {ERRORS: logging.ERROR, 4: logging.CRITICAL}
"""Levels by the library's numbers, from errors on. Higher numbers are traces."""


_led: Any = None
"""The library whose lines go to the logger."""


def imported() -> tuple[Any, bool]:
    """The library, and whether its log may be redirected. It reads its level when it is imported."""
    if _led is not None and sys.modules.get("memfabric_hybrid") is _led:
        return _led, True
    ours = "memfabric_hybrid" not in sys.modules and not any(name in os.environ for name in SET)
    with environment({"MF_LOG_LEVEL": NOTHING}) if ours else contextlib.nullcontext():
        module = importlib.import_module("memfabric_hybrid")
    return module, ours and hasattr(module, "set_extern_logger")


def lead(module: Any) -> None:
    """Send its lines to the logger ``statelink.ascend``. Does so once in a process."""
    global _led
    if module is not _led:
        module.set_extern_logger(_line)
        atexit.register(_mute)
        _led = module


def level(module: Any) -> None:
    """Set the level to errors again, because a start of the engine changes it."""
    module.set_log_level(ERRORS)


def _line(severity: int, text: str) -> None:
    """Log one line. Called on the library's threads, which an exception would end.

    While an engine starts, the library writes at the level that it was imported with. What is less than an error is
    dropped then, too.
    """
    if severity < ERRORS:
        return
    with contextlib.suppress(Exception):
        log.log(LEVELS.get(severity, logging.DEBUG), "%s", text)


def _mute() -> None:
    """Set a C function that does nothing as the hook, because the library's threads outlive the interpreter."""
    with contextlib.suppress(AttributeError, OSError):
        everything: Any = ctypes.CDLL(None)
        everything.smem_set_extern_logger(everything.abs)
