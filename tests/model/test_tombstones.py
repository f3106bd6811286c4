"""What each side remembers of uses of room ids that have ended: bounded, and never forgotten without a trace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from statelink.errors import Reason
from statelink.link import _past, _unmet
from statelink.link._past import Who
from statelink.link._to import To
from statelink.wire import MAX_UNMET, Unmet

if TYPE_CHECKING:
    import pytest


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


GONE = Reason("room.aborted", "gone")
WHO = Who("decode.0-1", "decode", "", 1)


def test_ends_that_were_forgotten_count_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rooms are given up: no id is taken for one that was never used, and the memory has a bound."""
    monkeypatch.setattr(_past, "REMEMBERED", 100)
    clock = Clock()
    past = _past.Past(clock, 120.0)
    for room in range(1, 5001):
        past.ended((room, 0), GONE, None, {})
    assert past.load()["tombstones"] == 100
    known = [past.due((room, 0), WHO, 60.0) is not None or past.forgot((room, 0)) for room in range(1, 5001)]
    assert all(known)
    assert sum(past.forgot((room, 1)) for room in range(1, 5001)) < 5
    clock.time = 3 * 3600.0
    assert not any(past.forgot((room, 0)) for room in range(1, 5001))


def test_a_rank_is_told_of_each_end_once() -> None:
    clock = Clock()
    past = _past.Past(clock, 120.0)
    other = WHO._replace(name="decode.1-1", ranks=2)
    for _ in range(2):
        past.ended((7, 0), GONE, None, {})
    for _ in range(2):
        end = past.due((7, 0), WHO, 60.0)
        assert end is not None
        past.settle((7, 0), WHO, end)
    assert past.due((7, 0), WHO, 60.0) is None
    past.ended((7, 0), GONE, None, {other.name: other.instance})
    assert past.due((7, 0), other, 60.0) is None
    past.ended((8, 0), GONE, To(frozenset({"another"}), frozenset()), {})
    assert past.due((8, 0), WHO, 60.0) is None, "it was for somebody else"
    clock.time = 179.0
    assert past.due((7, 0), WHO, 60.0) is not None, "a use of a minute may have begun two minutes after it"
    clock.time = 181.0
    assert past.due((7, 0), WHO, 60.0) is None
    for _ in range(50):
        past.ended((9, 0), GONE, None, {})
    for _ in range(50):
        end = past.due((9, 0), WHO, 60.0)
        assert end is not None, "so many that they are not counted any more"
        past.settle((9, 0), WHO, end)
    assert past.load()["tombstones"] < 20


def test_decode_remembers_what_prefill_may_not_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_unmet, "REMEMBERED", 10)
    clock = Clock()
    unmet = _unmet.Unmet(clock)

    def ended(room: int, generation: int, sources: list[str] | None) -> None:
        handle: Any = SimpleNamespace(_key=(room, 0), generation=generation)
        unmet.ended(handle, sources)

    ended(1, 5, ["p.0", "p.1"])
    clock.time = 2.0
    assert unmet.named((1, 0), "p.0") == (Unmet(5, 2000),)
    assert unmet.named((1, 0), "p.2") == unmet.named((1, 1), "p.0") == ()
    unmet.met(5, "p.0")
    assert (unmet.named((1, 0), "p.0"), len(unmet.named((1, 0), "p.1"))) == ((), 1)
    unmet.met(5, "p.1")
    assert len(unmet) == 0
    for generation in range(1, 100):
        ended(1, generation, None)
    named = unmet.named((1, 0), "p.0")
    assert len(named) <= MAX_UNMET
    assert named[0] == Unmet(0, 0), "more than are named"
    for room in range(2, 100):
        ended(room, 1000 + room, None)
    assert len(unmet) == 10
    assert all(unmet.named((room, 0), "p.0") for room in range(1, 100))
