"""Mooncake without Statelink: what the backend is measured against."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._library import Library

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from statelink.backend import Region

    Rows = npt.NDArray[np.uint64]

    from ._options import Options

__all__ = ["RawMooncake"]

LIMITS = {
    # By default, Mooncake refuses a batch of more than 1,024 blocks to a peer.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "60000",
    "MC_LOG_LEVEL": "ERROR",
}


class RawMooncake:
    """One ``batch_transfer_sync_write``.

    Args:
        host: Under which the other process reaches this engine.
        options: The backend's options.
        regions: Memory to register.
    """

    def __init__(self, host: str, options: Options, regions: Sequence[Region]) -> None:
        for name, value in LIMITS.items():
            os.environ.setdefault(name, value)
        self._host = host
        self._engine: Any
        self._engine, status = Library(options).engine(host, options)
        if status:
            raise OSError(f"Mooncake does not start: it returned {status}")
        for each in regions:
            if self._engine.register_memory(each.address, each.nbytes):
                raise OSError("Mooncake does not register memory")

    def address(self) -> bytes:
        """The engine's session."""
        return f"{self._host}:{self._engine.get_rpc_port()}".encode()

    def connect(self, peer: bytes, source: Rows, target: Rows) -> None:
        """Keep the batch; the library connects by itself."""
        self._batch = peer.decode(), source[:, 0].tolist(), target[:, 0].tolist(), source[:, 1].tolist()

    def move(self) -> float:
        """Move the batch; the call returns when it has arrived."""
        began = time.perf_counter()
        if self._engine.batch_transfer_sync_write(*self._batch):
            raise OSError("Mooncake could not move a batch")
        return time.perf_counter() - began

    def close(self) -> None:
        """Let go of the engine, which ends it."""
        self._engine = None
