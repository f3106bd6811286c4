"""Memory that a dead writer may still reach is held for as long as the backend declares, and no longer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from statelink.backend import Fence, Op, Side
from statelink.link._departed import Departed
from statelink.registry import load_backend


class Node:
    """A control thread whose clock is moved by what waits."""

    def __init__(self, **declared: Any) -> None:
        fences = {(Op.WRITE, Side.SOURCE): Fence.MOVER, (Op.WRITE, Side.TARGET): Fence.MOVER}
        capabilities = dataclasses.replace(load_backend("tcp").capabilities, **{"fences": fences, **declared})
        self.polled = 0
        self.clock = 0.0
        self.backend = SimpleNamespace(capabilities=capabilities, poll=self._poll)
        self.fences = SimpleNamespace(submit=lambda key, job: job())

    def post(self, job: Callable[[], None]) -> None:
        job()

    def after(self, seconds: float, job: Callable[[], None]) -> None:
        self.clock += seconds
        job()

    def _poll(self, transfers: Any) -> None:
        self.polled += 1


@pytest.mark.parametrize(
    ("declared", "seconds"), [({}, 1), ({"landing_seconds": 5.0}, 5), ({"landing_seconds": 0.0}, 0)]
)
def test_it_waits_as_long_as_declared(declared: dict[str, Any], seconds: float) -> None:
    """In rounds in which the backend is called, since some libraries land nothing otherwise."""
    node, rested = Node(**declared), list[tuple[str, float]]()
    departed = Departed(node, lambda source: rested.append((source.name, node.clock)))  # type: ignore[arg-type]
    sources: Any = [SimpleNamespace(name="dead", ended=True), SimpleNamespace(name="alive", ended=False)]
    departed.look(sources)
    assert [name for name, _ in rested] == ["dead"]
    assert rested[0][1] == pytest.approx(seconds)
    assert node.polled == round(seconds / 0.05)


def test_without_a_fence_the_end_of_a_process_proves_nothing() -> None:
    fences = {(Op.WRITE, Side.SOURCE): Fence.MOVER, (Op.WRITE, Side.TARGET): Fence.NONE}
    node, rested = Node(fences=fences), list[Any]()
    Departed(node, rested.append).look([SimpleNamespace(name="dead", ended=True)])  # type: ignore[arg-type, list-item]
    assert (rested, node.polled) == ([], 0)


@pytest.mark.parametrize("seconds", [-1.0, 61.0])
def test_a_time_that_cannot_be_declared(seconds: float) -> None:
    with pytest.raises(ValueError, match="within 0 to 60 seconds"):
        Node(landing_seconds=seconds)
