"""A backend of MoRI in this process, connected with one in another process, and small batches between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tests.helpers.backend_peer import Memory, Peer, move

from statelink.backend import Backend, Batch, Blocks, Region

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 1 << 16
LAYOUT = ((SIZE, SIZE),)


class World(NamedTuple):
    """This process and another, connected; and two files that change the machine while they exist."""

    backend: Backend
    memory: Memory
    peer: Peer
    hold: Path
    broken: Path


def blocks(memory: Memory, regions: tuple[Region, ...], count: int = 4, at: int = 0) -> Blocks:
    """Blocks of 1 KiB from that offset on, in the first region on both sides."""
    offsets = np.arange(at, at + 1024 * count, 1024, dtype=np.uint64)
    zero, sizes = np.zeros(count, np.uint32), np.full(count, 1024, np.uint64)
    return Blocks(offsets + memory.regions[0].address, offsets + regions[0].address, sizes, zero, zero)


def batch(world: World, peer: Peer | None = None) -> Batch:
    return Batch(blocks(world.memory, (peer or world.peer).regions), 1, 1)


def serves(world: World, peer: Peer | None = None) -> None:
    """The peer gets a small write whole."""
    peer = peer or world.peer
    world.memory.arrays[0][:4096] += 1
    transfers = move(world.backend, peer.link, batch(world, peer).blocks)
    assert [transfer.outcome for transfer in transfers] == [(True, "", True)]
    assert np.array_equal(peer.arrays[0][:4096], world.memory.arrays[0][:4096])
