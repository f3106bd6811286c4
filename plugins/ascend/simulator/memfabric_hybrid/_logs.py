"""Lines of the log: they go to standard output, from a level on that the environment sets.

A trace is above every level that can be set. A function that was set takes the lines instead, but not those of the
bindings themselves, whose log is one of their own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

__all__ = ["ERROR", "TRACE", "log", "set_function", "set_level", "start"]

NAMES = ("DEBUG", "INFO", "WARN", "ERROR", "FATAL", "TRACE")
ERROR, TRACE = 3, 5
BINDINGS = "ADAPTER"


def _from_environment() -> int:
    text = os.environ.get("ASCEND_MF_LOG_LEVEL") or os.environ.get("MF_LOG_LEVEL", "")
    return int(text) if text in ("0", "1", "2", "3", "4", "5") else ERROR


_levels = dict.fromkeys((BINDINGS, "SMEM"), _from_environment())
_function: list[Callable[[int, str], None]] = []


def log(level: int, part: str, text: str) -> None:
    """Write one line, if the level of its part lets it through."""
    if level < _levels[part]:
        return
    line = f"[{part} simulator.cpp:1 log] {text}"
    if _function and part != BINDINGS:
        _function[0](level, line)
        return
    stamp = time.strftime("%Y-%m-%d %H:%M:%S.000000")
    line = f"{stamp} {NAMES[level]} [{os.getpid()}-{threading.get_native_id()}]{line}\n"
    os.write(1, line.encode())  # as native code does, whatever Python's standard output is


def set_level(level: int) -> None:
    """Let lines of this level and above through; the bindings keep theirs."""
    _levels["SMEM"] = level


def start() -> None:
    """A start of the engine takes the level from the environment as it was at the import."""
    _levels["SMEM"] = _levels[BINDINGS]


def set_function(function: Callable[[int, str], None]) -> None:
    """Have a function take the lines."""
    _function[:] = [function]
