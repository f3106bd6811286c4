"""A link is closed while other threads call it: what each of them sees."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.helpers.links import link_of

from statelink.errors import ClosedError


def test_every_thread_that_closes_a_link_gets_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that comes while another one still waits for threads to end."""
    link = link_of("prefill")
    stop, under_way, goes_on = link._control.stop, threading.Event(), threading.Event()

    def slow(timeout: float) -> bool:
        under_way.set()
        goes_on.wait(60)
        stop(timeout)
        return False  # as if they had not ended in time

    monkeypatch.setattr(link._control, "stop", slow)
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(link.close())) for _ in range(2)]
    threads[0].start()
    assert under_way.wait(60)
    threads[1].start()
    goes_on.set()
    for thread in threads:
        thread.join(60)
    assert answers == [False, False]
    assert link.close() is False


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_no_room_is_opened_behind_the_back_of_a_thread_that_closes(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is closed after the call has found it open, and before the room is entered."""
    link = link_of(role)
    valid = link._valid

    def late(*args: Any) -> Any:
        found = valid(*args)
        assert link.close()
        return found

    monkeypatch.setattr(link, "_valid", late)
    with pytest.raises(ClosedError, match="the link is closed"):
        link.send(1, 4) if role == "prefill" else link.receive(1, "tcp://127.0.0.1:1", 4)
    assert not link.rooms()
