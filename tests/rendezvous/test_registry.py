"""The server's table: when an instance is there, whose word counts, and what is refused."""

from __future__ import annotations

import msgspec
import pytest

from statelink import wire
from statelink.errors import PeerError, WireError
from statelink.rendezvous._registry import Registry

LIFETIME = 10.0
KEY = "k" * 40


def rank(number: int, ranks: int = 2, *, link: str = "", instance: str = "p", key: str = "") -> wire.Register:
    address = f"tcp://10.0.0.{number}:7000{'|' + key if key else ''}"
    return wire.Register(
        sender=link or f"{instance}.{number}", instance=instance, rank=number, ranks=ranks, address=address
    )


def found(registry: Registry, now: float = 0.0, instance: str = "p") -> list[str]:
    """Last number of each address."""
    return [address.rpartition(".")[2].partition(":")[0] for address in registry.resolve(instance, now)[0]]


def refused(registry: Registry, message: wire.Register, code: str, *, now: float = 0.0, key: str = "") -> str:
    before = registry.snapshot(), registry.resolve(message.instance, now)
    with pytest.raises(PeerError) as caught:
        registry.register(message, key, now)
    assert caught.value.code == f"rendezvous.{code}"
    assert (registry.snapshot(), registry.resolve(message.instance, now)) == before
    return str(caught.value)


def test_an_instance_is_there_when_every_distinct_rank_is() -> None:
    registry = Registry(LIFETIME)
    assert registry.resolve("p", 0) == ((), 0, 0)
    registry.register(rank(2, 3), "", 0)
    registry.register(rank(0, 3), "", 0)
    for again in range(5):  # the same rank again and again is still one rank
        registry.register(rank(0, 3, link=f"incarnation {again}"), "", 0)
    assert registry.resolve("p", 0) == ((), 2, 3)
    registry.register(rank(1, 3), "", 0)
    assert found(registry) == ["0", "1", "2"]
    assert registry.snapshot() == {"p": "3 of 3"}
    registry.leave("p.1")
    assert registry.resolve("p", 0) == ((), 2, 3)


def test_ranks_expire_unless_they_speak() -> None:
    registry = Registry(LIFETIME)
    registry.register(rank(0), "", 0)
    registry.register(rank(1), "", 5)
    registry.register(rank(0), "", 9)
    assert found(registry, 14.9) == ["0", "1"]
    assert registry.resolve("p", 15.0) == ((), 1, 2)
    registry.expire(19.0)
    assert registry.snapshot() == {}
    assert registry._places == {}


def test_a_later_process_takes_the_place_and_keeps_it() -> None:
    registry = Registry(LIFETIME)
    registry.register(rank(0, 1, link="old"), "", 0)
    newer = wire.Register(sender="new", instance="p", rank=0, ranks=1, address="tcp://10.0.0.9:7000")
    registry.register(newer, "", 1)
    assert found(registry, 1) == ["9"]
    assert "new has taken its place" in refused(registry, rank(0, 1, link="old"), "replaced", now=2)
    registry.leave("old")  # its goodbye comes late, and is not about the other
    assert found(registry, 2) == ["9"]
    registry.register(rank(0, 1, link="old"), "", 11.0)  # the later one has expired
    assert found(registry, 11) == ["0"]


def test_what_is_remembered_of_those_replaced_is_bounded() -> None:
    registry = Registry(LIFETIME)
    for number in range(1000):
        registry.register(rank(0, 1, link=f"link {number}"), "", 0)
    assert len(registry._instances["p"][0].former) == 8
    assert len(registry._places) == 1


def test_ranks_must_agree_on_their_number() -> None:
    registry = Registry(LIFETIME)
    registry.register(rank(0, 2), "", 0)
    registry.register(rank(1, 2), "", 5)
    text = refused(registry, rank(2, 4, link="x"), "ranks", now=6)
    assert "there are 4 ranks, rank 0 that there are 2" in text
    registry.register(rank(0, 4, link="y"), "", 16)  # the earlier deployment has expired
    assert registry.resolve("p", 16) == ((), 1, 4)
    registry.register(rank(0, 1, link="z"), "", 16)  # alone, a rank may come back as another number
    assert found(registry, 16) == ["0"]


def test_a_process_has_one_place() -> None:
    registry = Registry(LIFETIME)
    registry.register(rank(0, 1, link="x"), "", 0)
    registry.register(rank(0, 1, link="x", instance="q"), "", 0)
    assert registry.snapshot() == {"q": "1 of 1"}


def test_the_table_is_bounded() -> None:
    registry = Registry(LIFETIME, limit=3)
    for number in range(3):
        registry.register(rank(number, 5), "", 0)
    assert "3 ranks already" in refused(registry, rank(3, 5), "full")
    registry.register(rank(0, 5, link="instead"), "", 0)
    registry.register(rank(1, 5), "", 1)
    registry.register(rank(3, 5), "", LIFETIME)  # two of them have expired
    assert registry.resolve("p", LIFETIME) == ((), 2, 5)


def test_only_the_own_key_can_be_registered() -> None:
    registry = Registry(LIFETIME)
    registry.register(rank(0, key=KEY), KEY, 0)
    for message, key in ((rank(1, key=KEY), "o" * 40), (rank(1, key=KEY), ""), (rank(1), KEY)):
        assert "not the one that it holds" in refused(registry, message, "key", key=key)
    refused(registry, wire.Register(sender="x", instance="p", rank=1, ranks=2, address="nowhere"), "address")


@pytest.mark.parametrize("numbers", [(2, 2), (-1, 2), (0, 0), (0, 5000), (4096, 4096), (True, 2), (1.0, 2)])
def test_numbers_that_are_no_ranks(numbers: tuple[int, int]) -> None:
    tree = {"sender": "x", "instance": "p", "rank": numbers[0], "ranks": numbers[1], "address": ""}
    with pytest.raises(WireError) as caught:
        wire.decode([b"register", msgspec.msgpack.encode(tree)], wire.RENDEZVOUS_KINDS)
    assert caught.value.code == "wire.body"
