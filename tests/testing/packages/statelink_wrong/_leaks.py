"""Backends that leave something behind."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._base import Wrong

if TYPE_CHECKING:
    from statelink.backend import BackendContext, Batch, Region, Transfer

U64 = Any
KEPT: list[object] = []


class LeaksThreads(Wrong):
    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        super().connect(peer, descriptor, regions)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class LeaksFiles(Wrong):
    def close(self) -> None:
        super().close()
        os.dup(0)


class LeaksWhenConnectedAgain(Wrong):
    """Keeps a thread of each connection that a new one replaces."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.known: set[str] = set()

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        again = peer in self.known
        super().connect(peer, descriptor, regions)  # which disconnects the peer, if it is connected
        self.known.add(peer)
        if again:
            threading.Thread(target=threading.Event().wait, daemon=True).start()

    def disconnect(self, peer: str) -> None:
        super().disconnect(peer)
        self.known.discard(peer)


class ServesOn(Wrong):
    """Serves its peers on after its `close`."""

    def close(self) -> None:
        pass


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


class KeepsPayload(Wrong):
    """Copies the bytes of each batch, and frees no copy."""

    def submit(self, peer: str, batch: Batch) -> Transfer:
        made = super().submit(peer, batch)
        copy = mmap.mmap(-1, batch.blocks.total)
        copy.write(b"x" * batch.blocks.total)
        KEPT.append(copy)
        return made


class KeepsTransfers(Wrong):
    def submit(self, peer: str, batch: Batch) -> Transfer:
        made = super().submit(peer, batch)
        KEPT.append(made)
        return made


class KeepsRooms(Wrong):
    """Keeps a line about each grant, on the side of the target."""

    def grant(self, peer: str, room: int, generation: int, addresses: U64, nbytes: U64) -> None:
        super().grant(peer, room, generation, addresses, nbytes)
        KEPT.append((peer, room, generation, addresses.copy(), nbytes.copy()))
