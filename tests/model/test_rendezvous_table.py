"""The rendezvous server's table is bounded, whatever is said to it."""

from __future__ import annotations

import pytest

from statelink import wire
from statelink.errors import PeerError
from statelink.rendezvous._registry import Registry

LIFETIME = 10.0


def rank(number: int, ranks: int, link: str = "") -> wire.Register:
    address = f"tcp://10.0.0.{number}:7000"
    return wire.Register(sender=link or f"p.{number}", instance="p", rank=number, ranks=ranks, address=address)


def test_what_is_remembered_of_those_replaced_is_bounded() -> None:
    registry = Registry(LIFETIME)
    for number in range(1000):
        registry.register(rank(0, 1, f"link {number}"), "", 0)
    assert len(registry._instances["p"][0].former) == 8
    assert len(registry._places) == 1
    registry.expire(LIFETIME)
    assert registry._places == {}


def test_the_table_is_bounded() -> None:
    registry = Registry(LIFETIME, limit=3)
    for number in range(3):
        registry.register(rank(number, 5), "", 0)
    before = registry.snapshot()
    with pytest.raises(PeerError, match="3 ranks already") as caught:
        registry.register(rank(3, 5), "", 0)
    assert caught.value.code == "rendezvous.full"
    assert registry.snapshot() == before
    registry.register(rank(0, 5, "instead"), "", 0)
    registry.register(rank(1, 5), "", 1)
    registry.register(rank(3, 5), "", LIFETIME)  # two of them have expired
    assert registry.resolve("p", LIFETIME) == ((), 2, 5)
