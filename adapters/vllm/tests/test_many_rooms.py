"""Which layers of many requests leave while the forward pass runs: a worker's rooms over a link that only counts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.caches import attention, make_cache, model_of

from statelink import Status
from statelink_vllm.connector import Chunk, EarlyRooms, Open, describe_cache

pytestmark = pytest.mark.smoke

BLOCK, TOKENS = 16, 48
GROUPS = [(0, 2), (2, 4), (4, 6), (6, 7), (7, 8)]
"""What eight layers are divided into."""


class Room:
    """A room of prefill whose decode has asked. Pushes arrive when the test says so."""

    prefix, status, quiesced = 0, Status.TRANSFERRING, False

    def __init__(self) -> None:
        self.pushes: list[Any] = []
        self.settled = 0

    def push(self, _: Any, *, layers: Any, **more: Any) -> None:
        self.pushes.append(layers)

    def extend(self, seconds: float) -> None:
        pass


class Step:
    """A step that computes so many prompts.

    Args:
        count: How many.
        behind: Whether the device has computed nothing of what is launched.
    """

    def __init__(self, count: int, *, behind: bool = False) -> None:
        cache = make_cache([(attention(4), range(8))])
        model = model_of()
        _, groups = describe_cache(cache.config, cache.tensors, model)
        self.rooms = [Room() for _ in range(count)]
        waiting = iter(self.rooms)
        link: Any = SimpleNamespace(send=lambda *_, **__: next(waiting))
        self.events = 0
        self._early = EarlyRooms(link, groups, 60.0, self._event, model.number)
        self._behind = behind
        self._names = [f"request{number}" for number in range(count)]
        for number, name in enumerate(self._names):
            self._early.open(name, Open(number, TOKENS, b""))

    def _event(self) -> Any:
        self.events += 1
        return SimpleNamespace(query=lambda: not self._behind)

    def run(self, arrive: Callable[[int], None] = lambda layer: None) -> None:
        """Compute all layers. ``arrive`` is called after each."""
        chunk = Chunk(0, 0, TOKENS, ([1, 2, 3],), True, ([],))
        self._early.begin(dict.fromkeys(self._names, chunk))
        for layer in range(8):
            self._early.layer(f"model.layers.{layer}.attn")
            arrive(layer)
        self._early.computed()

    def settle(self, count: int) -> None:
        """What was pushed of the first rooms has arrived."""
        for room in self.rooms[:count]:
            room.settled = len(room.pushes)

    @property
    def pushes(self) -> list[list[Any]]:
        """The layers of the pushes of a room, each once."""
        return [[*each] for each in dict.fromkeys(tuple(room.pushes) for room in self.rooms)]


def test_over_a_slow_network_each_of_many_rooms_has_two_pushes() -> None:
    step = Step(64)
    step.run()
    assert step.pushes == [[(0, 2), (2, 8)]]
    assert step.events == 2


@pytest.mark.parametrize(("arrived", "pushes"), [(31, [(0, 2), (2, 8)]), (32, GROUPS)])
def test_a_group_waits_while_more_than_half_of_the_rooms_wait(arrived: int, pushes: list[Any]) -> None:
    step = Step(64)
    step.run(lambda _: step.settle(arrived))
    assert step.pushes == [pushes]


def test_what_has_waited_leaves_with_the_next_group_once_the_network_is_free() -> None:
    step = Step(64)
    step.run(lambda layer: step.settle(64 if layer == 4 else 0))
    assert step.pushes == [[(0, 2), (2, 6), (6, 8)]]


def test_every_group_leaves_while_the_device_is_behind() -> None:
    """Nothing can have arrived: that says nothing of the network."""
    step = Step(64, behind=True)
    step.run()
    assert step.pushes == [GROUPS]


@pytest.mark.parametrize(("count", "pushes"), [(4, GROUPS), (5, [(0, 2), (2, 8)])])
def test_every_group_of_few_rooms_leaves(count: int, pushes: list[Any]) -> None:
    step = Step(count)
    step.run()
    assert step.pushes == [pushes]


def test_rooms_that_have_failed_hold_nothing_up() -> None:
    step = Step(64)

    def fail(layer: int) -> None:
        for room in step.rooms[:32]:
            room.status = Status.FAILED

    step.run(fail)
    assert step.pushes == [GROUPS]
