"""Which DP rank of prefill has a request: rooms that its ranks announce, and that decode asks for. Real HTTP."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from support.bootstrap import FOR_EVER, OURS, answering, at, put, row, send, wait

from statelink_sglang.backend import (
    MOST_ROOMS,
    ROOMS_PATH,
    SCHEMA,
    Bootstrap,
    BootstrapServer,
    KeyPair,
    RankFinder,
    Registrar,
    ask_ranks,
)

pytestmark = pytest.mark.smoke


def _dp(rank: int, ranks: int = 3) -> Any:
    return row(0, 1, f"dp-{rank}", (rank, ranks))


def put_rooms(server: BootstrapServer, rank: int, rooms: Sequence[int], pair: KeyPair = OURS) -> None:
    Bootstrap(at(server), pair).put_rooms(rank, rooms, 30)


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    """A server at which three DP ranks are registered."""
    server = BootstrapServer("127.0.0.1", 0, FOR_EVER)
    for rank in range(3):
        put(server, _dp(rank))
    yield server
    server.close()


def test_a_room_is_found_at_the_rank_that_announced_it() -> None:
    with contextlib.closing(BootstrapServer("127.0.0.1", 0)) as server, contextlib.ExitStack() as ranks:
        finder, where = RankFinder(), at(server)
        made = [Registrar(Bootstrap(where, KeyPair()), _dp(rank), pause=0.02) for rank in range(3)]
        for each in made:
            ranks.callback(each.close)
        assert finder.find(where, 1000) is None
        made[2].announce(1000)
        made[0].announce(1001)
        assert wait(lambda: finder.find(where, 1000)) == 2
        assert wait(lambda: finder.find(where, 1001)) == 0
        assert finder.find(where, 1002) is None


def test_the_last_rank_that_announced_a_room_has_it(server: BootstrapServer) -> None:
    put_rooms(server, 1, [5, 6])
    put_rooms(server, 0, [5])
    assert ask_ranks(at(server), [4, 5, 6], 30) == {5: 0, 6: 1}


@pytest.mark.parametrize(
    ("rank", "forger"), [(1, KeyPair()), (3, OURS), (4000, OURS)], ids=["another's", "none of three", "far outside"]
)
def test_only_a_registered_rank_announces_rooms(server: BootstrapServer, rank: int, forger: KeyPair) -> None:
    put_rooms(server, 0, [5])
    with pytest.raises(ValueError, match=f"answered 409: .* not registered as the first rank of DP rank {rank}"):
        put_rooms(server, rank, [5, 6], forger)
    assert ask_ranks(at(server), [5, 6], 30) == {5: 0}


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
    finder, where = RankFinder(slow), at(server)
    rooms = range(1, 201)
    put_rooms(server, 1, list(rooms))
    assert finder.find(where, 1) is None
    wait(lambda: slow.asked or None)
    for room in rooms:  # while the server does not answer
        assert finder.find(where, room) is None
    slow.go.set()
    for room in rooms:
        assert wait(functools.partial(finder.find, where, room)) == 1
    assert slow.asked == [1, 199]


def test_a_room_that_was_forgotten_is_asked_for_no_more(server: BootstrapServer) -> None:
    asked = list[Sequence[int]]()

    def ask(address: str, rooms: Sequence[int], timeout: float) -> dict[int, int]:
        asked.append(rooms)
        return ask_ranks(address, rooms, timeout)

    finder, where = RankFinder(ask), at(server)
    finder.find(where, 7)
    finder.find(where, 8)
    wait(lambda: asked or None)
    finder.forget(where, 7)
    finder.forget(where, 9)
    put_rooms(server, 1, [8])
    assert wait(lambda: finder.find(where, 8)) == 1
    finder.forget(where, 8)
    assert finder.find(where, 8) is None  # another request with this room asks anew
    wait(lambda: finder.find(where, 8))
    assert 7 not in asked[-1]


def test_a_server_that_comes_later_is_asked_until_it_is_there() -> None:
    first = BootstrapServer("127.0.0.1", 0)
    where, port, asked = at(first), first.port, list[str]()
    first.close()

    def ask(address: str, rooms: Sequence[int], timeout: float) -> dict[int, int]:
        asked.append(address)
        return ask_ranks(address, rooms, timeout)

    finder = RankFinder(ask, pause=0.02)
    with contextlib.closing(Registrar(Bootstrap(where, KeyPair()), _dp(2), pause=0.02)) as registrar:
        registrar.announce(11)
        assert finder.find(where, 11) is None
        wait(lambda: len(asked) > 2 or None)
        with contextlib.closing(BootstrapServer("127.0.0.1", port)):
            assert wait(lambda: finder.find(where, 11)) == 2


def test_the_oldest_rooms_of_a_rank_go_first(server: BootstrapServer) -> None:
    """A server keeps 262,144 rooms: a third of them for each of three DP ranks."""
    share = (1 << 18) // 3
    put_rooms(server, 0, range(1, MOST_ROOMS + 1))
    put_rooms(server, 1, range(MOST_ROOMS + 1, 2 * MOST_ROOMS + 1))
    put_rooms(server, 1, [MOST_ROOMS + 21])  # it is the newest of its rank
    first, last = 10**6, 10**6 + 50 * MOST_ROOMS
    for begin in range(first, last, MOST_ROOMS):
        put_rooms(server, 1, range(begin, begin + MOST_ROOMS))
    asked = [1, MOST_ROOMS, MOST_ROOMS + 21, last - share - 1, last - share, last - 1]
    assert ask_ranks(at(server), asked, 30) == {1: 0, MOST_ROOMS: 0, last - share: 1, last - 1: 1}


HOSTILE = [
    b'{"schema": 2, "ranks": {"7": 1e400}}',
    b'{"schema": 2, "ranks": {"7": NaN}}',
    b'{"schema": 2, "ranks": {"7": true}}',
    b'{"schema": 2, "ranks": {"7": "1"}}',
    b'{"schema": 2, "ranks": {"7": %s}}' % (b"9" * 5000),
    b'{"schema": 2, "ranks": [7]}',
    b'{"schema": 2}',
    b"[" * 60_000,
    b'{"ranks": {"7": ' + b"[" * 900 + b"]" * 900 + b"}}",
    b"\xff",
]


@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_an_answer_of_another_kind_is_a_reason_and_no_traceback(
    answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "statelink.sglang")
    with answering(lambda *asked: (200, answer)) as where:
        finder = RankFinder(pause=0.02)
        assert finder.find(where, 7) is None
        wait(lambda: len([each for each in caplog.messages if "gave an answer of another kind" in each]) > 1 or None)
        finder.forget(where, 7)
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


WRONG = [
    b"{}",
    b"[]",
    b'{"schema": 1, "dp_rank": 0, "rooms": [1]}',
    b'{"schema": 2.0, "dp_rank": 0}',
    b'{"schema": NaN, "dp_rank": 0, "rooms": []}',
    *(
        b'{"schema": 2, "dp_rank": 0, "rooms": %s}' % rooms
        for rooms in (b'["1"]', b"1", b"[1e400]", b"[true]", b"[NaN]")
    ),
    b'{"schema": 2, "dp_rank": 0, "rooms": [%s]}' % (b"9" * 5000),
    json.dumps({"schema": SCHEMA, "dp_rank": 0, "rooms": list(range(MOST_ROOMS + 1))}).encode(),
    b"[" * 60_000,
    b"nul",
    b"\xff\xfe",
]
WRONG_RANKS = [
    b'{"schema": 2, "dp_rank": %s, "rooms": [1]}' % rank for rank in (b'"0"', b"-1", b"true", b"1e400", b"[[]]")
]


def test_a_wrong_message_is_refused_and_the_server_lives(
    server: BootstrapServer, caplog: pytest.LogCaptureFixture
) -> None:
    told, asked = [*WRONG, *WRONG_RANKS], WRONG  # decode's questions have no rank
    for method, body in (*(("PUT", each) for each in told), *(("POST", each) for each in asked)):
        status, answer = send(server, method, ROOMS_PATH, body)
        assert (status, bool(json.loads(answer)["error"])) == (400, True), body
    put_rooms(server, 0, [1])
    assert ask_ranks(at(server), [1], 30) == {1: 0}
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
