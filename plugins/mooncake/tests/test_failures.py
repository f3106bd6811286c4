"""Peers that stop, die or vanish."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from tests.helpers.backend_peer import MIB, Memory, Pair, Peer, blocks, finish, make, move, scattered

from statelink.backend import Backend, Batch
from statelink_mooncake import MooncakeBackend

HERE = MooncakeBackend.probe(MooncakeBackend.Options())
pytestmark = pytest.mark.skipif(not HERE.ok, reason=f"{HERE.reason}; {HERE.hint}")

LAYOUT = ((64 * MIB,),)
SMALL = 16 << 10
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
    # What has timed out may still land, also after the next write. So it does not go where that one does.
    transfer = world.backend.submit(world.mortal.link, Batch(blocks(world.memory, world.mortal.regions)[1:], 1, 1))
    served = 0
    while transfer.outcome is None:
        serves(world, world.steady)
        served += 1
        time.sleep(0.05)
        world.backend.poll([transfer])
    assert transfer.outcome == (False, REASON, False)
    assert served > 1
    world.mortal.go_on()
    serves(world, world.mortal)


def test_a_stopped_peer_keeps_no_core_busy(world: World) -> None:
    """Neither a thread of the library nor the caller computes while it waits."""
    world.mortal.stop()
    transfer = world.backend.submit(world.mortal.link, Batch(blocks(world.memory, world.mortal.regions), 1, 1))
    waited, computed = time.monotonic(), time.process_time()
    while transfer.outcome is None:
        time.sleep(0.01)
        world.backend.poll([transfer])
    waited, computed = time.monotonic() - waited, time.process_time() - computed
    assert transfer.outcome.ok is False
    assert computed < waited / 4


def test_no_batch_waits_while_a_session_is_opened(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a peer stops in its first contact, the library holds a lock of the engine: batches are kept until then."""
    from mooncake import engine as library

    late = Peer(MooncakeBackend, "late", LAYOUT)
    late.ready()
    real = library.TransferEngine.batch_transfer_sync_write
    began = threading.Event()

    def stop_first(engine: object, session: str, *columns: list[int]) -> int:
        late.stop()
        began.set()
        status: int = real(engine, session, *columns)
        return status

    monkeypatch.setattr(library.TransferEngine, "batch_transfer_sync_write", stop_first)
    thread = threading.Thread(target=world.backend.connect, args=(late.link, late.descriptor, late.regions))
    thread.start()
    try:
        began.wait()
        world.memory.arrays[0][:] = 7
        transfer = world.backend.submit(world.steady.link, Batch(blocks(world.memory, world.steady.regions), 1, 1))
        world.backend.poll([transfer])
        assert transfer.outcome is None
        assert world.steady.arrays[0][0] != 7
    finally:
        late.go_on()
        thread.join()
    assert finish(world.backend, transfer).outcome == (True, "", True)
    assert (world.steady.arrays[0] == 7).all()
    late.kill()


def test_batches_to_one_peer_wait_for_each_other(world: World) -> None:
    """Together they have more blocks than the library takes: each is kept until those before it have ended."""
    many = scattered(world.memory.regions, world.mortal.regions, 3000, SMALL, 0)
    world.mortal.stop()
    transfers = [world.backend.submit(world.mortal.link, Batch(many[at : at + 1000], 1, 1)) for at in (0, 1000, 2000)]
    world.backend.poll(transfers)
    assert [each.outcome for each in transfers] == [None] * 3
    world.mortal.go_on()
    assert [finish(world.backend, each).outcome for each in transfers] == [(True, "", True)] * 3
    assert np.count_nonzero(world.mortal.arrays[0] == 1) == 3000 * SMALL


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
