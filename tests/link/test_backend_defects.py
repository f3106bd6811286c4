"""Values of a wrong type that come from a backend: the error names the backend, the method and the value."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.peers import until

import statelink
from statelink import Status, state
from statelink.backend import Transfer
from statelink.errors import BackendUnavailableError, RoomError
from statelink.registry import load_backend

if TYPE_CHECKING:
    from statelink.errors import Reason


def opened(role: str, **config: Any) -> statelink.Link:
    pages = np.zeros((3, 4, 1, 8), np.uint8)
    held = [state.kv_pages({0: (pages, pages.copy())}, heads=1)]
    return statelink.open({"role": role, "backend": "tcp", "inspect": False, **config}, state.describe(role[0], held))


@contextmanager
def request() -> Iterator[tuple[statelink.Room, statelink.Room]]:
    """Both rooms of a request that is pushed, the receiving one first."""
    with opened("prefill") as prefill, opened("decode", peers={"p": [prefill.address]}) as decode:
        receiving = decode.receive(7, "p", 8, {"kv": [1, 0]}, deadline=60)
        sending = prefill.send(7, 8, deadline=60)
        sending.push({"kv": [0, 1]})
        yield receiving, sending
        for room in (receiving, sending):
            room.take_back("the test is over")


def failed(room: statelink.Room) -> Reason:
    assert room.wait(15) is Status.FAILED
    assert room.reason is not None
    return room.reason


def test_submit_returns_no_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_backend("tcp"), "submit", lambda self, peer, batch: True)
    with request() as rooms:
        for room in rooms:
            reason = failed(room)
            assert (reason.code, reason.cause) == (
                "backend.defect",
                "backend 'tcp': `submit` returned True, and not a Transfer",
            )
        assert not rooms[1].quiesced, "nobody knows what became of the batch"


def test_an_outcome_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is there when `submit` returns, or comes later."""
    wrong: Any = True
    monkeypatch.setattr(load_backend("tcp"), "submit", lambda self, peer, batch: Transfer(wrong))
    with request() as rooms:
        for room in rooms:
            reason = failed(room)
            assert (reason.code, reason.cause) == (
                "backend.defect",
                "backend 'tcp': `Transfer.outcome` is True, and not an Outcome",
            )
        assert not rooms[1].quiesced


def test_revoke_returns_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The room ends as it would; its memory stays in quarantine, and the log says why."""
    moves = threading.Event()

    def submit(self: Any, peer: str, batch: Any) -> Transfer:
        moves.set()
        return Transfer()

    monkeypatch.setattr(load_backend("tcp"), "submit", submit)
    monkeypatch.setattr(load_backend("tcp"), "revoke", lambda self, peer, room, generation: None)
    with request() as (receiving, _):
        assert moves.wait(15)
        receiving.abort("the test wants it")
        failed(receiving)
        receiving.wait(1, quiesced=True)
    assert "backend 'tcp': `revoke` returned None, and not a Transfer" in caplog.text


def test_descriptor_returns_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_backend("tcp"), "descriptor", lambda self: "here")
    with pytest.raises(BackendUnavailableError) as error, opened("prefill"):
        pass
    assert error.value.code == "backend.defect"
    assert "backend 'tcp' cannot say how it is reached: `descriptor` returned 'here', and not bytes" in str(error.value)


@pytest.mark.parametrize("how", ["returns", "raises"])
def test_probe_does_not_answer(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(options: Any) -> Any:
        if how == "raises":
            raise LookupError("no card")
        return True

    monkeypatch.setattr(load_backend("tcp"), "probe", probe)
    said = "returned True, and not a Probe" if how == "returns" else "raised LookupError: no card"
    for ask in (lambda: opened("prefill"), lambda: statelink.probe("tcp")):
        with pytest.raises(BackendUnavailableError) as error:
            ask()
        assert f"backend 'tcp' cannot say whether it runs here: its probe {said}" in str(error.value)
        assert "statelink conform tcp -k Declaration" in error.value.hint


def test_a_refusal_is_in_the_error_of_a_room_that_still_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode's backend refuses prefill: its room ends on both sides, and prefill may look at others that wait."""

    def connect(self: Any, peer: str, descriptor: bytes, regions: Any) -> None:
        raise ValueError("the card is full")

    with opened("prefill") as prefill, opened("decode", peers={"p": [prefill.address]}) as decode:
        sending, another = (prefill.send(room, 8, deadline=60) for room in (7, 8))
        with pytest.raises(RoomError) as error:
            another.check()
        assert "did not agree" not in str(error.value)
        monkeypatch.setattr(load_backend("tcp"), "connect", connect)
        failed(decode.receive(7, "p", 8, {"kv": [1, 0]}, deadline=60))

        def said() -> str:
            with pytest.raises(RoomError) as error:
                another.check()
            assert error.value.code == "room.open"
            return str(error.value)

        until(lambda: "did not agree" in said(), what="the refusal")
        assert "the card is full" in said()
        assert "the card is full" in failed(sending).cause
