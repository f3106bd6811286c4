"""The state machines as they are written: what every table of its kind must be true of."""

from __future__ import annotations

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


@pytest.mark.parametrize(("table", "first", "last"), TABLES, ids=["instance", "contact"])
def test_every_stage_is_reached_and_from_each_there_is_an_end(table: Any, first: Any, last: Any) -> None:
    assert set(table) == set(type(first).__members__.values())
    reached, new = {first}, [first]
    while new:
        for stage in table[new.pop()].values():
            if stage not in reached:
                reached.add(stage)
                new.append(stage)
    assert reached == set(table)
    assert table[last] == {}
    for stage in table:
        ahead: set[Any] = {stage}
        new = [stage]
        while new:
            for after in set(table[new.pop()].values()) - ahead:
                ahead.add(after)
                new.append(after)
        assert last in ahead


def test_a_lost_rank_is_greeted_anew_wherever_it_was() -> None:
    greeted = [stage for stage, steps in INSTANCE.items() if InstanceEvent.LOST in steps]
    assert greeted == [Stage.GREETING, Stage.PLANNING, Stage.ATTACHING, Stage.READY]
    assert {INSTANCE[stage][InstanceEvent.LOST] for stage in greeted} == {Stage.GREETING}


def test_refusal_is_possible_until_the_end_and_not_for_ever() -> None:
    refusable = [stage for stage, steps in INSTANCE.items() if InstanceEvent.REFUSED in steps]
    assert refusable == [Stage.RESOLVING, Stage.GREETING, Stage.PLANNING, Stage.ATTACHING, Stage.READY]
    assert INSTANCE[Stage.REFUSED][InstanceEvent.RETRIED] is Stage.RESOLVING


def test_prefill_serves_only_whom_it_has_checked() -> None:
    before = [stage for stage, steps in CONTACT.items() if steps.get(ContactEvent.COMPILED) is Contact.ATTACHED]
    assert before == [Contact.ATTACHING, Contact.ATTACHED]
    assert CONTACT[Contact.GREETED].keys() == {ContactEvent.ASSIGNED, ContactEvent.LOST}


@pytest.mark.parametrize("event", InstanceEvent)
@pytest.mark.parametrize("stage", Stage)
def test_a_step_that_is_not_listed_is_not_taken(stage: Stage, event: InstanceEvent) -> None:
    instance = Instance("x", "x", 1.0, stage)
    listed = INSTANCE[stage].get(event)
    assert instance.step(event, 2.0) == (listed is not None)
    if listed is None:
        assert (instance.stage, instance.since, instance.turn) == (stage, 1.0, 0)
    else:
        assert (instance.stage, instance.since, instance.turn) == (listed, 2.0, 1)


def test_a_room_goes_forward_or_fails_and_ends_once() -> None:
    for before in Status:
        for after in Status:
            if follows(before, after):
                assert before not in ENDED
                assert after > before or after is Status.FAILED
    assert all(follows(before, Status.FAILED) for before in Status if before not in ENDED)
