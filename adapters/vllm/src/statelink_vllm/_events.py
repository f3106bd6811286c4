"""Events of a device: what was launched on it before one is recorded is done when ``query()`` is true."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["recorded"]


def recorded(device: torch.device) -> Any:
    """An event that is recorded now on the current stream of a device; ``None`` where nothing is launched ahead."""
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record()
    return event
