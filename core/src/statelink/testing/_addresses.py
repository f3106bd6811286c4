"""Addresses of this host at which nobody listens."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

__all__ = ["free_addresses"]

_ports = itertools.islice(itertools.cycle(range(20_000, 32_000)), os.getpid() * 61 % 12_000, None)
"""Ports below those that Linux assigns.

Each process starts at another port, so that tests in several processes do not take each other's ports.
"""


def free_addresses(count: int) -> list[str]:
    """Find addresses at which nobody listens, for ranks that must know each other's address before they open.

    Args:
        count: Number of addresses.

    Returns:
        Addresses as ``tcp://127.0.0.1:PORT``, each different from those of earlier calls of this process (until 12,000
        were given). They are free when this returns; nothing reserves them.
    """
    found: list[str] = []
    while len(found) < count:
        port = next(_ports)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(f"tcp://127.0.0.1:{port}")
    return found
