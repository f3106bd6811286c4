"""Stands in for the one call to CUDA that SGLang's overlap schedule makes on a CPU: ``torch.cuda.Event``.

On a CPU the forward pass has ended when SGLang records the event. A test can make events late: they then pass so many
seconds after they were recorded, as those of a card with a long queue do.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

__all__ = ["LATE", "Event", "install"]

LATE = "STATELINK_TEST_LATE_EVENTS"
"""Variable with the path of a file, which holds the seconds after which an event passes. Read for each event."""
ALWAYS_LATE = 0.005
"""Seconds without such a file. No event has passed at once, so that every early chunk waits for its event."""


class Event:
    """An event of a device's stream, with what SGLang and Statelink call of it."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self._passes: float | None = None

    def record(self, stream: Any = None) -> None:
        self._passes = time.monotonic() + _late()

    def query(self) -> bool:
        return self._passes is not None and time.monotonic() >= self._passes

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(0.001)


def _late() -> float:
    path = os.environ.get(LATE)
    try:
        return float(Path(path).read_text()) if path else ALWAYS_LATE
    except (OSError, ValueError):
        return ALWAYS_LATE


def install() -> None:
    """Put the class where SGLang looks for it, in this process."""
    import torch

    torch.cuda.Event = Event  # type: ignore[assignment,misc]
