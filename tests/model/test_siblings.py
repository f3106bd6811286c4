"""What a rank of prefill tells the other ranks of its instance about rooms that have ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from statelink import wire
from statelink.link import Status
from statelink.link.prefill._siblings import Siblings


def room_of(status: Status) -> Any:
    return SimpleNamespace(room=7, status=status)


def test_a_room_that_ended_before_its_opening_was_noted_is_remembered() -> None:
    """Decode's request, and its failure, may be handled before the job that opens the room. The end counts."""
    sent: list[wire.Message] = []
    context: Any = SimpleNamespace(
        name="p",
        inventory=SimpleNamespace(ranks=2),
        config=SimpleNamespace(siblings=(), rendezvous=""),
        channel=SimpleNamespace(send=sent.append),
    )
    rooms: Any = SimpleNamespace(get=lambda room: None)  # it is forgotten by the time that somebody asks
    siblings = Siblings(context, rooms)
    ask = wire.Inquire(sender="other", room=7)

    def told() -> list[int]:
        sent.clear()
        siblings.inquired(ask)
        return [each.status for each in sent if isinstance(each, wire.Standing)]

    siblings.changed(room_of(Status.FAILED))
    siblings.opened(room_of(Status.FAILED))
    assert told() == [int(Status.FAILED)]
    siblings.opened(room_of(Status.BOOTSTRAPPING))  # the next use of the same id
    assert told() == []
