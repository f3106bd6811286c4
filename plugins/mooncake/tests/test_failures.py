"""Peers that stop, die or vanish."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from tests.helpers.backend_peer import MIB, Memory, Pair, Peer, blocks, make, move

from statelink.backend import Backend, Batch, Outcome
from statelink_mooncake import MooncakeBackend

HERE = MooncakeBackend.probe(MooncakeBackend.Options())
pytestmark = pytest.mark.skipif(not HERE.ok, reason=f"{HERE.reason}; {HERE.hint}")

LAYOUT = ((64 * MIB,),)
REASON = "Mooncake returned -1 for 63 blocks; it prints why to standard error"


class World(NamedTuple):
    """This process and two others; it is connected to both."""

    backend: Backend
    memory: Memory
    mortal: Peer
    steady: Peer


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "5")  # the least that the library takes
    peers = [Peer(MooncakeBackend, name, LAYOUT) for name in ("mortal", "steady")]
    backend = make(MooncakeBackend, "here")
    memory = Memory(LAYOUT)
    memory.arrays[0][:] = 1
    backend.register(memory.regions)
    for peer in peers:
        peer.ready()
        backend.connect(peer.link, peer.descriptor, peer.regions)
    yield World(backend, memory, *peers)
    backend.close()
    for peer in peers:
        peer.kill()


def serves(world: World, peer: Peer) -> None:
    """The peer gets a small write whole."""
    Pair("here", world.backend, world.memory, peer).works()


def test_peer_stops_during_a_transfer(world: World) -> None:
    """Others are served until the library's timeout ends it, and the peer is once it goes on."""
    world.mortal.stop()
    outcomes: list[Outcome | None] = []
    # What has timed out may still land, also after the next write. So it does not go where that one does.
    batch = Batch(blocks(world.memory, world.mortal.regions)[1:], 1, 1)
    thread = threading.Thread(target=lambda: outcomes.append(world.backend.submit(world.mortal.link, batch).outcome))
    thread.start()
    served = 0
    while thread.is_alive():
        serves(world, world.steady)
        served += 1
        thread.join(0.05)
    assert outcomes == [(False, REASON, False)]
    assert served > 1
    world.mortal.go_on()
    serves(world, world.mortal)


def test_connections_to_a_peer_that_died_are_closed(world: World) -> None:
    """When it is forgotten, or when another is: nothing of the dead is left, and the living are served."""
    before = sockets()
    serves(world, world.steady)
    serves(world, world.mortal)
    for transfer in move(world.backend, world.mortal.link, blocks(world.memory, world.mortal.regions)):
        assert transfer.outcome == (True, "", True)
    assert sockets() > before + 1
    steady = sockets()
    world.backend.disconnect(world.mortal.link)
    assert sockets() == steady, "it may come back"
    world.mortal.kill()
    world.backend.disconnect("somebody else")
    serves(world, world.steady)
    assert sockets() <= before + 1


def sockets() -> int:
    """How many this process has."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # what lists them is among them
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found
