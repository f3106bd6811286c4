"""Requests that prefill keeps before it opens their rooms: how many bytes, and whose give way."""

from __future__ import annotations

from statelink.link._early import Early
from statelink.wire import ItemList, Request


def ask(room: int, nbytes: int) -> Request:
    items = {"kv": ItemList(0, bytes(nbytes))}
    return Request(sender="d", to="p", room=room, generation=1, tokens=1, prefix=0, items=items)


def test_early_requests_are_counted() -> None:
    early = Early(3, 20_000)
    assert early.put("a", ask(1, 800)) == []
    assert early.put("b", ask(1, 8)) == []
    assert early.put("a", ask(2, 800)) == []
    before = early.nbytes
    assert early.put("a", ask(2, 800)) == []
    assert early.nbytes == before, "the same one again takes its place"
    assert [(who, each.room) for who, each in early.put("a", ask(3, 1600))] == [("a", 1)]
    assert len(early) == 3
    assert early.get((3, 0), "a") is not None
    early.forget("a")
    assert len(early) == 1
    assert early.get((3, 0), "a") is None
    assert list(early.of((1, 0))) == ["b"]
    assert early.of((1, 1)) == {}, "another attempt is another room"
    early.drop((1, 0), "b")
    assert (len(early), early.nbytes) == (0, 0)
    assert [(who, each.room) for who, each in early.put("a", ask(4, 20_000))] == [("a", 4)], "one that is too large"
    assert (len(early), early.nbytes) == (0, 0)


def test_who_asks_for_much_gives_way_before_who_asks_for_little() -> None:
    """A peer that fills what is kept loses its own requests, the oldest first, and nobody else any."""
    early = Early(1000, 100_000)
    assert early.put("honest", ask(1, 5000)) == []
    dropped = [each for room in range(2, 200) for each in early.put("greedy", ask(room, 9000))]
    assert {who for who, _ in dropped} == {"greedy"}
    assert [each.room for _, each in dropped] == list(range(2, 2 + len(dropped)))
    assert early.get((1, 0), "honest") is not None
    assert early.nbytes <= 100_000


def test_names_count_as_bytes() -> None:
    """A request of a thousand names and not one index takes memory, too."""
    early = Early(1000, 1 << 20)
    names = {f"component {number}": ItemList(0, b"") for number in range(1000)}
    for room in range(1, 20):
        early.put("d", Request(sender="d", to="p", room=room, generation=1, tokens=1, prefix=0, items=names))
    assert len(early) < 5
