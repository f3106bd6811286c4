"""Backends that leave something behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from statelink.backend import Region

from ._base import Wrong


class LeaksThreads(Wrong):
    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        super().connect(peer, descriptor, regions)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class LeaksFiles(Wrong):
    def close(self) -> None:
        super().close()
        os.dup(0)


class LeaksMemory(Wrong):
    kept: list[bytearray] = []  # noqa: RUF012 - shared on purpose

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        super().connect(peer, descriptor, regions)
        self.kept.append(bytearray(b"x") * (1 << 20))


class LeaksShared(Wrong):
    """Leaves a file of shared memory behind each time it was open."""

    def close(self) -> None:
        super().close()
        left = f"/dev/shm/{os.environ['STATELINK_TEST_LEFT']}-{os.getpid()}-{time.monotonic_ns()}"
        os.close(os.open(left, os.O_CREAT | os.O_RDWR, 0o600))
