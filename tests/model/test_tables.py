"""The state machines as they are written: what every table of its kind must be true of."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from statelink.link import Status
from statelink.link._instance import Instance
from statelink.link._stages import CONTACT, INSTANCE, Contact, ContactEvent, InstanceEvent, Stage
from statelink.link._status import ENDED, follows

TABLES: list[tuple[dict[Any, dict[Any, Any]], Any, Any]] = [
    (INSTANCE, Stage.RESOLVING, Stage.GONE),
    (CONTACT, Contact.GREETED, Contact.GONE),
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
    greeted = ahead(INSTANCE, Stage.GREETING, InstanceEvent.REFUSED, InstanceEvent.DROPPED)
    assert Stage.READY in greeted
    assert {stage: steps.get(InstanceEvent.LOST) for stage, steps in INSTANCE.items()} == {
        stage: Stage.GREETING if stage in greeted else None for stage in Stage
    }


def test_refusal_is_possible_until_the_end_and_not_for_ever() -> None:
    refusable = {stage for stage, steps in INSTANCE.items() if steps.get(InstanceEvent.REFUSED) is Stage.REFUSED}
    assert refusable == set(Stage) - {Stage.REFUSED, Stage.GONE}
    assert Stage.READY in ahead(INSTANCE, Stage.REFUSED)


def test_prefill_serves_only_whom_it_has_checked() -> None:
    """Without that event nobody is attached, and it is none of somebody who has named no part."""
    assert Contact.ATTACHED not in ahead(CONTACT, Contact.GREETED, ContactEvent.COMPILED)
    assert Contact.ATTACHED not in ahead(CONTACT, Contact.GREETED, ContactEvent.ASSIGNED)


def test_a_step_that_is_not_listed_is_not_taken() -> None:
    for stage, event in itertools.product(Stage, InstanceEvent):
        instance = Instance("x", "x", 1.0, stage)
        taken = instance.step(event, 2.0)
        assert taken is (event in INSTANCE[stage])
        assert (instance.since, instance.turn) == ((2.0, 1) if taken else (1.0, 0))
        assert instance.stage is (INSTANCE[stage][event] if taken else stage)


def test_a_room_goes_forward_or_fails_and_ends_once() -> None:
    for before in Status:
        for after in Status:
            if follows(before, after):
                assert before not in ENDED
                assert after > before or after is Status.FAILED
    assert all(follows(before, Status.FAILED) for before in Status if before not in ENDED)
