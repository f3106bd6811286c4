"""What a test takes for this host: addresses at which nobody listens, and a machine that it makes up."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["bare_machine", "free_addresses"]

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


@contextlib.contextmanager
def bare_machine(root: Path) -> Iterator[None]:
    """Show a plugin a machine that has nothing but what a test puts into a folder.

    Inside, `statelink.backend.native` looks for devices and settings of this machine below the folder: ``on_machine``,
    ``rdma_devices`` (``sys/class/infiniband``), and ``loads``, for which a shared library loads if there is a file of
    its name in ``lib``. That holds for all threads of this process; other processes see the real machine.

    Args:
        root: The folder; it may change inside.
    """
    from statelink.backend.native._machine import seen_in

    with seen_in(root):
        yield
