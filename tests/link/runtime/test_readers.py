"""Descriptors that the control thread watches for a backend."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests.helpers.peers import until

from statelink.link.runtime import Loop

if TYPE_CHECKING:
    from statelink.backend import EventLoop

SOON = 20.0


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()

    def receive(timeout: float | None) -> None:
        select.select([made], [], [], timeout)

    made.start(receive, lambda: None)
    yield made
    assert made.stop(SOON)
    assert made.readers.fileno() == -1


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with contextlib.ExitStack() as stack:
        made = socket.socketpair()
        for each in made:
            stack.enter_context(each)
            each.setblocking(False)
        yield made


def test_what_comes_is_read_on_the_control_thread(loop: Loop, pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    found: list[tuple[bytes, str]] = []
    readers: EventLoop = loop.readers
    readers.add_reader(ours.fileno(), lambda: found.append((ours.recv(10), threading.current_thread().name)))
    for text in (b"a", b"b"):
        found.clear()
        theirs.send(text)
        until(lambda: found, what="the call")
        assert found == [(text, "statelink-control")]
    readers.remove_reader(ours.fileno())
    theirs.send(b"c")
    # What is posted after it runs after it.
    done = threading.Event()
    loop.post_job(done.set)
    assert done.wait(SOON)
    assert ours.recv(10) == b"c"


def test_what_is_left_unread_is_not_told_again(loop: Loop, pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    calls = list[int]()
    theirs.send(b"before")
    loop.readers.add_reader(ours.fileno(), lambda: calls.append(1))
    until(lambda: calls, what="what came before")
    for count in (2, 3):
        theirs.send(b"more")
        until(lambda count=count: len(calls) == count, what="a call")  # type: ignore[misc]
    until(lambda: loop.idle, what="sleep")
    assert len(calls) == 3
    theirs.close()
    until(lambda: len(calls) == 4, what="the end")


def test_an_error_of_one_is_logged_and_others_are_called(
    loop: Loop, pair: tuple[socket.socket, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = pair
    called = threading.Event()

    def fails() -> None:
        raise RuntimeError("a defect of a backend")

    loop.readers.add_reader(ours.fileno(), fails)
    loop.readers.add_reader(theirs.fileno(), called.set)
    theirs.send(b"a")
    ours.send(b"b")
    assert called.wait(SOON)
    until(lambda: "a defect of a backend" in caplog.text, what="the log")


def test_more_descriptors_than_are_taken_at_once(loop: Loop) -> None:
    with contextlib.ExitStack() as stack:
        called: set[int] = set()
        ends = list[int]()
        for number in range(150):
            read, write = os.pipe()
            stack.callback(os.close, read)
            stack.callback(os.close, write)
            ends.append(write)
            loop.readers.add_reader(read, lambda number=number: called.add(number))  # type: ignore[misc]
        for write in ends:
            os.write(write, b"x")
        until(lambda: len(called) == 150, what="all calls")


def test_what_cannot_be_watched_is_refused(loop: Loop, pair: tuple[socket.socket, socket.socket]) -> None:
    with open("/dev/null", "rb") as file, pytest.raises(PermissionError):
        loop.readers.add_reader(file.fileno(), lambda: None)
    loop.readers.remove_reader(pair[0].fileno())  # it was never added


def test_a_closed_loop_takes_no_more(pair: tuple[socket.socket, socket.socket]) -> None:
    loop = Loop()
    loop.readers.add_reader(pair[0].fileno(), lambda: None)
    assert loop.stop(SOON)
    loop.readers.add_reader(pair[0].fileno(), lambda: pytest.fail("nobody watches"))
    loop.readers.remove_reader(pair[0].fileno())
