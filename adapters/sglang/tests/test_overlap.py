"""The overlap schedule: decode's memory takes a peer's bytes after the forward passes before. No scheduler."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from support.sides import SUCCESS, WAITING, Lists, Side, ask, meet, rooms, send, until

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("sglang_context")]

N = 100


class Event:
    """An event of a device's stream."""

    def __init__(self) -> None:
        self.stream: Any = None
        self.passed = False

    def record(self, stream: Any) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.passed


@pytest.fixture
def events(pair: tuple[Side, Side]) -> list[Event]:
    """What decode's scheduler, with the overlap schedule, has made."""
    made: list[Event] = []

    def make() -> Event:
        made.append(Event())
        return made[-1]

    device = SimpleNamespace(Event=make)
    pair[1].scheduler = SimpleNamespace(enable_overlap=True, device_module=device, forward_stream="forwards")
    return made


def test_prefill_writes_once_the_forward_passes_before_have_ended(pair: tuple[Side, Side], events: list[Event]) -> None:
    source, target = pair
    room = next(rooms)
    sender, receiver = source.sender(room), ask(target, room, Lists.draw(target, N, 60), N)
    (event,) = events
    assert event.stream == "forwards"
    time.sleep(0.3)
    assert sender.poll() != WAITING  # decode has asked for nothing
    event.passed = True
    until(sender.poll, WAITING)
    send(sender, source, Lists.draw(source, N, 61), N, [32])
    until(receiver.poll, SUCCESS)


def test_without_the_overlap_schedule_nothing_is_waited_for(pair: tuple[Side, Side], events: list[Event]) -> None:
    source, target = pair
    target.scheduler.enable_overlap = False
    sender, _ = meet(source, target, next(rooms), Lists.draw(target, N, 62), N)
    assert events == []
    sender.abort()
