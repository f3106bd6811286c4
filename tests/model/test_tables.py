"""The state machines as they are written: what every table of its kind must be true of."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from statelink.link import Status
from statelink.link._status import ENDED, FOLLOWS
from statelink.link.decode._instance import Instance
from statelink.link.peers import DECODE_RANK, INSTANCE, InstanceEvent, InstanceState, RankEvent, RankState

TABLES: list[tuple[dict[Any, dict[Any, Any]], Any, Any]] = [
    (INSTANCE, InstanceState.RESOLVING, InstanceState.GONE),
    (DECODE_RANK, RankState.GREETED, RankState.GONE),
]


def ahead(table: Any, stage: Any, *without: Any) -> set[Any]:
    """The stages that some events may lead to, but those ``without``; and the stage itself."""
    reached, new = {stage}, [stage]
    while new:
        for event, after in table[new.pop()].items():
            if event not in without and after not in reached:
                reached.add(after)
                new.append(after)
    return reached


@pytest.mark.parametrize(("table", "first", "last"), TABLES, ids=["instance", "contact"])
def test_every_stage_is_reached_and_from_each_there_is_an_end(table: Any, first: Any, last: Any) -> None:
    assert set(table) == set(type(first).__members__.values())
    assert ahead(table, first) == set(table)
    assert all(last in ahead(table, stage) for stage in table)
    assert [stage for stage in table if not table[stage]] == [last], "nothing else is an end, and nothing leaves it"


def test_a_lost_rank_is_greeted_anew_wherever_it_was() -> None:
    greeted = ahead(INSTANCE, InstanceState.GREETING, InstanceEvent.REFUSED, InstanceEvent.DROPPED)
    assert InstanceState.READY in greeted
    assert {stage: steps.get(InstanceEvent.LOST) for stage, steps in INSTANCE.items()} == {
        stage: InstanceState.GREETING if stage in greeted else None for stage in InstanceState
    }


def test_refusal_is_possible_until_the_end_and_not_for_ever() -> None:
    refusable = {
        stage for stage, steps in INSTANCE.items() if steps.get(InstanceEvent.REFUSED) is InstanceState.REFUSED
    }
    assert refusable == set(InstanceState) - {InstanceState.REFUSED, InstanceState.GONE}
    assert InstanceState.READY in ahead(INSTANCE, InstanceState.REFUSED)


def test_prefill_serves_only_whom_it_has_checked() -> None:
    """Without that event nobody is attached, and it is none of somebody who has named no part."""
    assert RankState.ATTACHED not in ahead(DECODE_RANK, RankState.GREETED, RankEvent.COMPILED)
    assert RankState.ATTACHED not in ahead(DECODE_RANK, RankState.GREETED, RankEvent.ASSIGNED)


def test_a_step_that_is_not_listed_is_not_taken() -> None:
    for stage, event in itertools.product(InstanceState, InstanceEvent):
        instance = Instance("x", "x", 1.0)
        instance.state = stage
        taken = instance.step(event, 2.0)
        assert taken is (event in INSTANCE[stage])
        assert (instance.since, instance.turn) == ((2.0, 1) if taken else (1.0, 0))
        assert instance.state is (INSTANCE[stage][event] if taken else stage)


def test_a_room_goes_forward_or_fails_and_ends_once() -> None:
    for before in Status:
        for after in Status:
            if after in FOLLOWS[before]:
                assert before not in ENDED
                assert after > before or after is Status.FAILED
    assert all(Status.FAILED in FOLLOWS[before] for before in Status if before not in ENDED)
