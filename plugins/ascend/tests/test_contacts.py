"""First contacts, one after the other: who waits for whom, and what a close finds.

The prefill is the backend, with a library that connects at once, but to the silent peer. The decodes are sockets.
"""

from __future__ import annotations

import contextlib
import faulthandler
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from plugins.ascend.tests.test_calls import Library as AnyLibrary

from statelink.backend import BackendContext
from statelink.errors import BackendUnavailableError, TransferError
from statelink_ascend import AscendBackend, Options

PATIENCE = 30.0
CONNECTED = -2000
"""What the library returns for an empty batch, once it has connected."""


class Library(AnyLibrary):
    """Connects at once, but to the silent peer, for which it waits; fails if it is asked twice at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.silent = ""
        self.code = CONNECTED
        self.waits, self.goes_on = threading.Event(), threading.Event()
        self.asked: list[str] = []
        self._one = threading.Lock()

    def batch_transfer_sync_write(self, session: str, *_: object) -> int:
        assert self._one.acquire(blocking=False)
        try:
            self.asked.append(session)
            if session == self.silent:
                self.waits.set()
                assert self.goes_on.wait(PATIENCE)
            return self.code
        finally:
            self._one.release()


def opened_alone(link: str) -> AscendBackend:
    """A backend, as soon as an earlier one of this process is gone: a contact of it may still go on."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return AscendBackend(BackendContext(options=Options(), link=link, role="decode"))
        except BackendUnavailableError:
            assert time.monotonic() < until, "an earlier backend does not end"
            time.sleep(0.01)


class Decode:
    """A decode's two ports: a door that says what that of the backend says, and an engine's."""

    def __init__(self, link: str) -> None:
        self.link = link
        real = opened_alone(link)
        fields = msgspec.msgpack.decode(real.descriptor())
        with socket.create_connection(("127.0.0.1", fields[-1])) as visitor:
            self._says = visitor.recv(100, socket.MSG_WAITALL)
        real.close()
        self._door, self.engine = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
        port = self.engine.getsockname()[1]
        self.session = f"127.0.0.1:{port}"
        self.descriptor = msgspec.msgpack.encode([*fields[:3], port, *fields[4:-1], self._door.getsockname()[1]])
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        while True:
            try:
                visitor = self._door.accept()[0]
            except OSError:
                return
            with visitor:
                visitor.sendall(self._says)

    def end(self) -> None:
        for each in (self._door, self.engine):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # which wakes the thread
            each.close()
        self._thread.join()


class World:
    """The prefill and three decodes."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.silent, self.other, self.late = self.decodes = [Decode(link) for link in ("silent", "other", "late")]
        library.silent = self.silent.session
        self.threads = ThreadPoolExecutor()
        self.open(PATIENCE)

    def open(self, patience: float) -> None:
        options = Options(connect_timeout=patience)
        self.backend = AscendBackend(BackendContext(options=options, link="here", role="prefill"))

    def connect(self, decode: Decode) -> str:
        """Connect to a peer; why that failed."""
        try:
            self.backend.connect(decode.link, decode.descriptor, ())
        except TransferError as error:
            return str(error)
        return ""

    def connect_to_the_silent(self) -> Any:
        """The same on another thread, to the one that does not answer; returns once the library waits for it."""
        found = self.threads.submit(self.connect, self.silent)
        assert self.library.waits.wait(PATIENCE)
        return found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    library = Library()
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", library)
    world = World(library)
    yield world
    library.goes_on.set()
    world.backend.close()
    world.threads.shutdown()
    for decode in world.decodes:
        decode.end()


def test_who_waits_is_told_for_whom(world: World) -> None:
    """The one that does not answer is to blame."""
    world.backend.close()
    world.open(2.0)
    silent = world.connect_to_the_silent()
    other = world.connect(world.other)
    session = re.escape(world.silent.session)
    assert re.search(rf"its turn has not come: the engine at {session} of silent has not answered for \d+ s", other)
    assert "two minutes" in other
    assert f"its engine at {world.silent.session} did not answer within " in silent.result()
    assert world.library.asked == [world.silent.session]


def test_the_turn_of_others_comes(world: World) -> None:
    """Who asks for the same peer again waits for the same contact."""
    silent = world.connect_to_the_silent()
    again, other = (world.threads.submit(world.connect, each) for each in (world.silent, world.other))
    world.library.goes_on.set()
    assert [each.result() for each in (silent, again, other)] == ["", "", ""]
    assert world.library.asked[0] == world.silent.session
    assert set(world.library.asked) == {world.silent.session, world.other.session}


def waits_for_its_turn() -> bool:
    """Whether a thread of this process waits for another contact to end, by the stacks of all threads."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return bool(re.search(r' in wait\n.*_contacts\.py", line \d+ in make\n', file.read()))


def test_a_peer_that_went_while_it_waited_is_not_asked(world: World) -> None:
    silent = world.connect_to_the_silent()
    late = world.threads.submit(world.connect, world.late)
    world.late.engine.accept()[0].close()  # it was found to answer
    while not waits_for_its_turn():
        time.sleep(0.001)
    world.late.end()
    world.library.goes_on.set()
    assert "its process does not answer" in late.result()
    assert silent.result() == ""
    assert world.library.asked == [world.silent.session]


def test_a_contact_that_goes_on_after_a_close_refuses_other_links(world: World) -> None:
    silent = world.connect_to_the_silent()
    world.backend.close()
    world.backend.close()
    assert "the backend is closed" in world.connect(world.other)
    lingers = rf"the library still waits for the engine at {re.escape(world.silent.session)} of silent"
    with pytest.raises(BackendUnavailableError, match=lingers):
        world.open(PATIENCE)
    world.library.goes_on.set()
    silent.result()
    opened_alone("again").close()


def test_first_contact_that_seems_to_succeed(world: World) -> None:
    """A library that takes empty lists for a success did not connect."""
    world.library.code = 0
    assert "cannot be reached: it took an empty batch" in world.connect(world.other)
    world.library.code = CONNECTED
    assert world.connect(world.other) == ""
    assert world.library.asked == [world.other.session] * 2
