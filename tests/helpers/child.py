"""What tests change inside a worker process."""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.helpers.worker import Host


__all__ = ["hold", "speak"]


def speak(low: int, high: int) -> None:
    """Links that are opened from now on claim to speak these versions of the protocol."""
    opening: Any = importlib.import_module("statelink._open")
    opening.PROTOCOL = (low, high)


def hold(host: Host, key: str, method: str, gate: str) -> None:
    """A link's backend does not begin calls of a method before a gate is open."""
    backend: Any = host.links[key]._context.backend
    real = getattr(backend, method)

    def held(*arguments: Any) -> Any:
        while not host.gates[gate].open:
            time.sleep(0.001)
        return real(*arguments)

    setattr(backend, method, held)
