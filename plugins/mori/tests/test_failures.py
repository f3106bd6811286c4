"""Peers that stop, die, vanish or were never there, and transfers that are in flight while something happens."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from tests.helpers.backend_peer import Memory, Peer, finish, make, move

from statelink.backend import Backend, Batch, Blocks, Op, Region, pack_descriptors, unpack_descriptors
from statelink.errors import TransferError
from statelink.testing import bare_machine
from statelink_mori import MoriBackend

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("simulated")

SIZE = 1 << 16
LAYOUT = ((SIZE, SIZE),)
OVERLAP: npt.NDArray[np.uint64] = np.arange(4, dtype=np.uint64)
EVERY = 256
"""How many peers go between two lines of the log."""
DEAD = "ERR_RDMA_OP: transport retry counter exceeded Hint: "


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
    return Batch(Op.WRITE, blocks(world.memory, (peer or world.peer).regions), 1, 1)


def serves(world: World, peer: Peer | None = None) -> None:
    """The peer gets a small write whole."""
    peer = peer or world.peer
    world.memory.arrays[0][:4096] += 1
    transfers = move(world.backend, peer.link, batch(world, peer).blocks)
    assert [transfer.outcome for transfer in transfers] == [(True, "", True)]
    assert np.array_equal(peer.arrays[0][:4096], world.memory.arrays[0][:4096])


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MORI_SIM_HOLD", str(folder / "hold"))
        patch.setenv("MORI_SIM_BREAK", str(folder / "broken"))
        patch.setenv("MORI_SIM_TCP", "1")
        yield folder / "hold", folder / "broken"


@pytest.fixture(scope="module")
def steady(machine: tuple[Path, Path]) -> Iterator[Peer]:
    peer = Peer(MoriBackend, "steady", LAYOUT).ready()
    yield peer
    assert peer.end() == (0, "")


@pytest.fixture
def world(machine: tuple[Path, Path], steady: Peer) -> Iterator[World]:
    backend = make(MoriBackend, "here")
    memory = Memory(LAYOUT)
    memory.arrays[0][:] = 1
    steady.arrays[0][:] = 0
    backend.register(memory.regions)
    backend.connect("steady", steady.descriptor, steady.regions)
    yield World(backend, memory, steady, *machine)
    for path in machine:
        path.unlink(missing_ok=True)
    backend.close()


@pytest.fixture
def mortal(world: World) -> Iterator[Peer]:
    """Another peer, connected, that a test may end."""
    peer = Peer(MoriBackend, "mortal", LAYOUT).ready()
    world.backend.connect("mortal", peer.descriptor, peer.regions)
    yield peer
    peer.kill()


def test_done_means_that_the_bytes_are_there(world: World) -> None:
    world.hold.touch()
    transfer = world.backend.submit("steady", batch(world))
    for _ in range(3):
        world.backend.poll([transfer])
    assert transfer.outcome is None
    assert not world.peer.arrays[0].any()
    world.hold.unlink()
    assert finish(world.backend, transfer).outcome == (True, "", True)
    assert world.peer.arrays[0][:4096].all()


def test_a_peer_dies(world: World, mortal: Peer) -> None:
    """Its transfers fail with the library's reason, others go on, and it is refused from then on."""
    world.hold.touch()
    transfers = [world.backend.submit("mortal", batch(world, mortal)) for _ in range(2)]
    mortal.kill()
    world.hold.unlink()
    outcomes = [finish(world.backend, transfer).outcome for transfer in transfers]
    assert [(each.ok, each.settled) for each in outcomes if each] == [(False, False)] * 2
    first, second = [each.reason for each in outcomes if each]
    assert first.startswith(DEAD)
    assert second == "ERR_RDMA_OP: Work Request Flushed Error"
    with pytest.raises(TransferError, match=r"the peer is lost .*transport retry counter exceeded"):
        world.backend.submit("mortal", batch(world, mortal))
    serves(world)
    with pytest.raises(
        TransferError, match=r"cannot be connected over MoRI .*connect\(127\.0\.0\.1:\d+\): Connection refused"
    ):
        world.backend.connect("mortal", mortal.descriptor, mortal.regions)
    serves(world)


