"""Which DP rank of prefill has a request: rooms that its ranks announce, and that decode asks for. Real HTTP."""

from __future__ import annotations

import functools
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from statelink_sglang.backend import (
    MOST_ROOMS,
    ROOMS_PATH,
    Announcer,
    BootstrapServer,
    RankFinder,
    ask_ranks,
    put_rooms,
)

pytestmark = pytest.mark.smoke


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    server = BootstrapServer("127.0.0.1", 0)
    yield server
    server.close()


def _at(server: BootstrapServer) -> str:
    return f"127.0.0.1:{server.port}"


def _wait(condition: Callable[[], Any]) -> Any:
    until = time.monotonic() + 30
    while (found := condition()) is None:
        assert time.monotonic() < until
        time.sleep(0.005)
    return found


def test_a_room_is_found_at_the_rank_that_announced_it(server: BootstrapServer) -> None:
    finder, at = RankFinder(), _at(server)
    announcers = [Announcer(at, rank) for rank in range(3)]
    assert finder.find(at, 1000) is None
    announcers[2].put(1000)
    announcers[0].put(1001)
    assert _wait(lambda: finder.find(at, 1000)) == 2
    assert _wait(lambda: finder.find(at, 1001)) == 0
    assert finder.find(at, 1002) is None


def test_the_last_rank_that_announced_a_room_has_it(server: BootstrapServer) -> None:
    at = _at(server)
    put_rooms(at, 1, [5, 6], 5)
    put_rooms(at, 0, [5], 5)
    assert ask_ranks(at, [4, 5, 6], 5) == {5: 0, 6: 1}


class _Slow:
    """Asks as `ask_ranks` does, once the test lets it, and notes for how many rooms."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.go = threading.Event()

    def __call__(self, address: str, rooms: Sequence[int], timeout: float) -> dict[int, int]:
        self.asked.append(len(rooms))
        self.go.wait(30)
        return ask_ranks(address, rooms, timeout)


def test_a_scheduler_never_waits_and_rooms_are_asked_for_together(server: BootstrapServer) -> None:
    slow = _Slow()
    finder, at = RankFinder(slow), _at(server)
    rooms = range(1, 201)
    put_rooms(at, 1, list(rooms), 5)
    assert finder.find(at, 1) is None
    _wait(lambda: slow.asked or None)
    for room in rooms:  # while the server does not answer
        assert finder.find(at, room) is None
    slow.go.set()
    for room in rooms:
        assert _wait(functools.partial(finder.find, at, room)) == 1
    assert slow.asked == [1, 199]


def test_a_room_that_was_forgotten_is_asked_for_no_more(server: BootstrapServer) -> None:
    asked = list[Sequence[int]]()

    def ask(address: str, rooms: Sequence[int], timeout: float) -> dict[int, int]:
        asked.append(rooms)
        return ask_ranks(address, rooms, timeout)

    finder, at = RankFinder(ask), _at(server)
    finder.find(at, 7)
    finder.find(at, 8)
    _wait(lambda: asked or None)
    finder.forget(at, 7)
    finder.forget(at, 9)
    put_rooms(at, 1, [8], 5)
    assert _wait(lambda: finder.find(at, 8)) == 1
    finder.forget(at, 8)
    assert finder.find(at, 8) is None  # another request with this room asks anew
    _wait(lambda: finder.find(at, 8))
    assert 7 not in asked[-1]


def test_a_server_that_comes_later_is_asked_until_it_is_there() -> None:
    first = BootstrapServer("127.0.0.1", 0)
    at, port = _at(first), first.port
    first.close()
    finder, announcer = RankFinder(pause=0.02), Announcer(at, 3, pause=0.02)
    announcer.put(11)
    assert finder.find(at, 11) is None
    time.sleep(0.1)
    server = BootstrapServer("127.0.0.1", port)
    try:
        assert _wait(lambda: finder.find(at, 11)) == 3
    finally:
        server.close()


def test_the_oldest_rooms_go_first(server: BootstrapServer) -> None:
    """A server keeps 262,144 rooms."""
    at = _at(server)
    put_rooms(at, 0, range(1, MOST_ROOMS + 1), 5)
    put_rooms(at, 2, [21], 5)  # it is the newest now
    for first in range(MOST_ROOMS + 1, 132 * MOST_ROOMS, MOST_ROOMS):
        put_rooms(at, 1, range(first, first + MOST_ROOMS), 5)
    last = 132 * MOST_ROOMS
    assert ask_ranks(at, [1, 20, 21, 22, MOST_ROOMS + 1, last], 5) == {21: 2, MOST_ROOMS + 1: 1, last: 1}


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        {"schema": 1, "dp_rank": 0, "rooms": [1]},
        {"schema": 2, "dp_rank": 0},
        {"schema": 2, "dp_rank": "0", "rooms": [1]},
        {"schema": 2, "dp_rank": -1, "rooms": [1]},
        {"schema": 2, "dp_rank": True, "rooms": [1]},
        {"schema": 2, "dp_rank": 0, "rooms": ["1"]},
        {"schema": 2, "dp_rank": 0, "rooms": 1},
        {"schema": 2, "dp_rank": 0, "rooms": list(range(2001))},
    ],
)
def test_a_wrong_message_is_refused_and_the_server_lives(server: BootstrapServer, body: Any) -> None:
    for method in ("PUT", "POST"):
        if method == "POST" and isinstance(body, dict) and body.get("rooms") == [1] and body["schema"] == 2:
            continue  # decode's messages have no rank
        connection = http.client.HTTPConnection(_at(server), timeout=5)
        connection.request(method, ROOMS_PATH, json.dumps(body))
        answer = connection.getresponse()
        assert answer.status == 400, answer.read()
        connection.close()
    put_rooms(_at(server), 0, [1], 5)
    assert ask_ranks(_at(server), [1], 5) == {1: 0}
