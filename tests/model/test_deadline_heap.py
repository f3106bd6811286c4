"""The deadlines of many rooms, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from statelink.link import Status
from statelink.link._room_table import Deadlines
from statelink.link.runtime import Loop


class Room:
    """A room that ends when it expires, or whose code fails then."""

    def __init__(self, deadline: float, *, fails: bool = False) -> None:
        self.deadline = deadline
        self.status = Status.WAITING
        self._fails = fails

    def expire(self) -> None:
        if self._fails:
            raise RuntimeError("a defect")
        self.status = Status.FAILED


def test_a_room_that_cannot_expire_does_not_keep_the_others() -> None:
    timers: list[tuple[float, Callable[[], None]]] = []
    clock = SimpleNamespace(time=0.0)
    loop: Any = SimpleNamespace(
        now=lambda: clock.time,
        after=lambda seconds, job: timers.append((clock.time + seconds, job)),
        guard=lambda job: Loop.guard(None, job),  # type: ignore[arg-type]
    )
    deadlines = Deadlines(loop)
    rooms: list[Any] = [Room(1.0, fails=True), Room(1.0), Room(2.0)]
    for room in rooms:
        deadlines.add(room)
    while timers:
        timers.sort(key=lambda timer: timer[0])
        clock.time, job = timers.pop(0)
        loop.guard(job)
    assert [room.status for room in rooms] == [Status.WAITING, Status.FAILED, Status.FAILED]
