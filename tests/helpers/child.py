"""What tests change inside a worker process."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["speak"]


def speak(low: int, high: int) -> None:
    """Links that are opened from now on claim to speak these versions of the protocol."""
    opening: Any = importlib.import_module("statelink._open")
    opening.PROTOCOL = (low, high)
