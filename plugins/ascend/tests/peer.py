"""Processes with this backend over memory of an NPU, or of the host, that the tests can see.

No test imports MemFabric itself: only these processes have what it needs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from statelink.backend import Backend, Blocks, Outcome, Region
from statelink.errors import StatelinkError
from statelink_conformance import RemoteBackend

MIB = 1 << 20
FAULTS = (NPUS, FAILS_AFTER) = ("STANDIN_NPUS", "STANDIN_FAILS_AFTER")
"""Variables of the stand-in for the driver: how many NPUs there are, and after how many copies all others fail."""


class Peer(RemoteBackend):
    """Another process. It has no backend until it is opened."""

    def __init__(
        self, link: str, sizes: Sequence[int], kind: str, environment: Mapping[str, str], allocator: str
    ) -> None:
        by = "" if kind == "dram" else allocator
        super().__init__("ascend", link, (sizes,), environment=environment, memory=kind, allocator=by)
        self.key = (tuple(sizes), kind)

    def connect_at_once(self, *others: Peer) -> list[tuple[str, float]]:
        """Connect it to several, in threads: what each refusal says, or nothing, and how long it took."""
        orders = [(other.link, other.descriptor, other.regions) for other in others]
        found: list[tuple[str, float]] = self.run(connect_all, orders)
        return found

    def block(self, other: Peer, nbytes: int = 100, region: int = 0, offset: int = 0) -> Blocks:
        """One block from the start of its first region to a place in a region of the other."""
        one, zero = np.ones(1, np.uint64), np.zeros(1, np.uint32)
        start = one * np.uint64(self.regions[0].address)
        goal = one * np.uint64(other.regions[region].address + offset)
        return Blocks(start, goal, one * np.uint64(nbytes), zero, zero + np.uint32(region))

    def serves(self, other: Peer) -> None:
        """A small write arrives whole."""
        self.arrays[0][:100] = np.asarray(self.arrays[0][:100]) + np.uint8(1)
        assert self.move(other, self.block(other)) == [Outcome(True)]
        assert np.array_equal(other.arrays[0][:100], self.arrays[0][:100])

    def clean(self) -> bool:
        """Forget what a test did with it; whether it can be used again."""
        if not self.worker.alive:
            return False
        self.go_on()
        self.forget()
        for name in FAULTS:
            self.setenv(name, "")
        self.memory[:] = 0
        self.descriptor = b""
        return True


def connect_all(backend: Backend, orders: Sequence[tuple[str, bytes, Sequence[Region]]]) -> list[tuple[str, float]]:
    """Runs in the process; see `Peer.connect_at_once`."""

    def connect(order: tuple[str, bytes, Sequence[Region]]) -> tuple[str, float]:
        start, refused = time.monotonic(), ""
        try:
            backend.connect(*order)
        except StatelinkError as error:
            refused = f"{type(error).__name__}: {error}"
        return refused, time.monotonic() - start

    with ThreadPoolExecutor(len(orders)) as threads:
        return list(threads.map(connect, orders))
