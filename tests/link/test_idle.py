"""Links that have nothing to do, do nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from statelink import Status

if TYPE_CHECKING:
    from tests.helpers.pair import Pair
    from tests.link.conftest import TwoEngines


@pytest.fixture
def idle(two_engines: TwoEngines) -> Pair:
    made = two_engines.pair()
    made.run()
    return made


def used(pair: Pair, seconds: float = 1.0) -> tuple[float, float]:
    """Processor time that each side uses in a while, all threads together."""
    engines = pair.prefill.engine, pair.decode.engine
    before = [engine.run("time", "process_time") for engine in engines]
    time.sleep(seconds)
    prefill, decode = (
        engine.run("time", "process_time") - start for engine, start in zip(engines, before, strict=True)
    )
    return prefill, decode


def test_an_idle_link_costs_nothing(idle: Pair) -> None:
    for spent in used(idle):
        assert spent < 0.05


@pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")
def test_rooms_that_wait_cost_nothing(idle: Pair) -> None:
    """Rooms without a request, without a send, and without their last push."""
    cases = [idle.case(40) for _ in range(3)]
    rooms = [idle.receive(cases[0]), idle.send(cases[1]), *idle.begin(cases[2])]
    idle.push(rooms[1], cases[1])
    rooms[3].push(cases[2].span(0, 32, idle.prefill.memory.pools), span=(0, 32))
    rooms[2].reach(Status.TRANSFERRING)
    for spent in used(idle):
        assert spent < 0.05
    for room in rooms:
        room.abort("enough")
        room.wait(quiesced=True)
