"""What an engine passes to a room is looked at before anything is changed; and what a status is as text."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from tests.helpers.links import link_of

from statelink import Status
from statelink.errors import RoomError

WRONG: list[tuple[Any, Any, str]] = [
    ([1, 2], None, r"items are given as list .*a dict of indices by component is expected"),
    (None, None, r"items are given as NoneType .*a dict of indices by component is expected"),
    ({"kv": [0]}, 3, r"the ready event is 3 .*something with a method query\(\) is expected"),
    ({"kv": [0]}, object, r"the ready event is <class 'object'> .*something with a method query\(\)"),
]


@pytest.mark.parametrize(("items", "ready", "said"), WRONG)
def test_what_is_no_item_and_no_event(items: Any, ready: Any, said: str) -> None:
    with link_of("prefill") as prefill, link_of("decode") as decode:
        receiving, sending = decode.receive(7, prefill.address, 4), prefill.send(7, 4)
        with pytest.raises(RoomError, match=said) as caught:
            sending.push(items, ready=ready)
        assert caught.value.code == "room.push"
        with pytest.raises(RoomError, match=said) as caught:
            receiving.accept(items, ready=ready)
        assert caught.value.code == "room.items"
        receiving.accept({"kv": [1]})
        sending.push({"kv": [0]})
        assert receiving.wait(20) is sending.wait(20) is Status.SUCCEEDED


@pytest.mark.parametrize("seconds", ["5", math.nan, np.float32("nan"), True, [1]])
def test_what_is_no_time_to_wait(seconds: Any) -> None:
    said = rf"{re.escape(repr(seconds))} was passed as the seconds to wait.*a number is expected"
    with link_of("decode") as link:
        room = link.receive(7, "tcp://127.0.0.1:9", 4)
        for wait in (room.wait, link.changes, link.suspend, link.close):
            with pytest.raises(RoomError, match=said) as caught:
                wait(seconds)
            assert caught.value.code == "room.number"
        endless: Any = None
        for wait in (link.suspend, link.close):
            with pytest.raises(RoomError, match="None was passed as the seconds to wait"):
                wait(endless)
        assert room.wait(np.float32(0.01)) is not Status.FAILED, "the link is still open"


def test_a_status_is_a_word() -> None:
    assert [str(each) for each in Status] == ["failed", "bootstrapping", "waiting", "transferring", "succeeded"]
    assert f"{Status.FAILED}, {Status.SUCCEEDED:>10}" == "failed,  succeeded"
    assert min(Status.SUCCEEDED, Status.WAITING) is Status.WAITING
    assert int(Status.SUCCEEDED) == 4
