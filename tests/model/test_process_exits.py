"""Memory that a dead writer may still reach is held for as long as the backend declares, and no longer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from statelink.backend import Fence
from statelink.link.decode._in_flight import ProcessExits, Proof
from statelink.registry import load_backend


class Clock:
    """A control thread whose clock is moved by what waits."""

    def __init__(self, broken: int = 0, **declared: Any) -> None:
        capabilities = dataclasses.replace(load_backend("tcp").capabilities, **{"target": Fence.MOVER, **declared})
        self.polled = 0
        self.broken = broken
        """Polls that raise, before the first that does not."""
        self.time = 0.0
        self._declared = capabilities

    def exits(self, landed: Callable[[Any, Proof], None]) -> ProcessExits:
        """Its own loop and workers are this clock."""
        workers: Any = SimpleNamespace(poll=self._poll)
        loop: Any = self
        return ProcessExits(loop, workers, self._declared, landed)

    def after(self, seconds: float, job: Callable[[], None]) -> None:
        self.time += seconds
        job()

    def _poll(self, key: Any, transfers: Any, then: Callable[[bool], None]) -> None:
        self.polled += 1
        then(self.polled > self.broken)


@pytest.mark.parametrize(
    ("declared", "seconds"), [({}, 1), ({"landing_seconds": 5.0}, 5), ({"landing_seconds": 0.0}, 0)]
)
def test_it_waits_as_long_as_declared(declared: dict[str, Any], seconds: float) -> None:
    """In rounds in which the backend is called, since some libraries land nothing otherwise."""
    clock, landed = Clock(**declared), list[tuple[str, float]]()
    exits = clock.exits(lambda rank, proof: landed.append((rank.name, clock.time)))
    ranks: Any = [SimpleNamespace(name="dead", exited=True), SimpleNamespace(name="alive", exited=False)]
    exits.look(ranks)
    assert [name for name, _ in landed] == ["dead"]
    assert landed[0][1] == pytest.approx(seconds)
    assert clock.polled == round(seconds / 0.05)


def test_a_poll_that_raised_proves_nothing() -> None:
    clock, landed = Clock(broken=3), list[Any]()
    ranks: Any = [SimpleNamespace(name="dead", exited=True)]
    clock.exits(lambda *found: landed.append(found)).look(ranks)
    assert landed == [(ranks[0], Proof.EXITED)]
    assert clock.polled == 3 + 20


def test_without_a_fence_the_end_of_a_process_proves_nothing() -> None:
    clock, landed = Clock(target=Fence.NONE), list[Any]()
    ranks: Any = [SimpleNamespace(name="dead", exited=True)]
    clock.exits(lambda *found: landed.append(found)).look(ranks)
    assert (landed, clock.polled) == ([], 0)


@pytest.mark.parametrize("seconds", [-1.0, 61.0])
def test_a_time_that_cannot_be_declared(seconds: float) -> None:
    with pytest.raises(ValueError, match=f"landing_seconds is {seconds}: it is between 0 and 60"):
        Clock(landing_seconds=seconds)
