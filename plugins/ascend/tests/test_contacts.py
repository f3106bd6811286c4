"""First contacts, one after the other: who waits for whom, and what a close finds."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from statelink_ascend._contacts import Contacts, Unreached

PATIENCE = 30.0


class Library:
    """Connects at once, but for a session that it waits for; says so if it is asked twice at a time."""

    def __init__(self) -> None:
        self.waits = threading.Event()
        self.goes_on = threading.Event()
        self.asked: list[str] = []
        self.released = threading.Event()
        self._one = threading.Lock()
        self.contacts = Contacts(self.connect, self.released.set)

    def connect(self, session: str) -> str:
        assert self._one.acquire(blocking=False)
        try:
            self.asked.append(session)
            if session == "silent:1":
                self.waits.set()
                assert self.goes_on.wait(PATIENCE)
                return "no luck"
            return ""
        finally:
            self._one.release()

    def make(self, peer: str, seconds: float = PATIENCE, check: str = "") -> Unreached | None:
        """Connect to a peer; why that failed."""
        try:
            self.contacts.make(peer, f"{peer}:1", seconds, lambda: check)
        except Unreached as error:
            return error
        return None


@pytest.fixture
def library() -> Iterator[Library]:
    library = Library()
    yield library
    library.goes_on.set()
    library.contacts.close()
    assert library.released.wait(PATIENCE)


def test_who_waits_is_told_for_whom(library: Library) -> None:
    """The one that does not answer is to blame, and the turn of others comes when it has ended."""
    silent = library.make("silent", 0.05)
    assert silent is not None
    assert silent.cause == "its engine at silent:1 did not answer within 0.05 s"
    other = library.make("other", 0.05)
    assert other is not None
    assert re.fullmatch(
        r"its turn has not come: the engine at silent:1 of silent has not answered for \d+ s", other.cause
    )
    assert "two minutes" in other.hint
    with ThreadPoolExecutor() as threads:
        again, waits = threads.submit(library.make, "silent"), threads.submit(library.make, "patient")
        library.goes_on.set()
        error = again.result()
        assert error is None or error.cause == "no luck"
        assert waits.result() is None
    assert library.asked[0] == "silent:1"
    assert set(library.asked) == {"silent:1", "patient:1"}


def test_a_peer_that_went_while_it_waited_is_not_asked(library: Library) -> None:
    assert library.make("silent", 0.05) is not None
    with ThreadPoolExecutor() as threads:
        late = threads.submit(library.make, "late", check="its process has gone")
        while not library.contacts._turn._waiters:  # type: ignore[attr-defined]
            time.sleep(0.001)
        library.goes_on.set()
        gone = late.result()
    assert gone is not None
    assert (gone.cause, library.asked) == ("its process has gone", ["silent:1"])
    assert library.make("other", check="it was asked just now") is None


def test_a_close_leaves_the_end_to_a_contact_that_goes_on(library: Library) -> None:
    assert library.make("silent", 0.05) is not None
    assert library.contacts.lingers() == ""
    library.contacts.close()
    library.contacts.close()
    assert library.contacts.lingers() == "silent:1 of silent"
    assert not library.released.is_set()
    closed = library.make("other")
    assert closed is not None
    assert closed.cause == "the backend is closed"
    library.goes_on.set()
    assert library.released.wait(PATIENCE)
    assert library.contacts.lingers() == ""


def test_a_close_without_a_contact_ends_at_once(library: Library) -> None:
    assert library.make("other") is None
    library.contacts.close()
    assert library.released.is_set()
