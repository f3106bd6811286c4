"""Keeping two harmless lines off the terminal that the library prints when an engine starts.

One is glog's banner, the other an error that is none; no ``MC_LOG_LEVEL`` silences them. Standard error itself stays as
it is, since other threads and the processes that they start write to it meanwhile: for that time, glog's public flag
``minloglevel`` lets fatal errors through alone.
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
    """Have the library print no more than fatal errors. The caller holds a lock; nothing happens where more is asked.

    What other engines of this process would print in these milliseconds is lost.
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
    """The flag in the glog that came with the library; none if it is built in, or is another process-wide one."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if "libglog" in path and "mooncake" in path:
                return ctypes.c_int32.in_dll(ctypes.CDLL(path), FLAG)
    return None
