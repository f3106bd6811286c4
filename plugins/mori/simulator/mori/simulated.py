"""Limits and waits of the simulated library, for tests that replace them. The real library has no such module."""

from __future__ import annotations

import functools
import os
import time

__all__ = ["MAX_MSG", "control_timeout", "delay"]

MAX_MSG = 1 << 30
"""What one work request carries, as the port says."""


@functools.cache
def control_timeout() -> int:
    """How long a peer may take to answer, in milliseconds: read once in a process."""
    return int(os.environ.get("MORI_IO_CP_TIMEOUT_MS", "5000"))


def delay() -> None:
    """Wait until the bytes of an operation move."""
    time.sleep(float(os.environ.get("MORI_SIM_DELAY_MS", "0.3")) / 1000)
