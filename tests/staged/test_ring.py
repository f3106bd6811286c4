"""Space in a ring: never lent twice, in the order in which it was asked for, and counted."""

from __future__ import annotations

import random

import pytest

from statelink.errors import RoomError
from statelink.staged._memory import HostMemory
from statelink.staged._ring import Ring


def made(nbytes: int) -> Ring:
    return Ring(HostMemory(nbytes), 0)


def test_space_is_never_lent_twice_and_everybody_is_served() -> None:
    rng = random.Random(5)
    ring = made(10_000)
    lent: dict[int, int] = {}
    order: list[int] = []

    def take(number: int, nbytes: int) -> None:
        def then(at: int) -> None:
            assert at + nbytes <= 10_000
            assert all(at + nbytes <= other or other + size <= at for other, size in lent.items())
            lent[at] = nbytes
            order.append(number)

        ring.ask(number, nbytes, then)

    for number in range(2000):
        take(number, rng.randint(1, 10_000 if number % 50 == 0 else 3000))
        while lent and rng.random() < 0.7:
            at = rng.choice(list(lent))
            del lent[at]
            ring.give(at)
    while lent:
        at = rng.choice(list(lent))
        del lent[at]
        ring.give(at)
    assert order == list(range(2000)), "who asked first is served first"
    assert ring.snapshot() == {"bytes": 10_000, "lent": 0, "quarantined": 0, "waiting": 0}


def test_a_small_one_does_not_get_past_a_large_one() -> None:
    ring = made(4096)
    served: list[str] = []
    held: list[int] = []
    ring.ask("a", 3000, held.append)
    ring.ask("large", 4096, lambda at: served.append("large"))
    ring.ask("small", 100, lambda at: served.append("small"))
    assert served == []
    ring.give(held[0])
    assert served == ["large"]


def test_who_fails_waits_no_more_and_its_space_is_quarantined() -> None:
    ring = made(4096)
    held: list[int] = []
    served: list[str] = []
    ring.ask("dead", 3000, held.append)
    ring.ask("dead", 3000, lambda at: served.append("dead"))
    ring.ask("alive", 1000, lambda at: served.append("alive"))
    ring.drop("dead")
    assert served == ["alive"], "what waited in front of it is gone"
    assert ring.snapshot() == {"bytes": 4096, "lent": 4000, "quarantined": 3000, "waiting": 0}
    ring.ask("next", 3000, lambda at: served.append("next"))
    assert served == ["alive"], "quarantined space is nobody's"
    ring.give(held[0])
    assert served == ["alive", "next"]
    assert ring.snapshot()["quarantined"] == 0


def test_what_can_never_be_had_names_both_sizes() -> None:
    with pytest.raises(RoomError, match="it has 4097 bytes, and the ring 4096") as error:
        made(4096).ask("a", 4097, print)
    assert error.value.code == "room.staging"
