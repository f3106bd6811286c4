"""Requests that prefill keeps before it opens their rooms: how many bytes, and whose give way."""

from __future__ import annotations

from statelink.link.prefill._pending import PendingRequests
from statelink.wire import ItemList, Request


def ask(room: int, nbytes: int) -> Request:
    items = {"kv": ItemList(0, bytes(nbytes))}
    return Request(sender="d", to="p", room=room, generation=1, tokens=1, prefix=0, items=items)


def test_pending_requests_are_counted() -> None:
    pending = PendingRequests(3, 20_000)
    assert pending.put("a", ask(1, 800), 0.0) == []
    assert pending.put("b", ask(1, 8), 0.0) == []
    assert pending.put("a", ask(2, 800), 0.0) == []
    before = pending.nbytes
    assert pending.put("a", ask(2, 800), 0.0) == []
    assert pending.nbytes == before, "the same one again takes its place"
    assert [(who, each.room) for who, each in pending.put("a", ask(3, 1600), 0.0)] == [("a", 1)]
    assert len(pending) == 3
    assert pending.get(3, "a") is not None
    pending.take("a")
    assert len(pending) == 1
    assert pending.get(3, "a") is None
    assert list(pending.of(1)) == ["b"]
    pending.drop(1, "b")
    assert (len(pending), pending.nbytes) == (0, 0)
    assert [(who, each.room) for who, each in pending.put("a", ask(4, 20_000), 0.0)] == [("a", 4)], (
        "one that is too large"
    )
    assert (len(pending), pending.nbytes) == (0, 0)


def test_who_asks_for_much_gives_way_before_who_asks_for_little() -> None:
    """A peer that fills what is kept loses its own requests, the oldest first, and nobody else any."""
    pending = PendingRequests(1000, 100_000)
    assert pending.put("honest", ask(1, 5000), 0.0) == []
    dropped = [each for room in range(2, 200) for each in pending.put("greedy", ask(room, 9000), 0.0)]
    assert {who for who, _ in dropped} == {"greedy"}
    assert [each.room for _, each in dropped] == list(range(2, 2 + len(dropped)))
    assert pending.get(1, "honest") is not None
    assert pending.nbytes <= 100_000


def test_names_count_as_bytes() -> None:
    """A request of a thousand names and not one index takes memory, too."""
    pending = PendingRequests(1000, 1 << 20)
    names = {f"component {number}": ItemList(0, b"") for number in range(1000)}
    for room in range(1, 20):
        pending.put("d", Request(sender="d", to="p", room=room, generation=1, tokens=1, prefix=0, items=names), 0.0)
    assert len(pending) < 5