def test_a_broken_connection_to_a_living_peer(world: World, mortal: Peer) -> None:
    """The library repairs none, but connecting again makes a new one; several times, and of no one else."""
    for _ in range(2):
        world.broken.touch()
        transfer = finish(world.backend, world.backend.submit("mortal", batch(world, mortal)))
        assert transfer.outcome is not None
        assert transfer.outcome.reason.startswith(DEAD)
        world.broken.unlink()
        with pytest.raises(TransferError, match="the peer is lost"):
            world.backend.submit("mortal", batch(world, mortal))
        world.backend.connect("mortal", mortal.descriptor, mortal.regions)
        serves(world, mortal)
    serves(world)
    world.backend.disconnect("mortal")
    world.backend.connect("mortal", mortal.descriptor, mortal.regions)
    serves(world, mortal)


def test_disconnect_does_not_stop_a_transfer(world: World) -> None:
    """It fails when it ends: until then its bytes may land, and the peer cannot be connected again."""
    world.hold.touch()
    transfer = world.backend.submit("steady", batch(world))
    world.backend.disconnect("steady")
    world.backend.poll([transfer])
    assert transfer.outcome is None
    for call, cause in (
        (lambda: world.backend.connect("steady", world.peer.descriptor, world.peer.regions), "have not ended"),
        (lambda: world.backend.submit("steady", batch(world)), "the peer is not connected"),
    ):
        with pytest.raises(TransferError, match=cause):
            call()
    world.hold.unlink()
    reason = "the peer was disconnected while the transfer was in progress"
    assert finish(world.backend, transfer).outcome == (False, reason, True)
    assert world.peer.arrays[0][:4096].all()
    world.backend.connect("steady", world.peer.descriptor, world.peer.regions)
    serves(world)


def test_close_during_a_transfer(world: World) -> None:
    world.hold.touch()
    transfer = world.backend.submit("steady", batch(world))
    world.backend.close()
    world.backend.close()
    reason = "the backend was closed while the transfer was in progress"
    assert transfer.outcome == (False, reason, False)


def test_a_transfer_that_nobody_holds(world: World) -> None:
    """The library still points at its status; dropping that would end this process."""
    world.hold.touch()
    world.backend.submit("steady", batch(world))
    gc.collect()
    world.hold.unlink()
    serves(world)
    assert world.peer.arrays[0][:4096].all()


def statuses() -> int:
    """How many of the library's statuses there are."""
    gc.collect()
    return sum(type(each).__name__ == "TransferStatus" for each in gc.get_objects())


@contextlib.contextmanager
def a_minute_later() -> Iterator[None]:
    real = time.monotonic
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: real() + 60)
        yield


def test_statuses_outlive_their_end(world: World) -> None:
    """For a while, since the library touches them after the end can be seen, but not for ever."""
    world.backend.poll([])
    before = statuses()
    serves(world)
    assert statuses() == before + 1
    with a_minute_later():
        world.backend.poll([])
    assert statuses() <= before


