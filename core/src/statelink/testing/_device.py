"""A worker's memory on a device: whoever else looks at it asks the worker for its bytes, and no backend.

The worker copies what is asked for between the device and host memory that all of them share.
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
    """Have the memory of a worker on a device: its address, and where it is served. Runs in the worker.

    Args:
        host: This process.
        kind: The device.
        by: What allocates it, as for `statelink._devices.allocate`.
        path: The arena of this worker, through which bytes are handed over.
    """
    memory, served = serve(kind, by, path)
    host.on(kind, memory.address, lambda nbytes: allocate(kind, nbytes, by))
    return memory.address, served


def serve(kind: str, by: str, path: str) -> tuple[DeviceMemory, str]:
    """Allocate memory as large as a file, and serve it from threads: that, and what `_window.view` takes elsewhere.

    Args:
        kind: The device.
        by: What allocates it.
        path: The file, through which bytes are handed over; absolute.
    """
    mirror = _memory.view(path)
    memory = allocate(kind, len(mirror), by)
    name = f"statelink-testing-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")  # without a file, which a killed process would leave behind
    listener.listen()

    def accept() -> None:
        while True:
            client = listener.accept()[0]
            threading.Thread(target=_answer, args=(client, memory, mirror), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return memory, f"@{name}{path}"


def _answer(client: socket.socket, memory: DeviceMemory, mirror: Array) -> None:
    """Copy what one client asks for. Runs on a thread of its own."""
    with client:
        while len(order := client.recv(ORDER.size, socket.MSG_WAITALL)) == ORDER.size:
            what, at, nbytes = ORDER.unpack(order)
            copy = memory.read if what == READ else memory.write
            copy(at, mirror[at : at + nbytes])
            client.sendall(DONE)
