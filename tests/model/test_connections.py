"""Which connections the backend is asked for, by whom, and in which order with what else concerns a peer."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from statelink.errors import TransferError
from statelink.link._connections import Connections
from statelink.link._lanes import Lane
from statelink.link._order import Order

if TYPE_CHECKING:
    from collections.abc import Iterator

SOON = 20.0


class Net:
    """A node's lanes, and a library that notes what it is asked."""

    def __init__(self) -> None:
        order = Order()
        self.movers, self.setup = Lane("test-move", 2, 8, order), Lane("test-setup", 2, 8, order)
        self.calls: list[str] = []
        self.refuses = 0
        self.backend = SimpleNamespace(disconnect=lambda name: self.calls.append(f"disconnect {name}"))

    def connect(self, card: Any) -> None:
        self.calls.append(f"connect {card.link}")
        if self.refuses:
            self.refuses -= 1
            raise TransferError("it cannot be reached")

    def settle(self) -> list[str]:
        """What was asked, once all of it has been."""
        done = threading.Event()
        self.setup.submit(("peer", "b"), done.set)
        assert done.wait(SOON)
        return self.calls


@pytest.fixture
def net() -> Iterator[Net]:
    made = Net()
    yield made
    assert made.movers.close(SOON)
    assert made.setup.close(SOON)


CARD: Any = SimpleNamespace(link="b")


def test_a_disconnect_behind_a_blocked_call_is_not_for_the_next_connection(net: Net) -> None:
    node: Any = net
    connections = Connections(node)
    first = connections.join(CARD)
    connections.make(first)
    go_on = threading.Event()
    net.movers.submit(("peer", "b"), lambda: go_on.wait(SOON))
    connections.leave(first)
    second = connections.join(CARD)
    assert second is not first
    net.setup.submit(("peer", "b"), lambda: connections.make(second))
    go_on.set()
    assert net.settle() == ["connect b", "disconnect b", "connect b"]
    assert second.made
    assert not first.made


def test_one_known_under_two_names_is_connected_once_and_forgotten_after_the_last(net: Net) -> None:
    node: Any = net
    connections = Connections(node)
    one, two = connections.join(CARD), connections.join(CARD)
    assert one is two
    for each in (one, two):
        connections.make(each)
    connections.leave(one)
    assert net.settle() == ["connect b"]
    connections.leave(two)
    assert net.settle() == ["connect b", "disconnect b"]


def test_a_connection_that_failed_for_one_name_is_tried_again_for_the_other(net: Net) -> None:
    node: Any = net
    net.refuses = 1
    connections = Connections(node)
    one, two = connections.join(CARD), connections.join(CARD)
    with pytest.raises(TransferError):
        connections.make(one)
    connections.leave(one)
    connections.make(two)
    assert two.made
    assert net.settle() == ["connect b", "connect b"]
    connections.leave(two)
    assert net.settle()[-1] == "disconnect b"
