"""A worker's side by itself, with a link that does what a test says: what vLLM is told, and what prefill is told."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from support.caches import attention, make_cache, model_of

import statelink
from statelink import LinkConfig, Status, state
from statelink.errors import Reason, RoomError
from statelink_vllm.connector import FromWorker, Keep, Leftovers, Receive, Send, ToWorker, WorkerSide, describe_cache

pytestmark = pytest.mark.smoke

PEER = ("tcp://127.0.0.1:7100",)
FIRST = ToWorker(receive={"a": Receive(7, PEER, 16, 0, ([3],))})
SENT = ToWorker(send={"a": Send(7, 16, ([3],))})


class Room:
    """A room that ends when the test says so."""

    def __init__(self) -> None:
        self.status, self.quiesced = Status.WAITING, False
        self.reason: Reason | None = None
        self.report = SimpleNamespace(transferred=0.001, moved={})
        self.waits: list[bool] = []
        self.soon = self.claimed = False
        self.given_up: list[str] = []

    def wait(self, timeout: float, *, quiesced: bool) -> Status:
        assert 0 < timeout <= 0.005
        self.waits.append(quiesced)
        if self.soon:
            self.end()
        return self.status

    def abort(self, why: str) -> None:
        self.end("room.aborted")

    def push(self, items: Mapping[str, Any], *, ready: Any = None) -> None: ...

    def abort_unclaimed(self, why: str) -> None:
        self.given_up.append(why)

    def end(self, code: str = "") -> None:
        self.status, self.quiesced = Status.FAILED if code else Status.SUCCEEDED, True
        self.reason = Reason(code, "it ended so") if code else None


class Link:
    """Receives nothing, and notes what is declined."""

    def __init__(self) -> None:
        self.rooms: dict[int, Room] = {}
        self.declined: list[tuple[int, Any, str]] = []
        self.kept: list[tuple[int, Any, float]] = []
        self.deaf = False

    def send(self, room: int, tokens: int, *, deadline: float | None = None, content: bytes | None = None) -> Room:
        return self.rooms.setdefault(room, Room())

    def receive(self, room: int, peer: Any, tokens: int, items: Mapping[str, Any], **more: Any) -> Any:
        raise RoomError(f"room {room} cannot be received")

    def keep(self, room: int, peer: Any, seconds: float) -> None:
        self.kept.append((room, peer, seconds))
        if self.deaf:
            raise RoomError("the link is closed")

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
    link.deaf = deaf
    worker.begin(FIRST)
    assert link.declined == [(7, PEER, "decode cannot receive it: room 7 cannot be received")]
    assert worker.results() == (set(), {"a"}, {"a"})
    assert worker.results() == (set(), set(), set())
    assert worker.settled


@pytest.mark.parametrize(
    ("step", "level", "said"),
    [
        (FIRST, logging.WARNING, "the state of request a cannot be received, and kv_load_failure_policy decides"),
        (ToWorker(send={"a": Send(7, 16, ([3],))}), logging.WARNING, "the state of request a cannot be sent"),
        (ToWorker(send={"a": Send(7, 16, why="no")}), logging.DEBUG, "the state of request a cannot be sent"),
    ],
)
def test_what_ends_one_request_is_a_warning(
    worker: WorkerSide, link: Link, caplog: pytest.LogCaptureFixture, step: ToWorker, level: int, said: str
) -> None:
    log = logging.getLogger("vllm.statelink")
    error = RoomError("room 7 is in use", code="room.in_use")
    with (
        mock.patch.multiple(link, send=mock.Mock(side_effect=error), receive=mock.Mock(side_effect=error)),
        caplog.at_level(logging.DEBUG, log.name),
        mock.patch.object(log, "handle") as handle,
    ):
        worker.begin(step)
    (record,) = [call.args[0] for call in handle.call_args_list]
    assert record.levelno == level
    assert said in record.getMessage()
    assert record.getMessage().endswith("room.in_use: room 7 is in use")


@pytest.mark.parametrize(("code", "level"), [("room.in_use", logging.DEBUG), ("closed", logging.WARNING)])
def test_what_another_request_declines_is_no_news(
    worker: WorkerSide, link: Link, caplog: pytest.LogCaptureFixture, code: str, level: int
) -> None:
    """vLLM makes a second request of a client that leaves while state is loaded. The first one has the room."""
    log = logging.getLogger("vllm.statelink")
    with (
        mock.patch.object(link, "decline", side_effect=RoomError("room 7 cannot be declined", code=code)),
        caplog.at_level(logging.DEBUG, log.name),
        mock.patch.object(log, "handle") as handle,
    ):
        worker.begin(ToWorker(receive={"a": Receive(7, PEER, 48, why="decode gave it up")}))
    (record,) = [call.args[0] for call in handle.call_args_list]
    assert record.levelno == level
    assert worker.results() == (set(), set(), set())


def test_prefill_is_told_of_blocks_that_decode_does_not_hold_any_more(worker: WorkerSide, link: Link) -> None:
    worker.begin(ToWorker(receive={"a": Receive(7, PEER, 48, 0, ([3, 0, 5],))}))
    assert [room for room, _, _ in link.declined] == [7]
    assert worker.results().failed == {"a"}


def test_what_decode_declines_and_cannot_is_declined_once(worker: WorkerSide, link: Link) -> None:
    link.deaf = True
    worker.begin(ToWorker(receive={"a": Receive(7, PEER, 48, why="decode needs nothing")}))
    assert link.declined == [(7, PEER, "decode needs nothing")]
    assert worker.results() == (set(), set(), set())


def receiving(worker: WorkerSide, link: Link, names: str) -> list[Room]:
    """Rooms of requests that the worker receives from now on, one for each letter."""
    rooms = [Room() for _ in names]
    with mock.patch.object(link, "receive", side_effect=list(rooms)):
        worker.begin(
            ToWorker(receive={name: Receive(at, PEER, 16, 0, ([at],)) for at, name in enumerate(names, 3)}, idle=True)
        )
    return rooms


def test_a_step_without_a_model_waits_a_moment_for_state(worker: WorkerSide, link: Link) -> None:
    first, second = receiving(worker, link, "ab")
    assert worker.results() == (set(), set(), set())
    assert (first.waits, second.waits) == ([True], [])
    first.soon = True
    assert worker.results() == (set(), {"a"}, set())
    assert worker.results() == (set(), set(), set())
    assert second.waits == [True]


@pytest.mark.parametrize("other", ["a model runs", "one has ended", "one cannot be received"])
def test_nothing_waits_where_vllm_has_something_to_do(worker: WorkerSide, link: Link, other: str) -> None:
    first, second = receiving(worker, link, "ab")
    if other == "a model runs":
        worker.begin(ToWorker())
    elif other == "one has ended":
        second.end("room.aborted")
    else:
        worker.begin(ToWorker(receive={"c": Receive(9, PEER, 16, 0, ([7],))}, idle=True))
    failed = {"a model runs": set(), "one has ended": {"b"}}.get(other, {"c"})
    assert worker.results() == (set(), failed, failed)
    assert (first.waits, second.waits) == ([], [])


@pytest.mark.parametrize("deaf", [False, True])
def test_prefill_is_asked_to_keep_what_waits_for_blocks(worker: WorkerSide, link: Link, deaf: bool) -> None:
    link.deaf = deaf
    worker.begin(ToWorker(keep={"a": Keep(7, PEER, 30.0)}))
    assert link.kept == [(7, PEER, 30.0)]
    assert worker.results() == (set(), set(), set())
    assert worker.settled


def test_a_rank_gives_up_what_it_is_told_to_unless_decode_has_claimed_it(worker: WorkerSide, link: Link) -> None:
    worker.begin(ToWorker(send={name: Send(at, 16, ([at],)) for at, name in enumerate("abcd", 3)}))
    link.rooms[3].claimed = link.rooms[5].claimed = True
    worker.begin(ToWorker(unclaimed={"a": "others wait", "b": "others wait", "c": "", "d": "", "gone": "others wait"}))
    assert [link.rooms[at].given_up for at in (3, 4, 5, 6)] == [[], ["others wait"], [], []]
    assert worker.said() == FromWorker(claimed={"a", "c"})
    assert worker.said() is None


def test_of_the_lengths_that_are_offered_one_is_taken_and_the_others_end(worker: WorkerSide, link: Link) -> None:
    """The blocks are held until nothing reads them for any of these."""
    worker.begin(ToWorker(send={"a": Send(7, 16, ([3],), shorter=(Send(8, 12, ([3],)), Send(9, 4, ([3],))))}))
    link.rooms[8].end()
    assert worker.results() == (set(), set(), set())
    assert [len(link.rooms[at].given_up) for at in (7, 8, 9)] == [1, 0, 1]
    link.rooms[7].end("room.unclaimed")
    assert worker.results() == (set(), set(), set())
    link.rooms[9].end("room.unclaimed")
    assert worker.results() == ({"a"}, set(), set())
    stats = worker.stats()
    assert stats is not None
    assert stats.reduce()["Transfers"] == 1


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("history", [False, True])
def test_a_history_that_nobody_has_any_more_is_not_waited_for(
    worker: WorkerSide, link: Link, monkeypatch: pytest.MonkeyPatch, history: bool, known: bool
) -> None:
    """Prefill may not have computed a prompt yet. Of a turn before, the other server has the room, or never will."""
    room, now = Room(), 0.0
    room.status = Status.WAITING if known else Status.BOOTSTRAPPING
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with mock.patch.object(link, "receive", return_value=room):
        worker.begin(ToWorker(receive={"a": Receive(7, PEER, 16, 0, ([3],), history=history)}))
    assert not any(worker.results())
    now = 60.0
    given_up = history and not known
    assert worker.results() == (set(), {"a"} if given_up else set(), {"a"} if given_up else set())


def test_a_step_that_only_holds_waits_for_what_is_held(worker: WorkerSide, link: Link) -> None:
    worker.begin(ToWorker(send=SENT.send, idle=True))
    link.rooms[7].soon = True
    assert worker.results() == ({"a"}, set(), set())


@pytest.mark.parametrize(("code", "declined"), [("room.deadline", 1), ("room.unclaimed", 1), ("peer.lost", 0)])
def test_a_conversation_that_does_not_go_on_is_no_failure(
    worker: WorkerSide, link: Link, code: str, declined: int
) -> None:
    worker.begin(ToWorker(send={"a": Send(7, 16, ([3],), hold=60.0)}))
    link.rooms[7].end(code)
    worker.results()
    stats = worker.stats()
    assert stats is not None
    assert stats.reduce().get("Declined", 0) == declined


@pytest.mark.parametrize(
    ("code", "level", "counts"),
    [
        ("room.declined", logging.INFO, {"Transfers": 0, "Declined": 1}),
        ("room.aborted", logging.WARNING, {"Transfers": 0, "Failed: room.aborted": 1}),
        ("room.unclaimed", logging.DEBUG, {"Transfers": 0, "Failed: room.unclaimed": 1}),
    ],
)
def test_what_decode_does_not_want_is_no_failure_of_prefill(
    worker: WorkerSide, link: Link, caplog: pytest.LogCaptureFixture, code: str, level: int, counts: dict[str, int]
) -> None:
    worker.begin(SENT)
    link.rooms[7].end(code)
    log = logging.getLogger("vllm.statelink")
    with caplog.at_level(logging.DEBUG, log.name), mock.patch.object(log, "handle") as handle:
        assert worker.results() == ({"a"}, set(), set())
    (record,) = [call.args[0] for call in handle.call_args_list]
    assert (record.levelno, "it ended so" in record.getMessage()) == (level, True)
    stats = worker.stats()
    assert stats is not None
    assert stats.reduce() == counts
