"""A worker's memory on a device. Other processes ask the worker for its bytes, without a backend.

The worker copies the bytes between the device and host memory that all processes share.
"""

from __future__ import annotations

import secrets
import socket
import threading
from typing import TYPE_CHECKING

from statelink._devices import DeviceMemory, allocate

from . import _memory
from ._window import DONE, ORDER, READ

if TYPE_CHECKING:
    from ._memory import Array
    from ._worker import Host

__all__ = ["hold", "serve"]


def hold(host: Host, kind: str, by: str, path: str) -> tuple[int, str]:
    """Put the memory of a worker on a device. Returns its address, and where it is served. Runs in the worker.

    Args:
        host: This process.
        kind: The device.
        by: Allocates it, as for `statelink._devices.allocate`.
        path: The arena of this worker. Bytes are exchanged through it.
    """
    memory, served = serve(kind, by, path)
    host.on(kind, memory.address, lambda nbytes: allocate(kind, nbytes, by))
    return memory.address, served


def serve(kind: str, by: str, path: str) -> tuple[DeviceMemory, str]:
    """Allocate memory as large as a file, and serve it from threads. Returns it, and an address for `_window.view`.

    Args:
        kind: The device.
        by: Allocates it.
        path: Absolute path of the file. Bytes are exchanged through it.
    """
    mirror = _memory.view(path)
    memory = allocate(kind, len(mirror), by)
    name = f"statelink-testing-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")  # a socket without a file, because a killed process would leave a file behind
    listener.listen()

    def accept() -> None:
        while True:
            client = listener.accept()[0]
            threading.Thread(target=_answer, args=(client, memory, mirror), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return memory, f"@{name}{path}"


def _answer(client: socket.socket, memory: DeviceMemory, mirror: Array) -> None:
    """Copy bytes for one client. Runs on a thread of its own."""
    with client:
        while len(order := client.recv(ORDER.size, socket.MSG_WAITALL)) == ORDER.size:
            what, at, nbytes = ORDER.unpack(order)
            copy = memory.read if what == READ else memory.write
            copy(at, mirror[at : at + nbytes])
            client.sendall(DONE)
