"""What a sender makes of replies, whoever takes them: its own thread, or the control thread of a link."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from tests.helpers.peers import until

from .by_hand import DONE, FAILED, HEADER, REFUSED, REPLY, RESEND, Caller, Stream
from .common import batch_of, opening, u64
from .node import Node

if TYPE_CHECKING:
    from statelink.backend import Transfer

COPY, SEND = 2, 1
SIZE = 100


class Written(NamedTuple):
    """A batch of one block, as a receiver sees it."""

    mode: int
    sequence: int
    payload: bytes


class Receiver:
    """A receiver that is spoken by hand, and a sender that moves blocks of `SIZE` bytes to it."""

    def __init__(self, node: Node, mode: str, *, welcome: bool = True, **options: Any) -> None:
        self.node = node
        caller = Caller("target", node.open("source", **opening(mode), **options))
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(10)
        caller.own["port"] = self._server.getsockname()[1]
        node.connect("source", "target", caller.descriptor)
        self.transfers = [self.submit()]
        self._caller, self.stream = caller, self.admitted(caller, welcome=welcome)

    def admitted(self, caller: Caller | None = None, *, welcome: bool = True) -> Stream:
        """Let the sender in, which connects."""
        return (caller or self._caller).admit(self._server.accept()[0], copy=True, welcome=welcome)

    def submit(self) -> Transfer:
        columns = {"source": u64(self.node.address), "target": u64(1000), "nbytes": u64(SIZE)}
        return self.node.backends["source"].submit("target", batch_of(self.node, **columns))

    def more(self, count: int) -> None:
        self.transfers += [self.submit() for _ in range(count)]

    def written(self, stream: Stream | None = None) -> Written:
        """The next batch."""
        stream = stream or self.stream
        magic, mode, blocks, sequence, *_, total = HEADER.unpack(stream.read(HEADER.size))
        assert (magic, blocks, total) == (b"SLw1", 1, SIZE)
        stream.read(8 * (3 if mode == COPY else 2))
        return Written(mode, sequence, stream.read(total) if mode == SEND else b"")

    def answer(self, status: int, sequence: int, reason: str = "") -> None:
        self.stream.write(REPLY.pack(b"SLr1", status, len(reason), sequence) + reason.encode())

    def over(self, at: int) -> tuple[bool, str]:
        """How a batch ended."""
        outcome = until(lambda: self.transfers[at].outcome, what=f"the end of batch {at}")
        return outcome.ok, outcome.reason

    def close(self) -> None:
        self.stream.close()
        self._server.close()


@contextlib.contextmanager
def receiving(mode: str, **options: Any) -> Iterator[Receiver]:
    node = Node(np.arange(4096, dtype=np.uint64).view(np.uint8))
    made = Receiver(node, mode, **options)
    try:
        yield made
    finally:
        made.close()
        node.close_all()


@pytest.fixture(params=["COPY", "LOOP"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def receiver(mode: str) -> Iterator[Receiver]:
    with receiving(mode) as made:
        yield made


def test_who_takes_a_reply(receiver: Receiver, mode: str) -> None:
    names = list[str]()
    receiver.transfers[0].notify(lambda: names.append(threading.current_thread().name))
    receiver.answer(DONE, receiver.written().sequence)
    assert receiver.over(0) == (True, "")
    until(lambda: names, what="the thread")
    assert names == ["statelink-control" if mode == "LOOP" else "tcp-send-target"]


def test_replies_come_in_pieces(receiver: Receiver) -> None:
    receiver.more(4)
    wrong = "it is not granted"
    told = [(DONE, ""), (REFUSED, wrong), (DONE, ""), (FAILED, "it is broken"), (DONE, "")]
    raw = b"".join(
        REPLY.pack(b"SLr1", status, len(reason), receiver.written().sequence) + reason.encode()
        for status, reason in told
    )
    for at in range(0, len(raw), 7):
        receiver.stream.write(raw[at : at + 7])
        time.sleep(0.002)
    expected = [(True, ""), (False, f"the receiver answered refused: {wrong}"), (True, "")]
    assert [receiver.over(at) for at in range(3)] == expected
    assert receiver.over(3) == (False, "the receiver answered failed: it is broken")
    assert receiver.over(4) == (True, "")
    assert all(each.outcome is not None and each.outcome.settled for each in receiver.transfers)


@pytest.mark.parametrize("wrong", ["no reply", "another batch", "twice", "sent again twice"])
def test_a_bad_reply_fails_what_is_under_way_and_nothing_before(receiver: Receiver, wrong: str) -> None:
    receiver.more(2)
    first, *_ = [receiver.written().sequence for _ in receiver.transfers]
    bad = {
        "no reply": b"x" * REPLY.size,
        "another batch": REPLY.pack(b"SLr1", DONE, 0, 77),
        "twice": REPLY.pack(b"SLr1", DONE, 0, first),
        "sent again twice": REPLY.pack(b"SLr1", RESEND, 0, first),
    }
    receiver.stream.write(REPLY.pack(b"SLr1", DONE, 0, first) + bad[wrong])
    assert receiver.over(0) == (True, "")
    for at in (1, 2):
        ok, reason = receiver.over(at)
        assert (ok, reason.startswith("lost the peer: ")) == (False, True)
    left = receiver.transfers[1].outcome
    assert left is not None
    assert left.settled is not True, "the receiver may still read"


def test_the_receiver_hangs_up_behind_a_reply(receiver: Receiver) -> None:
    receiver.more(1)
    receiver.answer(DONE, receiver.written().sequence)
    receiver.written()
    receiver.stream.close()
    assert receiver.over(0) == (True, "")
    assert receiver.over(1) == (False, "lost the peer: it closed the connection")
    assert receiver.transfers[1].outcome is not None
    assert receiver.transfers[1].outcome.settled is True
    # The next batch connects again.
    receiver.more(1)
    receiver.stream = receiver.admitted()
    receiver.answer(DONE, receiver.written().sequence)
    assert receiver.over(2) == (True, "")


def test_the_receiver_hangs_up_while_nothing_is_under_way(receiver: Receiver) -> None:
    receiver.answer(DONE, receiver.written().sequence)
    assert receiver.over(0) == (True, "")
    receiver.stream.close()
    time.sleep(0.2)
    receiver.more(1)
    receiver.stream = receiver.admitted()
    receiver.answer(DONE, receiver.written().sequence)
    assert receiver.over(1) == (True, "")


def test_what_cannot_be_read_is_sent(receiver: Receiver) -> None:
    receiver.more(1)
    sequences = [receiver.written() for _ in range(2)]
    assert [each.mode for each in sequences] == [COPY, COPY]
    last = sequences[-1].sequence
    receiver.stream.write(b"".join(REPLY.pack(b"SLr1", RESEND, 0, each.sequence) for each in sequences))
    for _ in range(2):
        again = receiver.written()
        assert again.mode == SEND
        assert again.sequence > last, "one that has a number below the last one's counts as landed"
        last = again.sequence
        assert again.payload == receiver.node.memory[:SIZE].tobytes()
        receiver.answer(DONE, again.sequence)
    receiver.more(3)
    for _ in range(3):
        later = receiver.written()
        assert later.mode == SEND
        receiver.answer(DONE, later.sequence)
    assert [receiver.over(at) for at in range(5)] == [(True, "")] * 5


def test_a_reply_moves_the_deadline(mode: str) -> None:
    with receiving(mode, stall_timeout=0.6) as receiver:
        receiver.more(4)
        sequences = [receiver.written().sequence for _ in range(5)]
        for sequence in sequences[:-1]:
            time.sleep(0.3)
            receiver.answer(DONE, sequence)
        assert [receiver.over(at) for at in range(4)] == [(True, "")] * 4
        assert receiver.over(4) == (False, "lost the peer: it made no progress in time")


def test_a_reply_comes_while_somebody_sends(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control thread does not wait for that, and the reply is not forgotten."""
    batches: Any = type(receiver.transfers[0])
    real, inside, goes_on = batches.send, threading.Event(), threading.Event()

    def slow(self: Any, stream: Any) -> bool:
        inside.set()
        assert goes_on.wait(10)
        sent: bool = real(self, stream)
        return sent

    first = receiver.written().sequence
    monkeypatch.setattr(batches, "send", slow)
    sending = threading.Thread(target=receiver.more, args=(1,))
    sending.start()
    assert inside.wait(10)
    receiver.answer(DONE, first)
    time.sleep(0.1)
    assert receiver.transfers[0].outcome is None
    goes_on.set()
    assert receiver.over(0) == (True, "")
    sending.join()
    # From then on as before.
    receiver.more(1)
    for at in (1, 2):
        receiver.answer(DONE, receiver.written().sequence)
        assert receiver.over(at) == (True, "")


