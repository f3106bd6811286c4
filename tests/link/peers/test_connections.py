"""Which connections the backend is asked for, by whom, and in which order with what else concerns a peer."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.links import Rank, hand_over

import statelink
from statelink.errors import TransferError
from statelink.link.peers import Connections
from statelink.link.runtime import KeyedExecutor, KeyOrder
from statelink.tcp import TcpBackend

if TYPE_CHECKING:
    from collections.abc import Iterator

SOON = 20.0


class Net:
    """A link's executors, and a library that notes what it is asked."""

    def __init__(self) -> None:
        order = KeyOrder()
        self.moves, self.setups = KeyedExecutor("test-move", 2, 8, order), KeyedExecutor("test-setup", 2, 8, order)
        self.calls: list[str] = []
        self.refuses = 0
        backend: Any = SimpleNamespace(connect=self._connect, disconnect=self._disconnect)
        workers: Any = self
        self.connections = Connections(backend, workers, contextlib.nullcontext)

    def _disconnect(self, peer: str) -> None:
        self.calls.append(f"disconnect {peer}")

    def _connect(self, peer: str, descriptor: bytes, regions: Any) -> None:
        self.calls.append(f"connect {peer}")
        if self.refuses:
            self.refuses -= 1
            raise TransferError("it cannot be reached")

    def settle(self) -> list[str]:
        """What was asked, once all of it has been."""
        done = threading.Event()
        self.setups.submit_job(("peer", "b"), done.set)
        assert done.wait(SOON)
        return self.calls


@pytest.fixture
def net() -> Iterator[Net]:
    made = Net()
    yield made
    assert made.moves.close(SOON)
    assert made.setups.close(SOON)


PEER: Any = SimpleNamespace(link="b", descriptor=b"", inventory=SimpleNamespace(regions=()), registration=0)


def test_a_disconnect_behind_a_blocked_call_is_not_for_the_next_connection(net: Net) -> None:
    connections = net.connections
    first = connections.join(PEER)
    connections.make(first)
    go_on = threading.Event()
    net.moves.submit_job(("peer", "b"), lambda: go_on.wait(SOON))
    connections.leave(first)
    second = connections.join(PEER)
    assert second is not first
    net.setups.submit_job(("peer", "b"), lambda: connections.make(second))
    go_on.set()
    assert net.settle() == ["connect b", "disconnect b", "connect b"]
    assert second.made
    assert not first.made


def test_one_known_under_two_names_is_connected_once_and_forgotten_after_the_last(net: Net) -> None:
    connections = net.connections
    one, two = connections.join(PEER), connections.join(PEER)
    assert one is two
    for each in (one, two):
        connections.make(each)
    connections.leave(one)
    assert net.settle() == ["connect b"]
    connections.leave(two)
    assert net.settle() == ["connect b", "disconnect b"]


def test_one_that_was_left_before_its_turn_came_is_not_connected(net: Net) -> None:
    """Its peer may be gone, and each try would wait for it."""
    connection = net.connections.join(PEER)
    net.connections.leave(connection)
    net.connections.make(connection)
    assert net.settle() == []


def test_one_that_registered_anew_is_connected_anew_although_the_other_role_does_not_know_it_yet(net: Net) -> None:
    connections = net.connections
    anew: Any = SimpleNamespace(**vars(PEER) | {"registration": 1})
    before, now = connections.join(PEER), connections.join(anew)
    assert now is not before
    for each in (before, now):
        connections.make(each)
    connections.leave(before)
    assert connections.join(anew) is now
    assert net.settle() == ["connect b", "connect b"]
    for _ in range(2):
        connections.leave(now)
    assert net.settle() == ["connect b", "connect b", "disconnect b"]


def test_a_connection_that_failed_for_one_name_is_tried_again_for_the_other(net: Net) -> None:
    net.refuses = 1
    connections = net.connections
    one, two = connections.join(PEER), connections.join(PEER)
    with pytest.raises(TransferError):
        connections.make(one)
    connections.leave(one)
    connections.make(two)
    assert two.made
    assert net.settle() == ["connect b", "connect b"]
    connections.leave(two)
    assert net.settle()[-1] == "disconnect b"


def test_a_link_that_is_closing_is_not_connected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backend takes a while to close. A peer that heard the goodbye must not connect its own backend to it."""
    connected: list[str] = []
    closing, go_on = threading.Event(), threading.Event()
    connect, close = TcpBackend.connect, TcpBackend.close

    def slowly(self: TcpBackend) -> None:
        if not closing.is_set():  # the first link that closes, which is prefill's
            closing.set()
            assert go_on.wait(20)
        close(self)

    def noted(self: TcpBackend, peer: str, *given: Any) -> None:
        connected.append(peer)
        connect(self, peer, *given)

    monkeypatch.setattr(TcpBackend, "connect", noted)
    monkeypatch.setattr(TcpBackend, "close", slowly)
    source, target = Rank("p", 1), Rank("d")
    config = {"role": "prefill", "backend": "tcp", "heartbeat": 0.05, "liveness": 20.0}
    with target.open(config, role="decode") as decode:
        prefill = source.open(config)
        hand_over(prefill, decode, source, target)
        before = len(connected)
        leaving = threading.Thread(target=prefill.close)
        leaving.start()
        assert closing.wait(20)
        waiting = decode.receive(2, prefill.address, 160, {"kv": range(20, 30)}, deadline=0.6)
        assert waiting.wait(20) is statelink.Status.FAILED
        go_on.set()
        leaving.join(20)
    assert connected[before:] == []
