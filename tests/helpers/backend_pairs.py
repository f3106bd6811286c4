"""A backend here that is connected to one in another process, and small moves from here to there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from tests.helpers.backend_peer import Memory, Peer, move

from statelink.backend import Backend, Blocks, Region

__all__ = ["MIB", "Pair", "blocks", "connected", "scattered", "serves"]

MIB = 1 << 20


class Pair(NamedTuple):
    """This process and another."""

    link: str
    backend: Backend
    memory: Memory
    peer: Peer

    def works(self) -> None:
        """See `serves`."""
        serves(self.backend, self.memory, self.peer)


@contextlib.contextmanager
def connected(
    make: Callable[[str, dict[str, Any]], Backend], kind: type[Peer], name: str, options: dict[str, Any]
) -> Iterator[Pair]:
    """Both connected to each other, with a region of 4 KiB each; the one here is closed at the end."""
    layout = ((4096,),)
    peer, link = kind(f"there-{name}", layout, options), f"here-{name}"
    backend, memory = make(link, options), Memory(layout)
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


def serves(backend: Backend, memory: Memory, peer: Peer) -> None:
    """The peer gets a small write whole."""
    memory.arrays[0][:100] += 1
    (transfer,) = move(backend, peer.link, blocks(memory, peer.regions, 100))
    assert transfer.outcome == (True, "", True)
    assert np.array_equal(peer.arrays[0][:100], memory.arrays[0][:100])


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
