"""Whether the loader finds everything that a plugin of NIXL needs. NIXL itself only says that it found nothing."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["loading_error"]

LOADING_SECONDS = 30.0
"""Seconds after which a plugin counts as one that loads."""
LOAD = """
import ctypes, os, sys
try:
    for path in sys.argv[1:]:
        ctypes.CDLL(path)
except OSError as error:
    print(error)
sys.stdout.flush()
os._exit(0)  # UCX may crash a process at its normal end
"""


def loading_error(path: Path, *, after: str | None = None) -> str:
    """The loader's error for a library; empty if it loads, or if nobody can tell.

    Args:
        path: The library.
        after: A library that is loaded before it. Both are then loaded in a process of their own. ``None``: the library
            is loaded into this process, and stays there.
    """
    if after is not None:
        return _apart(after, str(path))
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return str(error)
    return ""


@functools.cache
def _apart(*paths: str) -> str:
    command = [sys.executable, "-I", "-S", "-c", LOAD, *paths]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=LOADING_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
