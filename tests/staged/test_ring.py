"""Space in a ring: never lent twice, in the order in which it was asked for, and counted."""

from __future__ import annotations

import random

import pytest
from tests.staged.scene import Context, Scene, ask, raw

from statelink.errors import RoomError


class Room:
    """What one room asks for, from one writer."""

    def __init__(self, ring: Scene, peer: str) -> None:
        self.context = Context(ring.expected, peer)
        self.hook = ring.receiver(self.context)
        self._asked = 0

    def ask(self, nbytes: int) -> Room:
        self.hook.message(self.context, raw(ask(self._asked, nbytes)))
        self._asked += 1
        return self

    @property
    def lent(self) -> int:
        """Parcels that it has space for."""
        return len(self.context.lent)

    def fail(self) -> None:
        """It fails; what it holds may still be written to."""
        self.hook.abort(self.context)

    def give(self) -> None:
        """It gives back all that it holds."""
        self.hook.released(self.context)


def asks(ring: Scene, peer: str, *sizes: int) -> Room:
    room = Room(ring, peer)
    for nbytes in sizes:
        room.ask(nbytes)
    return room


def test_space_is_never_lent_twice_and_everybody_is_served() -> None:
    rng = random.Random(5)
    ring = Scene(10_000)
    lent: dict[int, tuple[int, Room]] = {}
    order: list[int] = []

    def take(number: int, nbytes: int) -> None:
        room = Room(ring, str(number))

        def told() -> None:
            ((address, size),) = room.context.lent
            at = address - ring.ring.address
            assert 0 <= at <= at + size <= 10_000
            assert all(at + nbytes <= other or other + held[0] <= at for other, held in lent.items())
            lent[at] = nbytes, room
            order.append(number)

        room.context.told = told
        room.ask(nbytes)

    for number in range(2000):
        take(number, rng.randint(1, 10_000 if number % 50 == 0 else 3000))
        while lent and rng.random() < 0.7:
            lent.pop(rng.choice(list(lent)))[1].give()
    while lent:
        lent.pop(rng.choice(list(lent)))[1].give()
    assert order == list(range(2000)), "who asked first is served first"
    assert ring.staged.snapshot() == {"bytes": 10_000, "in_use": 0, "quarantined": 0, "waiting": 0}


def test_a_small_one_does_not_get_past_a_large_one() -> None:
    ring = Scene(4096)
    first = asks(ring, "a", 3000)
    large, small = asks(ring, "large", 4096), asks(ring, "small", 100)
    assert (large.lent, small.lent) == (0, 0)
    first.give()
    assert (large.lent, small.lent) == (1, 0)


def test_who_fails_waits_no_more_and_its_space_is_quarantined() -> None:
    ring = Scene(4096)
    dead = asks(ring, "one", 3000, 3000)
    alive = asks(ring, "alive", 1000)
    assert (dead.lent, alive.lent) == (1, 1)
    behind = asks(ring, "behind", 3000)
    dead.fail()
    assert ring.space() == {"in_use": 4000, "quarantined": 3000, "waiting": 1}
    assert (dead.lent, behind.lent) == (1, 0), "quarantined space is nobody's"
    dead.give()
    assert (dead.lent, behind.lent) == (1, 1)
    assert ring.space()["quarantined"] == 0


def test_what_waits_for_a_room_that_failed_is_in_nobodys_way() -> None:
    ring = Scene(4096)
    first = asks(ring, "first", 3000)
    dead, alive = asks(ring, "dead", 3000), asks(ring, "alive", 1000)
    assert (first.lent, dead.lent, alive.lent) == (1, 0, 0)
    dead.fail()
    assert alive.lent == 1


def test_no_peer_takes_all_of_it() -> None:
    """Half of what is left, and the next ones get past; what a dead one keeps is shared by nobody."""
    ring = Scene(8 * 256)
    a = asks(ring, "a", *[256] * 6)
    assert a.lent == 4
    b = [asks(ring, "b", 256) for _ in range(3)]
    assert [each.lent for each in b] == [1, 1, 1]
    a.fail()
    assert ring.space() == {"in_use": 7 * 256, "quarantined": 4 * 256, "waiting": 0}
    c, d = asks(ring, "c", 256, 256), asks(ring, "d", 256)
    assert (c.lent, d.lent) == (1, 0), "there is no more"
    b[0].give()
    assert (c.lent, d.lent) == (2, 0), "in the order in which they asked"
    b[1].give()
    assert (c.lent, d.lent) == (2, 1)


def test_a_peer_may_always_have_one_parcel() -> None:
    ring = Scene(1000)
    first, second = asks(ring, "a", 1000), asks(ring, "a", 1000)
    assert (first.lent, second.lent) == (1, 0)
    first.give()
    assert second.lent == 1


def test_what_can_never_be_had_names_both_sizes() -> None:
    with pytest.raises(RoomError, match="it has 4097 bytes, and the ring 4096") as error:
        asks(Scene(4096), "a", 4097)
    assert error.value.code == "room.staging"


def test_who_waits_says_for_what() -> None:
    ring = Scene(4096)
    dead, following, last = asks(ring, "x", 2500), asks(ring, "y", 2500, 2500), asks(ring, "z", 2500)
    standing = "of this side's staging ring (2500 of its 4096 bytes are in use, {} of those are quarantined)"
    assert dead.hook.waits() == "2500 bytes that prefill has space for in this side's staging ring"
    assert following.hook.waits() == f"5000 bytes {standing.format(0)}"
    dead.fail()
    assert last.hook.waits() == f"2500 bytes {standing.format(2500)}"
    dead.give()
    assert following.hook.waits().startswith("2500 bytes ")
