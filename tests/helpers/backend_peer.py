"""What the tests of plugins have in common: a backend of this process, and one in another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from statelink.backend import Backend, BackendContext, Batch, Blocks, Op, Region, Transfer
from statelink.testing import RemoteBackend

__all__ = ["Memory", "Peer", "finish", "make", "move"]

DEADLINE = 30.0


class Memory:
    """Regions of this process: those of one inner list lie side by side."""

    def __init__(self, layout: Sequence[Sequence[int]], kind: str = "dram") -> None:
        self.arrays: list[npt.NDArray[np.uint8]] = []
        for sizes in layout:
            self.arrays += np.split(np.zeros(sum(sizes), np.uint8), np.cumsum(sizes)[:-1])
        self.regions = tuple(Region(array.ctypes.data, len(array), kind) for array in self.arrays)


def make(backend: type[Backend], link: str, options: dict[str, Any] | None = None) -> Backend:
    """A backend of its own."""
    return backend(BackendContext(options=msgspec.convert(options or {}, backend.Options), link=link))


def finish(backend: Backend, transfer: Transfer) -> Transfer:
    """Poll until the transfer ended."""
    deadline = time.monotonic() + DEADLINE
    while transfer.outcome is None:
        backend.poll([transfer])
        assert time.monotonic() < deadline, "the transfer did not end"
        time.sleep(0.0005)
    return transfer


def move(backend: Backend, peer: str, blocks: Blocks, op: Op = Op.WRITE) -> list[Transfer]:
    """Move blocks as the core does: cut to the backend's limits."""
    limits = backend.capabilities
    pieces = blocks.slices(limits.max_blocks, limits.max_bytes)
    return [finish(backend, backend.submit(peer, Batch(op, piece, 1, 1))) for piece in pieces]


class Peer(RemoteBackend):
    """A backend in another process. It begins to open; `ready` waits until it is.

    Args:
        link: Name of its link.
        layout: See `RemoteBackend`.
        options: Its options.
        kind: What its memory is called; it is the host's.

    Attributes:
        backend: What it has; a plugin's own class of peers says so.
    """

    backend: ClassVar[type[Backend]]

    def __init__(
        self, link: str, layout: Sequence[Sequence[int]], options: dict[str, Any] | None = None, kind: str = "dram"
    ) -> None:
        super().__init__(self.backend.name, link, layout, options=options)
        self.regions = tuple(msgspec.structs.replace(each, kind=kind) for each in self.regions)
        self.begin_open()
