"""Peers that stop, die or vanish, over TCP, where a stopped peer leaves a transfer in progress."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from tests.helpers.backend_peer import MIB, Memory, Pair, Peer, blocks, finish, make, move

from statelink.backend import Backend, BackendContext, Batch, Side
from statelink.errors import TransferError
from statelink_nixl import NixlBackend, Options

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NIXL is not installed: pip install nixl"
)

LAYOUT = ((64 * MIB,),)
TCP = {"ucx": {"TLS": "tcp"}}


class World(NamedTuple):
    """This process and others, to all of which it is connected."""

    backend: Backend
    memory: Memory
    mortal: Peer
    slow: Peer
    steady: Peer


def everything(world: World, peer: Peer) -> Batch:
    return Batch(blocks(world.memory, peer.regions), 1, 1)


@pytest.fixture(scope="module")
def tcp() -> Iterator[World]:
    peers = [Peer(NixlBackend, name, LAYOUT, TCP) for name in ("mortal", "slow", "steady")]
    backend = make(NixlBackend, "here", TCP)
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


@pytest.fixture
def stopped(tcp: World) -> Iterator[Peer]:
    """The slow peer, stopped; connected before and after."""
    tcp.slow.stop()
    yield tcp.slow
    tcp.slow.go_on()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(TransferError):
            tcp.backend.connect(tcp.slow.link, tcp.slow.descriptor, tcp.slow.regions)
            break
    serves(tcp, tcp.slow)


def serves(world: World, peer: Peer) -> None:
    """The peer gets a small write whole."""
    Pair("here", world.backend, world.memory, peer).works()


def test_peer_dies_during_a_transfer(tcp: World) -> None:
    """Its transfers fail with a reason, others go on, and it is refused until it is connected again."""
    tcp.mortal.stop()
    batch = everything(tcp, tcp.mortal)
    transfers = [tcp.backend.submit(tcp.mortal.link, batch) for _ in range(2)]
    serves(tcp, tcp.steady)
    tcp.backend.poll(transfers)
    assert [transfer.outcome for transfer in transfers] == [None, None]
    tcp.mortal.kill()
    for transfer in transfers:
        finish(tcp.backend, transfer)
        assert transfer.outcome == (False, "NIXL_ERR_REMOTE_DISCONNECT", Side.SOURCE)
    with pytest.raises(TransferError, match=r"the peer is lost .*NIXL_ERR_REMOTE_DISCONNECT"):
        tcp.backend.submit(tcp.mortal.link, batch)
    serves(tcp, tcp.steady)
    with pytest.raises(TransferError, match="cannot be connected over NIXL"):
        tcp.backend.connect(tcp.mortal.link, tcp.mortal.descriptor, tcp.mortal.regions)
    serves(tcp, tcp.steady)


def test_disconnect_does_not_stop_a_transfer(tcp: World, stopped: Peer) -> None:
    """It fails when it ends: until then its bytes may land, and the peer cannot be connected again."""
    stopped.arrays[0][:] = 0
    transfer = tcp.backend.submit(stopped.link, everything(tcp, stopped))
    tcp.backend.disconnect(stopped.link)
    tcp.backend.poll([transfer])
    assert transfer.outcome is None
    with pytest.raises(TransferError, match="transfers of its earlier connection have not ended"):
        tcp.backend.connect(stopped.link, stopped.descriptor, stopped.regions)
    serves(tcp, tcp.steady)
    stopped.go_on()
    reason = "the peer was disconnected while the transfer was in progress"
    assert finish(tcp.backend, transfer).outcome == (False, reason, True)
    assert stopped.arrays[0].all()


def test_connecting_to_a_stopped_peer(tcp: World, stopped: Peer) -> None:
    backend = make(NixlBackend, "hasty", {**TCP, "connect_timeout": 0.2})
    backend.register(tcp.memory.regions)
    with pytest.raises(TransferError, match=r"did not take a first write within 0\.2 s"):
        backend.connect(stopped.link, stopped.descriptor, stopped.regions)
    with pytest.raises(TransferError, match="the peer is not connected"):
        backend.submit(stopped.link, everything(tcp, stopped))
    stopped.go_on()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(TransferError):
            backend.connect(stopped.link, stopped.descriptor, stopped.regions)
            break
    serves(tcp._replace(backend=backend), stopped)
    backend.close()


def connections() -> set[int]:
    """Descriptors of this process's connected sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as copy:
            if copy.family == socket.AF_INET and copy.getpeername():
                found.add(int(name))
    return found


