"""What the tests of plugins have in common: a backend of this process, one in another, and small moves to there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from tests.helpers.peers import until

from statelink.backend import Backend, BackendContext, Batch, Blocks, Region, Transfer
from statelink_conformance import RemoteBackend

DEADLINE = 30.0
MIB = 1 << 20


class Memory:
    """Regions of this process: those of one inner list lie side by side."""

    def __init__(self, layout: Sequence[Sequence[int]]) -> None:
        self.arrays: list[npt.NDArray[np.uint8]] = []
        for sizes in layout:
            self.arrays += np.split(np.zeros(sum(sizes), np.uint8), np.cumsum(sizes)[:-1])
        self.regions = tuple(Region(array.ctypes.data, len(array)) for array in self.arrays)


def make(backend: type[Backend], link: str, options: dict[str, Any] | None = None) -> Backend:
    """A backend of its own."""
    return backend(BackendContext(options=msgspec.convert(options or {}, backend.Options), link=link))


def finish(backend: Backend, transfer: Transfer) -> Transfer:
    """Poll until the transfer ended."""

    def outcome() -> Any:
        backend.poll([transfer])
        return transfer.outcome

    until(outcome, DEADLINE, "the end of a transfer")
    return transfer


def move(backend: Backend, peer: str, blocks: Blocks) -> list[Transfer]:
    """Move blocks as the core does: cut to the backend's limits."""
    limits = backend.capabilities
    pieces = blocks.pieces(limits.max_blocks, limits.max_bytes)
    return [finish(backend, backend.submit(peer, Batch(piece, 1, 1))) for piece in pieces]


class Peer(RemoteBackend):
    """A backend in another process. It begins to open; `ready` waits until it is.

    Args:
        backend: What it has.
        link: Name of its link.
        layout: See `RemoteBackend`.
        options: Its options.
    """

    def __init__(
        self,
        backend: type[Backend],
        link: str,
        layout: Sequence[Sequence[int]],
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(backend.name, link, layout, options=options)
        self.begin_open()


class Pair(NamedTuple):
    """This process and another."""

    link: str
    backend: Backend
    memory: Memory
    peer: Peer

    def works(self) -> None:
        """The peer gets a small write whole."""
        self.memory.arrays[0][:100] += 1
        (transfer,) = move(self.backend, self.peer.link, blocks(self.memory, self.peer.regions, 100))
        assert transfer.outcome == (True, "", True)
        assert np.array_equal(self.peer.arrays[0][:100], self.memory.arrays[0][:100])


@contextlib.contextmanager
def connected(
    kind: type[Backend],
    name: str,
    options: dict[str, Any],
    layout: Sequence[Sequence[int]] = ((4096,),),
) -> Iterator[Pair]:
    """Both connected to each other, with such regions on each side; the backend here is closed at the end."""
    peer, link = Peer(kind, f"there-{name}", layout, options), f"here-{name}"
    backend, memory = make(kind, link, options), Memory(layout)
    backend.register(memory.regions)
    peer.ready()
    peer.meet(link, backend.descriptor(), memory.regions)
    backend.connect(peer.link, peer.descriptor, peer.regions)
    yield Pair(link, backend, memory, peer)
    backend.close()


def blocks(memory: Memory, regions: tuple[Region, ...], nbytes: int = 64 * MIB) -> Blocks:
    """Blocks from the start of the first region here to that of the first there, of a mebibyte each, or less."""
    size = min(nbytes, MIB)
    offsets = np.arange(0, nbytes, size, dtype=np.uint64)
    zero, sizes = np.zeros(len(offsets), np.uint32), np.full(len(offsets), size, np.uint64)
    return Blocks(offsets + memory.regions[0].address, offsets + regions[0].address, sizes, zero, zero)


def scattered(
    origin: Sequence[Region], goal: Sequence[Region], count: int, nbytes: int, region: int, seed: int = 0
) -> Blocks:
    """Blocks of one region at unaligned places in random order; they do not overlap at the destination."""
    rng = np.random.default_rng(seed)
    room = goal[region].nbytes
    step = room // count
    assert step >= nbytes
    order = rng.permutation(count).astype(np.uint64)
    target = order * np.uint64(step) + rng.integers(0, step - nbytes + 1, count, dtype=np.uint64)
    source = rng.integers(0, room - nbytes + 1, count, dtype=np.uint64)
    begin, end = (np.uint64(side[region].address) for side in (origin, goal))
    regions = np.full(count, region, np.uint32)
    return Blocks(source + begin, target + end, np.full(count, nbytes, np.uint64), regions, regions)
