"""The queue of changed rooms: the control thread adds to it, and threads of the engine take from it, at any moment."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from statelink.link import Status, _room_table
from statelink.link._room_table import RoomTable

ROOMS, CHANGES = 8, 20_000


class Handle:
    """What the engine holds of a room."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.noted = 0
        """Changes so far. The control thread counts one before it tells the table."""


def table_of(rooms: int) -> tuple[RoomTable, list[tuple[Any, Handle]]]:
    hooks = SimpleNamespace(hook=SimpleNamespace(statelink_room_ended=None))
    config = SimpleNamespace(max_rooms=rooms)
    context: Any = SimpleNamespace(config=config, hooks=hooks, loop=None)
    table = RoomTable(context)
    made: list[tuple[Any, Handle]] = []
    for room in range(1, rooms + 1):
        handle: Any = Handle(room)
        state: Any = SimpleNamespace(role="prefill", room=room, status=Status.WAITING)
        table.enter(state, handle)
        made.append((state, handle))
    return table, made


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads take turns as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("takers", [1, 2])
def test_no_change_is_missed_by_an_engine_that_waits(takers: int, hurried: None) -> None:
    """After each change, a thread that waits without end gets the room, and sees that change or a later one."""
    table, rooms = table_of(ROOMS)
    seen: Counter[int] = Counter()
    news = threading.Condition()

    def take() -> None:
        while True:
            for room in table.changes.take(None):
                taken: Any = room
                if taken.noted < 0:
                    return
                with news:
                    seen[taken.room] = max(seen[taken.room], taken.noted)
                    news.notify()

    threads = [threading.Thread(target=take, daemon=True) for _ in range(takers)]
    for thread in threads:
        thread.start()
    for number in range(CHANGES):
        state, handle = rooms[number % ROOMS]
        handle.noted += 1
        table.changed(state)
        if number % 10 == 0:  # now and then, wait until it was taken, so that the engine waits for the next one
            with news:
                assert news.wait_for(lambda h=handle: seen[h.room] >= h.noted, 20), "a change was missed"  # type: ignore[misc]
    for _, handle in rooms:
        with news:
            assert news.wait_for(lambda h=handle: seen[h.room] >= h.noted, 20)  # type: ignore[misc]
    for thread in threads:
        while thread.is_alive():
            rooms[0][1].noted = -1
            table.changed(rooms[0][0])
            thread.join(0.01)


def test_a_change_that_was_taken_early_ends_no_later_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes the room after it is in the queue, and before the control thread sets the event."""
    table, rooms = table_of(1)
    set_event, inside, gate = table.changes._any.set, threading.Event(), threading.Event()

    def late() -> None:
        inside.set()
        assert gate.wait(20)
        set_event()

    monkeypatch.setattr(table.changes._any, "set", late)
    control = threading.Thread(target=table.changed, args=(rooms[0][0],))
    control.start()
    assert inside.wait(20)
    assert len(table.changes.take(0.0)) == 1
    gate.set()
    control.join(20)
    monkeypatch.undo()
    found: list[Any] = []
    engine = threading.Thread(target=lambda: found.extend(table.changes.take(None)))
    engine.start()
    engine.join(0.05)
    table.changed(rooms[0][0])
    engine.join(20)
    assert len(found) == 1


def test_room_table_come_in_order_and_once() -> None:
    table, rooms = table_of(3)
    for place in (2, 0, 2, 1):
        table.changed(rooms[place][0])
    assert [room.room for room in table.changes.take(0.0)] == [3, 1, 2]
    assert table.changes.take(0.0) == table.changes.take(0.01) == []
    table.changed(rooms[1][0])
    assert [room.room for room in table.changes.take(None)] == [2]


def test_the_oldest_changes_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_room_table, "UNTAKEN_ROOMS", 2)
    table, rooms = table_of(4)
    for state, _ in rooms:
        table.changed(state)
    assert table.load()["changes_dropped"] == 2
    assert [room.room for room in table.changes.take(0.0)] == [3, 4]
