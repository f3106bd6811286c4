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

        ring.ask(number, nbytes, then, peer=str(number))

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
    ring.ask("a", 3000, held.append, peer="a")
    ring.ask("large", 4096, lambda at: served.append("large"), peer="large")
    ring.ask("small", 100, lambda at: served.append("small"), peer="small")
    assert served == []
    ring.give(held[0])
    assert served == ["large"]


def test_who_fails_waits_no_more_and_its_space_is_quarantined() -> None:
    ring = made(4096)
    held: list[int] = []
    served: list[str] = []
    ring.ask("dead", 3000, held.append, peer="one")
    ring.ask("dead", 3000, lambda at: served.append("dead"), peer="another")
    ring.ask("alive", 1000, lambda at: served.append("alive"), peer="alive")
    ring.drop("dead")
    assert served == ["alive"], "what waited in front of it is gone"
    assert ring.snapshot() == {"bytes": 4096, "lent": 4000, "quarantined": 3000, "waiting": 0}
    ring.ask("next", 3000, lambda at: served.append("next"), peer="next")
    assert served == ["alive"], "quarantined space is nobody's"
    ring.give(held[0])
    assert served == ["alive", "next"]
    assert ring.snapshot()["quarantined"] == 0


def test_no_peer_takes_all_of_it() -> None:
    """Half of what is left, and the next ones get past; what a dead one keeps is shared by nobody."""
    ring = made(8 * 256)
    held: list[tuple[str, int]] = []

    def ask(peer: str, count: int) -> None:
        for _ in range(count):
            ring.ask(peer, 256, lambda at: held.append((peer, at)), peer=peer)

    ask("a", 6)
    assert [peer for peer, _ in held] == ["a"] * 4
    ask("b", 3)
    assert [peer for peer, _ in held] == ["a"] * 4 + ["b"] * 3
    ring.drop("a")
    assert ring.snapshot() == {"bytes": 2048, "lent": 7 * 256, "quarantined": 4 * 256, "waiting": 0}
    ask("c", 2)
    ask("d", 1)
    assert [peer for peer, _ in held[7:]] == ["c"], "there is no more"
    ring.give(held[4][1])
    assert [peer for peer, _ in held[7:]] == ["c", "c"], "in the order in which they asked"
    ring.give(held[5][1])
    assert [peer for peer, _ in held[7:]] == ["c", "c", "d"]


def test_a_peer_may_always_have_one_parcel() -> None:
    ring = made(1000)
    held: list[int] = []
    for _ in range(2):
        ring.ask("a", 1000, held.append, peer="a")
    assert held == [0]
    ring.give(0)
    assert held == [0, 0]


def test_what_can_never_be_had_names_both_sizes() -> None:
    with pytest.raises(RoomError, match="it has 4097 bytes, and the ring 4096") as error:
        made(4096).ask("a", 4097, print, peer="a")
    assert error.value.code == "room.staging"


def test_who_waits_says_for_what() -> None:
    ring = made(4096)
    for owner in ("dead", "next", "next", "last"):
        ring.ask(owner, 2500, lambda at: None, peer=owner)
    standing = "of this side's staging ring (2500 of its 4096 bytes are lent, {} of those are quarantined)"
    assert ring.waits("dead") == ""
    assert ring.waits("next") == f"5000 bytes {standing.format(0)}"
    ring.drop("dead")
    assert ring.waits("last") == f"2500 bytes {standing.format(2500)}"
    ring.give(0)
    assert ring.waits("next").startswith("2500 bytes ")
