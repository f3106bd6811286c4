"""Peers that stop, die, vanish or were never there, and transfers that are in flight while something happens."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from plugins.mori.tests.world import World, batch, changes_the_card, fill, serves, short_queue
from tests.helpers.backend_peer import Peer, finish, make
from tests.helpers.peers import until

from statelink.backend import Batch
from statelink.errors import TransferError
from statelink_mori import MoriBackend

pytestmark = changes_the_card

EVERY = 256
"""How many peers go between two lines of the log."""
DEAD = "ERR_RDMA_OP: transport retry counter exceeded Hint: "


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


@pytest.fixture
def statuses(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many of the library's statuses are kept of those that tests got through `batch_write`.

    The library has raw pointers to them. With one that was freed in flight, every later transfer waits for ever.
    """
    io: Any = importlib.import_module("mori.io")
    real, found = io.IOEngineSession.batch_write, list[weakref.ref[Any]]()

    def batch_write(session: Any, *blocks: Any) -> Any:
        status = real(session, *blocks)
        found.append(weakref.ref(status))
        return status

    def count() -> int:
        gc.collect()
        return sum(each() is not None for each in found)

    monkeypatch.setattr(io.IOEngineSession, "batch_write", batch_write)
    return count


def test_a_transfer_that_nobody_holds(world: World, statuses: Callable[[], int]) -> None:
    world.hold.touch()
    world.backend.submit("steady", batch(world))
    assert statuses() == 1
    world.hold.unlink()
    serves(world)
    assert world.peer.arrays[0][:4096].all()


def test_a_status_outlives_a_backend_that_is_closed(world: World, statuses: Callable[[], int]) -> None:
    """Its transfer was in flight, and the library's threads end after the engine is told to."""
    world.hold.touch()
    world.backend.submit("steady", batch(world))
    world.backend.close()
    assert statuses() == 1


@contextlib.contextmanager
def a_minute_later() -> Iterator[None]:
    real = time.monotonic
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: real() + 60)
        yield


def test_statuses_outlive_their_end(world: World, statuses: Callable[[], int]) -> None:
    """For a while, since the library touches them after the end can be seen, but not for ever."""
    serves(world)
    assert statuses() == 1
    with a_minute_later():
        world.backend.poll([])
    assert statuses() == 0


def test_a_status_that_failed_is_kept(world: World, mortal: Peer, statuses: Callable[[], int]) -> None:
    world.broken.touch()
    transfer = finish(world.backend, world.backend.submit("mortal", batch(world, mortal)))
    assert transfer.outcome is not None
    assert not transfer.outcome.ok
    with a_minute_later():
        world.backend.poll([])
    world.backend.disconnect("mortal")
    assert statuses() == 1


def test_peers_that_are_not_there(world: World, mortal: Peer) -> None:
    """Stopped: no answer within five seconds; ended: nobody listens. Neither harms the others."""
    hasty = make(MoriBackend, "hasty")
    hasty.register(world.memory.regions)
    mortal.stop()
    with pytest.raises(
        TransferError, match=r"region 0 here and region 0 there: ReadMessageHeader\(type\) failed: .*errno=11"
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


def test_a_status_that_failed_while_it_was_posted(world: World, statuses: Callable[[], int]) -> None:
    """Where the library has several queue pairs, it uses the status until the others are done: it is never freed."""
    with short_queue():
        backend = make(MoriBackend, "striped", {"backends": {"RDMA": {"qp_per_transfer": 2}}})
        backend.register(world.memory.regions)
        backend.connect("steady", world.peer.descriptor, world.peer.regions)
    world.hold.touch()
    *posted, refused = fill(backend, world)
    with a_minute_later():
        for _ in range(2):
            backend.poll(posted)
            assert statuses() == len(posted) + 1
    world.hold.unlink()
    assert {finish(backend, each).outcome for each in posted} == {(True, "", True)}
    assert refused.outcome is not None
    assert not refused.outcome.settled
    backend.close()
    assert statuses() > 0


def test_a_connection_that_breaks_without_a_transfer(world: World) -> None:
    """The card says so, and the library since 1.2.4: the peer is lost before anything is sent to it."""
    if not hasattr(importlib.import_module("mori.io").IOEngine, "pop_peer_failure"):
        pytest.skip("this MoRI does not tell of connections that broke")
    nothing = Batch(batch(world).blocks[:0], 1, 1)  # it is refused for what it is, until the peer is lost
    world.fault.touch()

    def lost() -> bool:
        with pytest.raises(TransferError) as caught:
            world.backend.submit("steady", nothing)
        return "the peer is lost" in str(caught.value) and "LOCAL_QP_ERROR: IBV_EVENT_QP_FATAL" in str(caught.value)

    until(lost, 30, "the loss of the peer")
    world.fault.unlink()
    world.backend.connect("steady", world.peer.descriptor, world.peer.regions)
    serves(world)


def test_a_port_that_goes_down_is_reported(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library names no peer then, and connections may outlive it."""
    reason, detail = SimpleNamespace(name="LOCAL_PORT_DOWN"), "IBV_EVENT_PORT_ERR on device mlx5_0"
    told = [SimpleNamespace(reason=reason, remote_engine_key="", detail=detail)]
    engine: Any = importlib.import_module("mori.io").IOEngine
    monkeypatch.setattr(engine, "pop_peer_failure", lambda _: told.pop() if told else None, raising=False)
    with caplog.at_level(logging.WARNING, "statelink.mori"):
        world.backend.poll([])
    said = f"MoRI reports: LOCAL_PORT_DOWN: {detail} (link here)"
    assert [record.getMessage() for record in caplog.records] == [said]
    serves(world)


def test_connections_that_stay_are_reported(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """RDMA frees no queue pair of a peer that is gone: the log says so, and how many there are."""
    with caplog.at_level(logging.WARNING, "statelink.mori"):
        for count in range(1, 2 * EVERY + 1):
            world.backend.disconnect("steady")
            assert len(caplog.records) == count // EVERY
            world.backend.connect("steady", world.peer.descriptor, world.peer.regions)
    assert caplog.records[-1].getMessage().startswith(f"MoRI keeps the RDMA connections of {2 * EVERY} peers that are")
