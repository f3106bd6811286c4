"""A backend of MoRI in this process, connected with one in another process, and small batches between them.

Under MoRI is either a real network card, or the stand-in of plugins/mori/standin, which holds and breaks its card where
a test asks for it.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tests.helpers.backend_peer import Memory, Peer, move

from statelink.backend import Backend, Batch, Blocks, Region, Transfer

SIZE = 1 << 16
LAYOUT = ((SIZE, SIZE),)


_installed = importlib.util.find_spec("mori")
PACKAGE = Path((_installed and _installed.origin) or "").parent
"""The folder of the real library, if it is installed."""
REAL = _installed is not None
"""Whether it is installed."""
STAND_IN = (PACKAGE / "standin").exists()
"""Whether its network card is a stand-in."""

changes_the_card = pytest.mark.skipif(REAL and not STAND_IN, reason="this changes the network card, and it is real")


class World(NamedTuple):
    """This process and another, connected; and three files that change the card while they exist.

    Attributes:
        backend: The backend of this process.
        memory: Its memory.
        peer: The other process.
        hold: No byte moves.
        broken: What moves fails, and breaks its connection.
        fault: All connections break by themselves.
    """

    backend: Backend
    memory: Memory
    peer: Peer
    hold: Path
    broken: Path
    fault: Path


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


@contextlib.contextmanager
def short_queue() -> Iterator[None]:
    """Connections that are made meanwhile have send queues of four requests, and say soon that they are full."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MORI_IO_QP_MAX_SEND_WR", "4")
        patch.setenv("MORI_IO_SQ_BACKOFF_TIMEOUT_US", "1000")
        yield


def fill(backend: Backend, world: World) -> list[Transfer]:
    """Submit small writes until one fails at once: it is the last of them."""
    transfers = [backend.submit("steady", batch(world))]
    while transfers[-1].outcome is None:
        transfers.append(backend.submit("steady", batch(world)))
    return transfers
