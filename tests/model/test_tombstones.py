"""What each side remembers of uses of room ids that have ended: bounded, and never forgotten without a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelink.errors import Reason
from statelink.link.decode import _unmet
from statelink.link.prefill import _tombstones
from statelink.link.prefill._tombstones import AskingRank, Tombstones
from statelink.wire import MAX_UNMET, Unmet

if TYPE_CHECKING:
    import pytest


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


GONE = Reason("room.aborted", "gone")
RANK = AskingRank("decode.0-1", "decode", "", 1)


def test_ends_that_were_forgotten_count_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rooms are given up: no id is taken for one that was never used, and the memory has a bound."""
    monkeypatch.setattr(_tombstones, "MOST_TOMBSTONES", 100)
    clock = Clock()
    tombstones = Tombstones(clock, 120.0)
    for room in range(1, 5001):
        tombstones.ended(room, GONE, {})
    assert tombstones.load()["tombstones"] == 100
    known = [tombstones.due(room, RANK, 60.0) is not None or tombstones.forgot(room) for room in range(1, 5001)]
    assert all(known)
    assert sum(tombstones.forgot(room) for room in range(5001, 10001)) < 5
    clock.time = 3 * 3600.0
    assert not any(tombstones.forgot(room) for room in range(1, 5001))


def test_a_rank_is_told_of_each_end_once() -> None:
    clock = Clock()
    tombstones = Tombstones(clock, 120.0)
    other = RANK._replace(name="decode.1-1", ranks=2)
    for _ in range(2):
        tombstones.ended(7, GONE, {})
    for _ in range(2):
        end = tombstones.due(7, RANK, 60.0)
        assert end is not None
        tombstones.acknowledge(7, RANK, end)
    assert tombstones.due(7, RANK, 60.0) is None
    tombstones.ended(7, GONE, {other.name: other.instance})
    assert tombstones.due(7, other, 60.0) is None
    clock.time = 179.0
    assert tombstones.due(7, RANK, 60.0) is not None, "a use of a minute may have begun two minutes after it"
    clock.time = 181.0
    assert tombstones.due(7, RANK, 60.0) is None
    for _ in range(50):
        tombstones.ended(9, GONE, {})
    for _ in range(50):
        end = tombstones.due(9, RANK, 60.0)
        assert end is not None, "so many that they are not counted any more"
        tombstones.acknowledge(9, RANK, end)
    assert tombstones.load()["tombstones"] < 20


def test_what_ended_rooms_of_prefill_is_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the instance that gave it up, until another room is opened, and never for too many ids."""
    monkeypatch.setattr(_tombstones, "MOST_TOMBSTONES", 100)
    clock = Clock()
    tombstones = Tombstones(clock, 120.0)

    def spend(room: int, rank: AskingRank) -> None:
        tombstones.spend(room, tombstones.give_up(room, rank, room, GONE, kept=False))

    def spent(room: int, rank: AskingRank) -> bool:
        return tombstones.spent(room, rank, 60.0) is not None

    other = AskingRank("other.0-1", "other", "", 1)
    spend(7, RANK)
    spend(7, other)
    assert tombstones.load()["gone"] == 1, "one id"
    assert not spent(7, RANK._replace(key="of somebody else"))
    assert (spent(7, RANK), spent(7, other)) == (True, True)
    clock.time = 179.0
    assert spent(7, RANK), "a use of a minute may have begun two minutes after it"
    clock.time = 181.0
    assert not spent(7, RANK)
    assert tombstones.any_given_up()
    tombstones.reopened(7)
    assert not tombstones.any_given_up()
    for room in range(1, 500):
        spend(room, RANK)
    assert tombstones.load()["gone"] == 100
    assert spent(499, RANK)


def test_of_too_many_instances_that_gave_one_id_up_the_first_is_forgotten() -> None:
    tombstones = Tombstones(Clock(), 120.0)
    for number in range(100):
        rank = AskingRank(f"decode.{number}", f"decode {number}", "", 1)
        tombstones.give_up(7, rank, 1, GONE, kept=False)
    known = [tombstones.given_up(7, f"decode {number}") is not None for number in range(100)]
    assert known == [False] * 84 + [True] * 16


def test_decode_remembers_what_prefill_may_not_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_unmet, "MOST_IDS", 10)
    clock = Clock()
    unmet = _unmet.UnmetUses(clock)

    def ended(room: int, generation: int, sources: list[str] | None) -> None:
        unmet.ended(room, generation, sources)

    ended(1, 5, ["p.0", "p.1"])
    clock.time = 2.0
    assert unmet.named(1, "p.0") == (Unmet(5, 2000),)
    assert unmet.named(1, "p.2") == unmet.named(2, "p.0") == ()
    unmet.met(1, 5, "p.0")
    assert (unmet.named(1, "p.0"), len(unmet.named(1, "p.1"))) == ((), 1)
    unmet.met(1, 5, "p.1")
    assert len(unmet) == 0
    for generation in range(1, 100):
        ended(1, generation, None)
    named = unmet.named(1, "p.0")
    assert len(named) <= MAX_UNMET
    assert named[0] == Unmet(0, 0), "more than are named"
    for room in range(2, 100):
        ended(room, 1000 + room, None)
    assert len(unmet) == 10
    assert all(unmet.named(room, "p.0") for room in range(1, 100))