def test_peers_that_are_not_there(world: World, mortal: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped: no answer in time; ended: nobody listens. Neither harms the others."""
    from mori import _onesided

    monkeypatch.setattr(_onesided, "control_timeout", lambda: 150)  # of MORI_IO_CP_TIMEOUT_MS, read once in a process
    hasty = make(MoriBackend, "hasty")
    hasty.register(world.memory.regions)
    mortal.stop()
    with pytest.raises(
        TransferError, match=r"region 0 here and region 0 there: ReadMessageHeader\(type\) failed .*errno=11"
    ):
        hasty.connect("mortal", mortal.descriptor, mortal.regions)
    with pytest.raises(TransferError, match="the peer is not connected"):
        hasty.submit("mortal", batch(world, mortal))
    serves(world, mortal)  # a connection that was there needs nobody's answer
    mortal.go_on()
    hasty.connect("mortal", mortal.descriptor, mortal.regions)
    serves(world._replace(backend=hasty), mortal)
    mortal.kill()
    late = make(MoriBackend, "late")
    late.register(world.memory.regions)
    with pytest.raises(TransferError, match=r"connect\(127\.0\.0\.1:\d+\): Connection refused"):
        late.connect("mortal", mortal.descriptor, mortal.regions)
    late.close()
    hasty.close()


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


def test_a_peer_whose_memory_cannot_be_pinned(world: World, mortal: Peer) -> None:
    """Connecting ends its process, not ours; the error says what it may have been, and others are served."""
    os.truncate(mortal.worker.arena.path, SIZE)  # nothing is behind its second region any more
    backend = make(MoriBackend, "fatal")
    backend.register(world.memory.regions)
    with pytest.raises(TransferError, match=r"ReadMessageHeader.*EOF(.|\n)*memory cannot be pinned"):
        backend.connect("mortal", mortal.descriptor, mortal.regions)
    assert mortal.end()[0] == -signal.SIGABRT
    backend.connect("steady", world.peer.descriptor, world.peer.regions)
    serves(world._replace(backend=backend))
    backend.close()


def test_pairs_that_no_transport_serves(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"backends": {"XGMI": {}}}
    peer = Peer(MoriBackend, "gpus", LAYOUT, options, "cuda:0").ready()
    backend = make(MoriBackend, "gpu", options)
    backend.register([Region(each.address, each.nbytes, "cuda:0") for each in world.memory.regions])
    monkeypatch.setenv("MORI_SIM_GPUS", "0")
    with pytest.raises(TransferError, match=r"region 0 here and region 0 there: none of \['XGMI'\] can serve them"):
        backend.connect("gpus", peer.descriptor, peer.regions)
    monkeypatch.delenv("MORI_SIM_GPUS")
    backend.connect("gpus", peer.descriptor, peer.regions)
    serves(world._replace(backend=backend), peer)
    peer.kill()  # and one that is not there any more
    transfer = finish(backend, backend.submit("gpus", batch(world, peer)))
    assert transfer.outcome == (False, "ERR_GPU_OP: hipMemcpy: No such process", False)
    backend.connect("gpus", peer.descriptor, peer.regions)  # the library keeps mappings, and says nothing
    transfer = finish(backend, backend.submit("gpus", batch(world, peer)))
    assert transfer.outcome == (False, "ERR_GPU_OP: hipMemcpy: No such process", False)
    backend.close()


def test_peers_of_another_transport(world: World) -> None:
    """Over TCP the library would say nothing before the first transfer, and then something else."""
    backend = make(MoriBackend, "near", {"backends": {"TCP": {}}})
    backend.register(world.memory.regions)
    with pytest.raises(TransferError, match=r"its descriptor is refused: it has RDMA, we have TCP"):
        backend.connect("steady", world.peer.descriptor, world.peer.regions)
    backend.close()


def with_unknown_memory(peer: Peer) -> bytes:
    """A peer's descriptor with a memory that its library does not know, or not any more."""
    head, engine, (first, second) = unpack_descriptors(peer.descriptor, nested=True)
    key, _, *rest = msgspec.msgpack.decode(first or b"")
    return pack_descriptors([head, engine, [msgspec.msgpack.encode([key, 77, *rest]), second]])


def test_memory_that_the_peer_does_not_know(world: World) -> None:
    """RDMA says so when it is connected; TCP when something moves, and in other words for a read."""
    raw = with_unknown_memory(world.peer)
    with pytest.raises(TransferError, match=r"there: .*remote MR size mismatch.*got=0; it has mori "):
        world.backend.connect("steady", raw, world.peer.regions)
    options: dict[str, Any] = {"backends": {"TCP": {}}}
    peer = Peer(MoriBackend, "far", LAYOUT, options).ready()
    backend = make(MoriBackend, "near", options)
    backend.register(world.memory.regions)
    backend.connect("far", with_unknown_memory(peer), peer.regions)
    write = batch(world, peer)
    here, there = write.blocks.source, write.blocks.target
    read = write._replace(op=Op.READ, blocks=dataclasses.replace(write.blocks, source=there, target=here))
    for each, said in (
        (write, "ERR_INVALID_ARGS: TCP: invalid write request"),
        (read, "ERR_NOT_FOUND: TCP: remote mem not found"),
    ):
        assert finish(backend, backend.submit("far", each)).outcome == (False, said, False)
    backend.connect("far", peer.descriptor, peer.regions)
    serves(world._replace(backend=backend), peer)
    backend.close()
    peer.kill()


def test_what_the_library_refuses_of_a_batch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a status that has failed when the call returns, or after the caller stood before a full queue."""
    from mori import _onesided

    monkeypatch.setattr(_onesided, "MAX_MSG", 1000)
    outcome = world.backend.submit("steady", batch(world)).outcome
    said = "ERR_INVALID_ARGS: merged RDMA WR of 4096 bytes exceeds local max_msg_sz 1000"
    assert outcome == (False, said, False)
    monkeypatch.undo()
    serves(world)
    monkeypatch.setenv("MORI_IO_QP_MAX_SEND_WR", "4")
    monkeypatch.setenv("MORI_IO_SQ_BACKOFF_TIMEOUT_US", "1000")
    world.hold.touch()
    first, second = (world.backend.submit("steady", batch(world)) for _ in range(2))
    assert second.outcome is not None
    assert (second.outcome.ok, second.outcome.settled) == (False, False)
    assert second.outcome.reason.startswith("ERR_RDMA_OP: SQ is full Hint: ")
    world.hold.unlink()
    assert finish(world.backend, first).outcome == (True, "", True)
    options = {"backends": {"TCP": {"striping_threshold_bytes": 1024}}}
    peer = Peer(MoriBackend, "far", LAYOUT, options).ready()
    backend = make(MoriBackend, "near", options)
    backend.register(world.memory.regions)
    backend.connect("far", peer.descriptor, peer.regions)
    good = batch(world, peer).blocks
    overlapping = dataclasses.replace(good, target=(good.target - OVERLAP).astype(np.uint64))
    outcome = finish(backend, backend.submit("far", Batch(Op.WRITE, overlapping, 1, 1))).outcome
    assert outcome == (False, "ERR_INVALID_ARGS: TCP: overlapping destination segments cannot be striped", False)
    backend.close()
    peer.kill()


def test_a_status_that_failed_while_it_was_posted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the library has several queue pairs, it uses the status until the others are done: it is never freed."""
    backend = make(MoriBackend, "striped", {"backends": {"RDMA": {"qp_per_transfer": 2}}})
    backend.register(world.memory.regions)
    backend.connect("steady", world.peer.descriptor, world.peer.regions)
    monkeypatch.setenv("MORI_IO_QP_MAX_SEND_WR", "4")
    monkeypatch.setenv("MORI_IO_SQ_BACKOFF_TIMEOUT_US", "1000")
    world.hold.touch()
    before = statuses()
    first, second = (backend.submit("steady", batch(world)) for _ in range(2))
    assert second.outcome is not None
    assert not second.outcome.ok
    with a_minute_later():
        for _ in range(2):  # a status that was dropped would end this process
            backend.poll([first])
            assert statuses() == before + 2
    world.hold.unlink()
    assert finish(backend, first).outcome == (True, "", True)
    backend.close()
    assert statuses() > before


def test_memory_of_several_numa_nodes(world: World, mortal: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair of nodes has a connection of its own: all of them are made in ``connect``, and none in ``submit``."""
    monkeypatch.setenv("MORI_SIM_NUMA_NODES", "2")
    from mori import _onesided

    monkeypatch.setattr(_onesided, "control_timeout", lambda: 150)
    peer = Peer(MoriBackend, "nodes", LAYOUT).ready()
    backend = make(MoriBackend, "numa")
    backend.register(world.memory.regions)
    backend.connect("nodes", peer.descriptor, peer.regions)
    peer.stop()
    good = batch(world, peer).blocks
    for near, far in ((0, 1), (1, 0), (1, 1), (0, 0)):
        here, there = np.full(4, near, np.uint32), np.full(4, far, np.uint32)
        shifts = [np.uint64(number * SIZE) for number in (near, far)]
        blocks = Blocks(good.source + shifts[0], good.target + shifts[1], good.nbytes, here, there)
        transfer = finish(backend, backend.submit("nodes", Batch(Op.WRITE, blocks, 1, 1)))
        assert transfer.outcome == (True, "", True)
    backend.close()
    peer.kill()


def test_connections_that_stay_are_reported(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """RDMA frees no queue pair of a peer that is gone: the log says so, and how many there are."""
    with caplog.at_level(logging.WARNING, "statelink.mori"):
        for count in range(1, 2 * EVERY + 1):
            world.backend.disconnect("steady")
            assert len(caplog.records) == count // EVERY
            world.backend.connect("steady", world.peer.descriptor, world.peer.regions)
    assert caplog.records[-1].getMessage().startswith(f"MoRI keeps the RDMA connections of {2 * EVERY} peers that are")


def test_tcp_peers_with_other_data_connections(world: World) -> None:
    """The library would connect, and lose the connection with each transfer."""
    peer = Peer(MoriBackend, "far", LAYOUT, {"backends": {"TCP": {"num_data_conns": 4}}}).ready()
    backend = make(MoriBackend, "near", {"backends": {"TCP": {}}})
    backend.register(world.memory.regions)
    with pytest.raises(TransferError, match=r"its num_data_conns is b'4', ours is 8: TCP needs equal ones"):
        backend.connect("far", peer.descriptor, peer.regions)
    backend.close()
    peer.kill()


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
            world.backend.submit("steady", Batch(Op.WRITE, mixed, 1, 1))
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
        world.backend.submit("steady", Batch(Op.WRITE, mixed, 1, 1))
    left = 1
    transfer = world.backend.submit("steady", Batch(Op.WRITE, mixed, 1, 1))
    assert transfer.outcome == (False, "the send queue is full", False)
    monkeypatch.undo()
    serves(world)


def test_poll_does_not_wait_for_another_thread(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the library; that one looks for everyone before it leaves."""
    io: Any = importlib.import_module("mori.io")
    inside, leave = threading.Event(), threading.Event()
    real = io.EngineDesc.pack

    def slow(desc: Any) -> Any:
        inside.set()
        assert leave.wait(30)
        return real(desc)

    monkeypatch.setattr(io.EngineDesc, "pack", slow)
    transfer = world.backend.submit("steady", batch(world))
    with ThreadPoolExecutor(1) as threads:
        busy = threads.submit(world.backend.descriptor)
        assert inside.wait(30)
        world.backend.poll([transfer])
        assert not busy.done()
        leave.set()
    finish(world.backend, transfer)


def test_threads(world: World, mortal: Peer) -> None:
    """Each peer has a thread of its own, and one more polls."""
    errors: list[BaseException] = []

    def work(peer: Peer) -> None:
        try:
            for _ in range(30):
                for transfer in move(world.backend, peer.link, batch(world, peer).blocks):
                    assert transfer.outcome == (True, "", True)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(peer,)) for peer in (world.peer, mortal)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        world.backend.poll([])
    assert not errors
    for peer in (world.peer, mortal):
        assert np.array_equal(peer.arrays[0][:4096], world.memory.arrays[0][:4096])


def test_tcp_peers_that_stop_and_die(world: World) -> None:
    """Over TCP an operation times out; the next one connects by itself, and the peer is not lost."""
    options = {"backends": {"TCP": {"op_timeout_ms": 2000}}}
    peer = Peer(MoriBackend, "far", LAYOUT, options).ready()
    backend = make(MoriBackend, "near", options)
    backend.register(world.memory.regions)
    backend.connect("far", peer.descriptor, peer.regions)
    there = world._replace(backend=backend)
    serves(there, peer)
    peer.stop()
    # What has timed out may still land, also after the next operation. So it does not go where that one does.
    late = Batch(Op.WRITE, blocks(world.memory, peer.regions, at=SIZE // 2), 1, 1)
    transfer = finish(backend, backend.submit("far", late))
    assert transfer.outcome == (False, "ERR_BAD_STATE: TCP: operation timeout", False)
    peer.go_on()
    serves(there, peer)
    peer.kill()
    transfer = finish(backend, backend.submit("far", batch(world, peer)))
    assert transfer.outcome == (False, "ERR_BAD_STATE: TCP: connection lost", False)
    backend.close()
