"""What of a long reason names the cause."""

from __future__ import annotations

import re

__all__ = ["telling"]

MOST = 600
"""Characters."""
CAUSE = re.compile(r"fatal|assert|abort|error|signal", re.IGNORECASE)


def telling(reason: str) -> str:
    """The first line of a reason, and the lines behind it that name a cause. They stand anywhere in a process's log."""
    first, *others = reason.splitlines() or [""]
    found = [line for line in others if CAUSE.search(line)]
    return ("\n".join([first, *found]) if found else reason)[:MOST]
