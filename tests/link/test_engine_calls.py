"""What a request costs the engine's own thread, in counts, which do not depend on the machine.

A scheduler's loop makes these calls between two forwards. Limited is how often the thread wakes the control thread,
which is a call to the system and a change of threads. Calls of Python functions are only reported.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.helpers.loops import note_rings, open_with_loop, sleeps
from tests.helpers.peers import until

import statelink
from statelink import Pages, Status, state
from statelink.link.runtime import Bell, Loop

if TYPE_CHECKING:
    from types import FrameType

    import pytest

PAGE, PAGES, ROWS = 16, 8, 8
TOKENS = 2 * PAGE
PACKAGE = str(Path(statelink.__file__).parent)
CALM: dict[str, Any] = {"heartbeat": 500.0, "liveness": 1000.0, "deadline": 5000.0, "inspect": False}
"""No heartbeat comes during the test."""


class Counted:
    """Calls of Python functions by name, and rings of the bell, of one call of the engine."""

    def __init__(self) -> None:
        self.functions: Counter[str] = Counter()
        self.rings = 0

    def __str__(self) -> str:
        return f"{self.functions.total()}: {', '.join(f'{name} {count}' for name, count in self.functions.items())}"


@contextmanager
def counted() -> Iterator[Counted]:
    """Count what this thread does."""
    found = Counted()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and PACKAGE in frame.f_code.co_filename:
            found.functions[frame.f_code.co_name] += 1
            found.rings += frame.f_code is Bell.ring.__code__

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)


def opened(role: str) -> tuple[statelink.Link, Loop, Any]:
    keys, values = np.zeros((2, PAGES, PAGE, 2, 8), np.uint8)
    conv, rows = np.zeros((ROWS, 8, 3), np.float32), np.zeros((ROWS, 4), np.int32)
    components = [
        state.kv_pages({0: (keys, values)}, heads=2),
        state.mamba_slots(conv={1: conv}, ssm={}),
        state.aux_rows({"row": rows}, name="aux"),
    ]
    memory: tuple[Any, ...] = keys, values, conv, rows
    if role == "prefill":
        for number, each in enumerate(memory, 1):
            each[...] = number
    link, loop = open_with_loop(
        lambda: statelink.open({"role": role, "backend": "tcp", **CALM}, state.describe(role, components))
    )
    return link, loop, memory


def met(room: statelink.Room) -> None:
    until(lambda: room.status is Status.WAITING)


def ended(room: statelink.Room) -> None:
    assert room.wait(20, quiesced=True) is Status.SUCCEEDED


def test_a_small_request_wakes_the_control_thread_once_a_call_at_most(tell: Callable[[str], None]) -> None:
    (prefill, sender, sent), (decode, receiver, arrived) = opened("prefill"), opened("decode")
    least: dict[str, Counted] = {}

    def keep(what: str, found: Counted) -> None:
        if what not in least or found.functions.total() < least[what].functions.total():
            least[what] = found

    with prefill, decode:
        instance = (prefill.address,)
        for room in range(1, 13):
            pages = np.array([1, 2], np.int32)
            sleeps(sender)
            with counted() as found:
                sending = prefill.send(room)
            assert found.rings == 0, "nobody has asked for the room"
            keep("send", found)
            sleeps(receiver)
            with counted() as found:
                receiving = decode.receive(room, instance, TOKENS, {"kv": pages, "mamba": 3, "aux": 4})
            assert found.rings <= 1
            keep("receive", found)
            met(sending)
            sleeps(sender)
            with counted() as found:
                sending.push({"kv": Pages(pages, 0), "mamba": 3, "aux": 4}, span=(0, TOKENS), last=True)
            assert found.rings <= 1
            keep("push", found)
            ended(sending)
            ended(receiving)
            with counted() as found:
                assert sending.poll() is receiving.poll() is Status.SUCCEEDED
                sending.close()
                receiving.close()
            assert found.rings == 0
            keep("poll and close", found)
    for items, here, there in zip(([1, 2], [1, 2], [3], [4]), sent, arrived, strict=True):
        assert here[items].all()
        assert np.array_equal(here[items], there[items])
    for what, found in least.items():
        tell(f"{what}: {found}")


def test_many_calls_wake_a_sleeping_control_thread_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests a scheduler opens before the control thread has the interpreter."""
    decode, loop, _ = opened("decode")
    with decode:
        sleeps(loop)
        rings = note_rings(loop, monkeypatch, mute=True)
        rooms = [decode.receive(room, "tcp://127.0.0.1:9", TOKENS) for room in range(1, 20)]
        for each in rooms:
            each.abort()
        monkeypatch.undo()
        rings[0].ring()
        assert len(rings) == 1
        for each in rooms:
            assert each.wait(20) is Status.FAILED
