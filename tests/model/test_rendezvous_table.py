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


def test_a_table_is_told_in_order_and_in_bounded_pages() -> None:
    registry, now = Registry(10.0), 0.0
    for name, ranks in (("q", 700), ("a", 3), ("p", 700)):
        for rank in reversed(range(ranks)):
            message = wire.Register(sender=f"{name}.{rank}", instance=name, rank=rank, ranks=700, address="tcp://h:1")
            registry.register(message, "", now)
    expected = [("a", rank) for rank in range(3)] + [(name, rank) for name in "pq" for rank in range(700)]
    found: list[tuple[str, int]] = []
    sizes: list[int] = []
    while not sizes or sizes[-1]:
        page = registry.browse(*(found[-1] if found else ("", 0)), now)
        found += [(each.instance, each.rank) for each in page]
        sizes.append(len(page))
    assert sizes == [wire.MAX_LISTED, len(expected) - wire.MAX_LISTED, 0]
    assert found == expected
    registry.leave("a.1")  # a page begins behind a rank that has left
    assert [each.rank for each in registry.browse("a", 1, now)][:2] == [2, 0]
    for rank in (0, 2):
        registry.leave(f"a.{rank}")
    assert registry.browse("", 0, now)[0].instance == "p"
    assert registry.browse("", 0, 11.0) == ()
