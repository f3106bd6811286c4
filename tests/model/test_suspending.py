"""A link that cannot be suspended or resumed says so, and stays what it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.links import link_of

from statelink.errors import RoomError, TransferError
from statelink.link import _control

if TYPE_CHECKING:
    from statelink import Link


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for a control thread that is late."""
    monkeypatch.setattr(_control, "LATE_SECONDS", 0.1)


@contextmanager
def held(link: Link) -> Iterator[None]:
    """The control thread is held by a job. When this ends, it has done everything that was posted meanwhile."""
    goes_on, over = threading.Event(), threading.Event()

    def job() -> None:
        goes_on.wait(60)

    link._context.post_job(job)
    try:
        yield
    finally:
        goes_on.set()
        link._context.post_job(over.set)
        assert over.wait(60)


def fails(*given: Any) -> Any:
    raise RuntimeError("a defect")


def goes_on(link: Link) -> bool:
    """Whether rooms can be opened, and both roles take peers."""
    for room in (link.send(1, 4), link.receive(1, "tcp://127.0.0.1:1", 4)):
        room.abort("as planned")
        room.wait(60, quiesced=True)
    assert link._prefill is not None
    assert link._decode is not None
    prefill, decode = link._prefill._ranks, link._decode._instances
    return not link.suspended and prefill._waiting is None and not decode._suspended


def test_a_control_thread_that_is_late_does_not_suspend_the_link_later() -> None:
    with link_of("both") as link:
        with held(link), pytest.raises(RoomError, match="its control thread has not come to it in time") as caught:
            link.suspend(0.0)
        assert caught.value.code == "room.unfinished"
        assert goes_on(link)


def test_transfers_that_no_room_is_known_for_are_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with link_of("both") as link:
        with monkeypatch.context() as patch:
            patch.setattr(link._decode, "busy", lambda: True)
            with pytest.raises(RoomError, match="the link cannot be suspended"):
                link.suspend(0.0)
        assert goes_on(link)


def test_a_role_that_fails_leaves_none_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    with link_of("both") as link:
        with monkeypatch.context() as patch:
            patch.setattr(link._decode, "suspend", fails)
            with pytest.raises(RoomError, match="or failed"):
                link.suspend(0.0)
        assert goes_on(link)


def test_a_wait_that_is_broken_off_leaves_the_link_open(monkeypatch: pytest.MonkeyPatch) -> None:
    with link_of("both") as link:
        with monkeypatch.context() as patch:
            patch.setattr(link._table, "all", fails)  # as an exception of a signal's handler, anywhere in the wait
            with pytest.raises(RuntimeError, match="a defect"):
                link.suspend(0.0)
        assert goes_on(link)


def test_a_control_thread_that_is_late_does_not_resume_the_link_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link stays suspended, and no second registration of the memory stays behind."""
    closed: list[Any] = []
    with link_of("both") as link:
        link.suspend()
        register: Callable[[], Any] = link._context.register

        def noted() -> Any:
            backend, handshake = register()
            close = backend.close

            def note() -> None:
                closed.append(backend)
                close()

            monkeypatch.setattr(backend, "close", note)
            return backend, handshake

        monkeypatch.setattr(link._context, "register", noted)
        with held(link), pytest.raises(TransferError, match="the link cannot be resumed"):
            link.resume()
        assert link.suspended
        assert len(closed) == 1
        assert link._context.backend not in closed
        link.resume()
        assert len(closed) == 1
        assert goes_on(link)