@pytest.mark.parametrize("welcome", [True, False])
def test_a_receiver_that_leaves_before_its_first_answer(welcome: bool) -> None:
    """It gets the batches once more, over another connection, with the numbers that they had."""
    with receiving("SEND", welcome=welcome) as receiver:
        receiver.more(1)
        before = [receiver.written() for _ in receiver.transfers]
        receiver.stream.close()
        receiver.stream = receiver.admitted()
        assert [receiver.written() for _ in receiver.transfers] == before
        for each in before:
            receiver.answer(DONE, each.sequence)
        assert [receiver.over(at) for at in (0, 1)] == [(True, "")] * 2
        receiver.more(1)  # an answer has come: this one fails with its connection
        receiver.written()
        receiver.stream.close()
        assert "lost the peer" in receiver.over(2)[1]


def test_more_batches_than_a_receiver_remembers_are_not_sent_again() -> None:
    with receiving("SEND", connect_timeout=1000) as receiver:
        receiver.more(32)
        for _ in receiver.transfers:
            receiver.written()
        receiver.stream.close()
        assert {receiver.over(at)[0] for at in range(33)} == {False}


def test_a_receiver_that_leaves_twice() -> None:
    with receiving("SEND") as receiver:
        receiver.written()
        receiver.stream.close()
        receiver.stream = receiver.admitted()
        receiver.written()
        receiver.stream.close()
        ok, reason = receiver.over(0)
        assert not ok
        assert "lost the peer" in reason
