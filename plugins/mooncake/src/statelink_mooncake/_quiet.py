"""Suppresses two harmless lines that the library prints when an engine starts.

One is glog's banner, the other is a false error. ``MC_LOG_LEVEL`` does not suppress them. Standard error is not
redirected, because other threads and their child processes write to it at the same time. Instead, glog's public flag
``minloglevel`` lets only fatal errors pass for a short time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["quiet"]

FLAG = "_ZN3fLI17FLAGS_minloglevelE"
FATAL = 3


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let the library print only fatal errors. The caller holds a lock. Does nothing if the user asked for more.

    Lines of other engines of this process are lost in these milliseconds.
    """
    flag = _flag() if os.environ.get("MC_LOG_LEVEL") == "ERROR" else None
    if flag is None:
        yield
        return
    before, flag.value = flag.value, FATAL
    try:
        yield
    finally:
        flag.value = before


def _flag() -> ctypes.c_int32 | None:
    """The flag in the glog that came with the library; none if glog is built in, or if it is another copy of glog."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if "libglog" in path and "mooncake" in path:
                return ctypes.c_int32.in_dll(ctypes.CDLL(path), FLAG)
    return None
