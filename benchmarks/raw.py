"""A transfer library alone, called as fast as it can be: what a backend over it is measured against.

Everything that does not depend on a request is done before: memory is registered, peers are known, and the blocks are
listed and merged. What is timed, in the sending process, is the library's call or calls, until the bytes have arrived.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from .floor import Rows

__all__ = ["RAW", "Raw", "engine"]


class Raw(Protocol):
    """One side's engine.

    Args:
        name: ``source`` or ``target``.
        memory: Address and length of each range of memory to register.
        device: The number of the graphics card that it belongs to; ``None`` for host memory.
    """

    def __init__(self, name: str, memory: Rows, device: int | None) -> None: ...

    def address(self) -> Any:
        """What the source has to know of the target. Picklable."""

    def connect(self, peer: Any, source: Rows, target: Rows) -> None:
        """At the source: know the target, and what to move."""

    def move(self) -> float:
        """At the source: move all of it. Seconds."""

    def close(self) -> None: ...


class Nixl:
    """One ``initialize_xfer`` over arrays of blocks, and ``transfer``."""

    def __init__(self, name: str, memory: Rows, device: int | None) -> None:
        # An agent of the plugin, because the progress thread of NIXL's own never rests. On few cores, that would slow
        # down everything that is measured beside it.
        from statelink_nixl._library import Library
        from statelink_nixl._options import Options

        self._agent = Library().agent(name, Options())
        self._kind, self._device = "DRAM" if device is None else "VRAM", device or 0
        self._agent.register_memory(self._wide(memory), self._kind)

    def address(self) -> Any:
        return self._agent.get_agent_metadata()

    def connect(self, peer: Any, source: Rows, target: Rows) -> None:
        self._peer = self._agent.add_remote_agent(peer)
        self._ends = self._wide(source), self._wide(target)

    def move(self) -> float:
        agent = self._agent
        began = time.perf_counter()
        handle = agent.initialize_xfer(
            "WRITE", *(agent.get_xfer_descs(rows, self._kind) for rows in self._ends), self._peer
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        took = time.perf_counter() - began
        handle.release()
        if state != "DONE":
            raise OSError(f"NIXL reports {state}")
        return took

    def close(self) -> None:
        del self._agent

    def _wide(self, rows: Rows) -> Rows:
        """With a third column, the device."""
        return np.concatenate([rows, np.full((len(rows), 1), self._device, np.uint64)], axis=1)


class Mooncake:
    """One ``batch_transfer_sync_write``."""

    def __init__(self, name: str, memory: Rows, device: int | None) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        # By default, Mooncake refuses a batch of more than 1,024 blocks to a peer.
        for limit in ("QUEUED_TRANSFERS", "PENDING_ADMISSIONS"):
            os.environ.setdefault(f"MC_TCP_MAX_{limit}_PER_PEER", "65535")
        os.environ.setdefault("MC_TCP_ADMISSION_TIMEOUT_MS", "60000")
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise OSError("Mooncake does not start")
        for address, nbytes in memory.tolist():
            if self._engine.register_memory(address, nbytes):
                raise OSError("Mooncake does not register memory")

    def address(self) -> Any:
        return f"127.0.0.1:{self._engine.get_rpc_port()}"

    def connect(self, peer: Any, source: Rows, target: Rows) -> None:
        self._batch = peer, source[:, 0].tolist(), target[:, 0].tolist(), source[:, 1].tolist()

    def move(self) -> float:
        began = time.perf_counter()
        if self._engine.batch_transfer_sync_write(*self._batch):
            raise OSError("Mooncake could not move a batch")
        return time.perf_counter() - began

    def close(self) -> None:
        del self._engine


RAW: dict[str, type[Raw]] = {"nixl": Nixl, "mooncake": Mooncake}
"""By the name of the backend that uses it."""


@contextlib.contextmanager
def engine(backend: str, name: str, memory: Rows, where: str) -> Iterator[Raw | None]:
    """The library behind a backend; ``None`` if nothing stands behind it.

    Args:
        backend: The backend's name.
        name: ``source`` or ``target``.
        memory: Address and length of each range of memory to register.
        where: ``host``, or the device that it belongs to, as torch names it.
    """
    device = int(where.partition(":")[2] or 0) if where.startswith("cuda") else None
    made = RAW[backend](name, memory, device) if backend in RAW else None
    try:
        yield made
    finally:
        if made is not None:
            made.close()
