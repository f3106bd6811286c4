"""Memory, peers and batches that the library refuses: what the error says, and that others are served."""

from __future__ import annotations

import importlib
import os
import signal
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from plugins.mori.tests.world import LAYOUT, SIZE, World, batch, changes_the_card, fill, serves, short_queue
from tests.helpers.backend_peer import Peer, finish, make

from statelink.backend import Batch, Blocks, Region, pack_descriptors, unpack_descriptors
from statelink.errors import TransferError
from statelink.testing import bare_machine
from statelink_mori import MoriBackend

if TYPE_CHECKING:
    from pathlib import Path


def test_memory_that_is_not_there(world: World, tmp_path: Path) -> None:
    """RDMA would end the process when the first peer is connected: it is refused before, if a card would pin it."""
    backend, here = make(MoriBackend, "unmapped"), np.zeros(100, np.uint8)
    port = tmp_path / "machine/sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE")
    with (
        bare_machine(tmp_path / "machine"),
        pytest.raises(TransferError, match=r"region 1 could not be registered .*100 bytes of dram at 0x1000: byte 0"),
    ):
        backend.register([Region(here.ctypes.data, 100), Region(4096, 100)])
    backend.register(world.memory.regions)
    backend.connect("steady", world.peer.descriptor, world.peer.regions)
    serves(world._replace(backend=backend))
    backend.close()


@changes_the_card
def test_a_peer_whose_memory_cannot_be_pinned(world: World) -> None:
    """Connecting ends its process, not ours; the error says what it may have been, and others are served."""
    mortal = Peer(MoriBackend, "mortal", LAYOUT).ready()
    os.truncate(mortal.worker.arena.path, SIZE)  # nothing is behind its second region any more
    backend = make(MoriBackend, "fatal")
    backend.register(world.memory.regions)
    with pytest.raises(TransferError, match=r"ReadMessageHeader.*EOF(.|\n)*memory cannot be pinned"):
        backend.connect("mortal", mortal.descriptor, mortal.regions)
    assert mortal.end()[0] == -signal.SIGABRT
    backend.connect("steady", world.peer.descriptor, world.peer.regions)
    serves(world._replace(backend=backend))
    backend.close()


def with_unknown_memory(peer: Peer) -> bytes:
    """A peer's descriptor with a memory that its library does not know, or not any more."""
    head, engine, (first, second) = unpack_descriptors(peer.descriptor, nested=True)
    values = msgspec.msgpack.decode(first or b"")
    values[1] = 77  # the memory's number
    return pack_descriptors([head, engine, [msgspec.msgpack.encode(values), second]])


def test_memory_that_the_peer_does_not_know(world: World) -> None:
    raw = with_unknown_memory(world.peer)
    with pytest.raises(TransferError, match=r"there: .*remote MR size mismatch.*got=0; it has mori "):
        world.backend.connect("steady", raw, world.peer.regions)
    world.backend.connect("steady", world.peer.descriptor, world.peer.regions)
    serves(world)


@changes_the_card
def test_a_request_that_is_larger_than_the_card_takes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The status that the library returns has failed when the call returns."""
    with monkeypatch.context() as patch:
        patch.setenv("MORI_SIM_MAX_MSG", "1000")
        backend = make(MoriBackend, "short")
        backend.register(world.memory.regions)
        backend.connect("steady", world.peer.descriptor, world.peer.regions)
    outcome = backend.submit("steady", batch(world)).outcome
    assert outcome is not None
    assert outcome.reason.startswith("ERR_INVALID_ARGS: merged RDMA WR 0 length 4096 exceeds local max_msg_sz 1000; ")
    assert not outcome.settled
    backend.close()
    serves(world)


@changes_the_card
def test_a_send_queue_that_is_full(world: World) -> None:
    """The caller stands before it for a while, and then the transfer fails."""
    with short_queue():
        backend = make(MoriBackend, "short")
        backend.register(world.memory.regions)
        backend.connect("steady", world.peer.descriptor, world.peer.regions)
    world.hold.touch()
    *posted, refused = fill(backend, world)
    assert refused.outcome is not None
    assert refused.outcome.reason.startswith("ERR_RDMA_OP: SQ full (batch): ep=0 depth=4 requested=1 max=4 Hint: ")
    assert not refused.outcome.settled
    world.hold.unlink()
    assert {finish(backend, each).outcome for each in posted} == {(True, "", True)}
    backend.close()
    serves(world)


def test_a_session_that_cannot_be_made_for_a_part(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing of the batch is posted: what can be refused is, before anything moves."""
    io: Any = importlib.import_module("mori.io")
    good = batch(world).blocks
    # Sessions of a region with its counterpart are there; one with another is made when it is needed.
    far, shift = np.array([0, 0, 1, 1], np.uint32), np.array([0, 0, SIZE, SIZE], np.uint64)
    mixed = Blocks(good.source, good.target + shift, good.nbytes, good.source_region, far)
    with monkeypatch.context() as patch:
        patch.setattr(io.IOEngine, "create_session", lambda engine, near, far: None)
        with pytest.raises(TransferError, match="region 0 here and region 1 there: none of"):
            world.backend.submit("steady", Batch(mixed, 1, 1))
    world.backend.poll([])
    assert not world.peer.arrays[0].any()
    serves(world)


def test_refusals_while_a_batch_is_posted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything was posted they are errors; after that, the transfer fails, and is not settled."""
    io: Any = importlib.import_module("mori.io")
    real, left = io.IOEngineSession.batch_write, 0

    def batch_write(session: Any, *blocks: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("the send queue is full")
        return real(session, *blocks)

    monkeypatch.setattr(io.IOEngineSession, "batch_write", batch_write)
    good = batch(world).blocks
    second = np.array([0, 0, 1, 1], np.uint32)
    shift = np.array([0, 0, SIZE, SIZE], np.uint64)
    mixed = Blocks(good.source + shift, good.target + shift, good.nbytes, second, second)
    with pytest.raises(TransferError, match=r"refused a transfer before it started.*the send queue is full"):
        world.backend.submit("steady", Batch(mixed, 1, 1))
    left = 1
    transfer = world.backend.submit("steady", Batch(mixed, 1, 1))
    assert transfer.outcome == (False, "the send queue is full", False)
    monkeypatch.undo()
    serves(world)