def test_a_decode_rank_connects_to_nobody(tcp: World, stopped: Peer) -> None:
    """It writes nothing, and gets its bytes over the connections of prefill."""
    options = Options(ucx={"TLS": "tcp"}, connect_timeout=0.2)
    decode = NixlBackend(BackendContext(options=options, link="decode", role="decode"))
    memory = Memory(((1000,),))
    decode.register(memory.regions)
    decode.connect(stopped.link, stopped.descriptor, stopped.regions)  # which could answer nothing
    tcp.backend.connect("decode", decode.descriptor(), memory.regions)
    move(tcp.backend, "decode", blocks(tcp.memory, memory.regions, 100))
    assert memory.arrays[0].sum() == tcp.memory.arrays[0][:100].sum() != 0
    with pytest.raises(TransferError, match="NIXL refused a transfer"):
        decode.submit(stopped.link, Batch(blocks(memory, stopped.regions, 100), 1, 1))
    decode.disconnect(stopped.link)
    tcp.backend.disconnect("decode")
    decode.close()


def test_nothing_is_read_over_a_broken_connection(tcp: World, stopped: Peer) -> None:
    """The peer lives, and gets none of the bytes that are written to the source after the transfer failed."""
    before = connections()
    backend = make(NixlBackend, "broken", {**TCP, "connect_timeout": 0})
    backend.register(tcp.memory.regions)
    stopped.go_on()
    backend.connect(stopped.link, stopped.descriptor, stopped.regions)
    move(backend, stopped.link, blocks(tcp.memory, stopped.regions, 100))
    stopped.stop()
    stopped.arrays[0][:] = 0
    transfer = backend.submit(stopped.link, everything(tcp, stopped))
    backend.poll([transfer])
    assert transfer.outcome is None
    for descriptor in connections() - before:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            copy.shutdown(socket.SHUT_RDWR)
    assert finish(backend, transfer).outcome == (False, "NIXL_ERR_REMOTE_DISCONNECT", Side.SOURCE)
    kept = tcp.memory.arrays[0].copy()
    tcp.memory.arrays[0][:] = 255
    stopped.go_on()
    time.sleep(0.5)
    assert 255 not in stopped.arrays[0]
    tcp.memory.arrays[0][:] = kept
    backend.close()


def test_poll_does_not_wait_for_another_thread(tcp: World, stopped: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that copies, say; that one looks for everyone before it leaves."""
    import nixl._api as api

    inside, leave = threading.Event(), threading.Event()
    real = api.nixl_agent.get_agent_metadata

    def slow(agent: Any) -> Any:
        inside.set()
        assert leave.wait(30)
        return real(agent)

    monkeypatch.setattr(api.nixl_agent, "get_agent_metadata", slow)
    transfer = tcp.backend.submit(stopped.link, everything(tcp, stopped))
    with ThreadPoolExecutor(1) as threads:
        busy = threads.submit(tcp.backend.descriptor)
        assert inside.wait(30)
        tcp.backend.poll([transfer])
        assert not busy.done()
        leave.set()
    stopped.go_on()
    deadline = time.monotonic() + 30
    while transfer.outcome is None and time.monotonic() < deadline:
        serves(tcp, tcp.steady)
    assert transfer.outcome == (True, "", True)
