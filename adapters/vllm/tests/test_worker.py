"""A worker's side by itself, with a link that does what a test says: what vLLM is told, and what prefill is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from support.caches import attention, make_cache, model_of

import statelink
from statelink import LinkConfig, Status, state
from statelink.errors import Reason, RoomError
from statelink_vllm.connector import Leftovers, Receive, Send, ToWorker, WorkerSide, describe_cache

pytestmark = pytest.mark.smoke

PEER = ("tcp://127.0.0.1:7100",)
FIRST = ToWorker(receive={"a": Receive(7, PEER, 16, 0, ([3],))})
SENT = ToWorker(send={"a": Send(7, 16, ([3],))})


class Room:
    """A room that ends when the test says so, or while somebody waits for it."""

    def __init__(self) -> None:
        self.waits: list[tuple[float, bool]] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self.status, self.quiesced = Status.WAITING, False
        self.reason: Reason | None = None
        self.report = SimpleNamespace(transferred=0.001, moved={})

    def push(self, items: Mapping[str, Any]) -> None: ...

    def end(self, code: str = "") -> None:
        self.status, self.quiesced = Status.FAILED if code else Status.SUCCEEDED, True
        self.reason = Reason(code, "it ended so") if code else None

    def wait(self, timeout: float, *, quiesced: bool = False) -> Status:
        self.waits.append((timeout, quiesced))
        self.meanwhile()
        return self.status


class Link:
    """Opens rooms, unless it is told to refuse them, and notes what is declined."""

    def __init__(self) -> None:
        self.refuses = False
        self.rooms: dict[int, Room] = {}
        self.declined: list[tuple[int, Any, str]] = []
        self.deaf = False

    def send(self, room: int, tokens: int) -> Room:
        return self.rooms.setdefault(room, Room())

    def receive(self, room: int, peer: Any, tokens: int, items: Mapping[str, Any], **more: Any) -> Room:
        if self.refuses:
            raise RoomError(f"room {room} cannot be received")
        return self.rooms.setdefault(room, Room())

    def decline(self, room: int, peer: Any, why: str) -> None:
        self.declined.append((room, peer, why))
        if self.deaf:
            raise RoomError("the link is closed")


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def worker(link: Link) -> WorkerSide:
    cache = make_cache([(attention(4), (0,))])
    components, groups = describe_cache(cache.config, cache.tensors, model_of())
    config = LinkConfig.read({"role": "both", "backend": "tcp"})
    inventory, leftovers = state.describe("w", components), Leftovers(cache.config, cache.tensors, groups)
    with mock.patch.object(statelink, "open", return_value=link):
        return WorkerSide(config, inventory, groups, leftovers)


@pytest.mark.parametrize("deaf", [False, True])
def test_prefill_is_told_of_a_request_that_decode_cannot_receive(worker: WorkerSide, link: Link, deaf: bool) -> None:
    link.refuses, link.deaf = True, deaf
    worker.begin(FIRST)
    assert link.declined == [(7, PEER, "decode cannot receive it")]
    assert worker.results() == (set(), {"a"}, {"a"})
    assert worker.results() == (set(), set(), set())
    assert worker.settled


def test_prefill_is_told_of_blocks_that_decode_does_not_hold_any_more(worker: WorkerSide, link: Link) -> None:
    worker.begin(ToWorker(receive={"a": Receive(7, PEER, 48, 0, ([3, 0, 5],))}))
    assert [room for room, _, _ in link.declined] == [7]
    assert worker.results().failed == {"a"}


def test_what_decode_declines_and_cannot_is_declined_once(worker: WorkerSide, link: Link) -> None:
    link.deaf = True
    worker.begin(ToWorker(receive={"a": Receive(7, PEER, 48, why="decode needs nothing")}))
    assert link.declined == [(7, PEER, "decode needs nothing")]
    assert worker.results() == (set(), set(), set())


@pytest.mark.parametrize(
    ("code", "level", "counts"),
    [
        ("room.declined", logging.INFO, {"Transfers": 0, "Declined": 1}),
        ("room.aborted", logging.WARNING, {"Transfers": 0, "Failed: room.aborted": 1}),
    ],
)
def test_what_decode_does_not_want_is_no_failure_of_prefill(
    worker: WorkerSide, link: Link, caplog: pytest.LogCaptureFixture, code: str, level: int, counts: dict[str, int]
) -> None:
    worker.begin(SENT)
    link.rooms[7].end(code)
    log = logging.getLogger("vllm.statelink")
    with caplog.at_level(logging.INFO, log.name), mock.patch.object(log, "handle") as handle:
        assert worker.results() == ({"a"}, set(), set())
    (record,) = [call.args[0] for call in handle.call_args_list]
    assert (record.levelno, "it ended so" in record.getMessage()) == (level, True)
    stats = worker.stats()
    assert stats is not None
    assert stats.reduce() == counts


IDLE = ToWorker(idle=True)


def receiving(*numbers: int, idle: bool) -> ToWorker:
    return ToWorker(receive={f"r{n}": Receive(n, PEER, 16, 0, ([n],)) for n in numbers}, idle=idle)


def test_state_that_comes_while_a_step_computes_nothing_is_named_in_that_step(worker: WorkerSide, link: Link) -> None:
    worker.begin(receiving(1, 2, idle=False))
    link.rooms[2].meanwhile = link.rooms[2].end
    worker.begin(IDLE)
    assert worker.results() == (set(), {"r2"}, set())
    assert link.rooms[2].waits == [(0.002, True)]
    worker.begin(IDLE)
    assert worker.results() == (set(), set(), set())
    assert [link.rooms[1].waits, link.rooms[2].waits] == [[(0.002, True)]] * 2


def test_a_request_may_arrive_in_the_step_in_which_it_begins(worker: WorkerSide, link: Link) -> None:
    link.rooms[3] = Room()
    link.rooms[3].meanwhile = link.rooms[3].end
    worker.begin(receiving(3, idle=True))
    assert worker.results() == (set(), {"r3"}, set())


def test_a_step_that_computes_waits_for_nothing(worker: WorkerSide, link: Link) -> None:
    worker.begin(receiving(1, idle=True))
    worker.begin(ToWorker())
    assert worker.results() == (set(), set(), set())
    assert link.rooms[1].waits == []


@pytest.mark.parametrize("ready", ["received", "failed", "sent", "again", "nothing is received"])
def test_nothing_is_waited_for_where_there_is_something_to_say(worker: WorkerSide, link: Link, ready: str) -> None:
    worker.begin(receiving(*([] if ready == "nothing is received" else [1, 2]), idle=False))
    worker.begin(ToWorker(send={"s": Send(9, 16, ([9],))}))
    if ready in ("received", "failed"):
        link.rooms[1].end("" if ready == "received" else "room.aborted")
    if ready == "sent":
        link.rooms[9].end()
    worker.begin(ToWorker(again={"x"} if ready == "again" else set(), idle=True))
    results = worker.results()
    assert any(results) == (ready != "nothing is received")
    assert not any(room.waits for room in link.rooms.values())
