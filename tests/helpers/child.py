"""What tests change inside a worker process."""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.helpers.worker import Host

    from statelink.backend import Transfer

__all__ = ["hold_revokes", "speak"]


def speak(low: int, high: int) -> None:
    """Links that are opened from now on claim to speak these versions of the protocol."""
    opening: Any = importlib.import_module("statelink._open")
    opening.PROTOCOL = (low, high)


def hold_revokes(host: Host, key: str, gate: str) -> None:
    """A link takes no grant back before a gate is open."""
    backend: Any = host.links[key]._node.backend
    revoke = backend.revoke

    def held(*which: Any) -> Transfer:
        while not host.gates[gate].open:
            time.sleep(0.001)
        done: Transfer = revoke(*which)
        return done

    backend.revoke = held
