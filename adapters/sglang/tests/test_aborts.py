"""Aborts in every place of both schedulers, and what may not happen after them. Real pools, no scheduler."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.sides import (
    FAILED,
    SUCCESS,
    TRANSFERRING,
    WAITING,
    Event,
    Lists,
    Side,
    accept,
    ask,
    give_back,
    hand_over,
    meet,
    reason,
    rooms,
    safe,
    send,
    until,
)

from statelink.errors import Reason
from statelink_sglang.backend import Manager, Receiver, Timeouts

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("sglang_context")]

N = 100


def test_an_abort_on_decode_fails_prefill_and_keeps_the_memory_until_nothing_writes(pair: tuple[Side, Side]) -> None:
    source, target = pair
    room = next(rooms)
    sender, receiver = meet(source, target, room, Lists.draw(target, N, 12), N)
    receiver.abort()
    assert receiver.poll() == FAILED
    assert receiver.abort_notified
    assert "SGLang aborted the request" in str(reason(receiver))
    until(safe(target, room), SUCCESS)
    give_back(receiver)
    until(sender.poll, FAILED)
    assert "SGLang aborted the request" in str(reason(sender))


def test_an_abort_counts_while_other_stages_wait_for_their_state(pair: tuple[Side, Side]) -> None:
    """SGLang keeps a request in its queue until it has come on every pipeline stage, and asks again then."""
    source, target = pair
    room = next(rooms)
    sender, receiver = meet(source, target, room, Lists.draw(target, N, 15), N)
    send(sender, source, Lists.draw(source, N, 16), N, [])
    until(receiver.poll, SUCCESS)
    receiver.abort()
    assert receiver.poll() == FAILED
    assert "SGLang aborted the request" in str(reason(receiver))
    until(safe(target, room), SUCCESS)
    give_back(receiver)


def test_an_abort_on_prefill_between_chunks_fails_decode(pair: tuple[Side, Side]) -> None:
    source, target = pair
    room = next(rooms)
    ours = Lists.draw(source, N, 13)
    sender, receiver = meet(source, target, room, Lists.draw(target, N, 14), N)
    sender.init(7, ours.row)
    sender.send(ours.pages[:2], None, num_kv_tokens=32)
    sender.abort()
    until(sender.poll, FAILED)
    sender.send(ours.pages[2:], [], num_kv_tokens=N - 32)  # is ignored
    until(receiver.poll, FAILED)
    failure = reason(receiver)
    assert "SGLang aborted the request" in str(failure)
    assert not failure.is_from_another_rank
    receiver.ensure_abort_notified(force_arm=True)
    assert receiver.abort_notified
    until(safe(target, room), SUCCESS)


@pytest.mark.parametrize("gives_up", [Receiver.abort, Receiver.clear, reason], ids=["abort", "clear", "vote"])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_prefill_learns_at_once_that_decode_gave_up_a_request_without_memory(
    pair: tuple[Side, Side], first: str, gives_up: Callable[[Receiver], object]
) -> None:
    source, target = pair
    room = next(rooms)
    sender = source.sender(room) if first == "prefill" else None
    receiver = target.receiver(room, N)
    receiver.init(0)
    assert receiver.poll() == WAITING
    gives_up(receiver)
    assert receiver.poll() == FAILED
    assert not receiver.abort_notified  # no memory was named: SGLang holds nothing
    sender = sender or source.sender(room)
    assert WAITING not in until(sender.poll, FAILED)
    assert "decode declined the request" in str(reason(sender))


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_prefill_learns_at_once_that_decode_aborted_before_the_two_had_met(pair: tuple[Side, Side], first: str) -> None:
    source, target = pair
    room = next(rooms)
    receiver = ask(target, room, Lists.draw(target, N, 41), N)
    sender = source.sender(room) if first == "prefill" else None
    receiver.abort()
    assert receiver.poll() == FAILED
    until(safe(target, room), SUCCESS)
    sender = sender or source.sender(room)
    until(sender.poll, FAILED)
    assert "SGLang aborted the request" in str(reason(sender))


def test_an_abort_after_init_and_before_the_first_chunk_fails_decode(pair: tuple[Side, Side]) -> None:
    source, target = pair
    room = next(rooms)
    sender, receiver = meet(source, target, room, Lists.draw(target, N, 30), N)
    sender.init(7, 1)
    sender.abort()  # from here on, SGLang frees prefill's pages, and does not poll
    until(receiver.poll, FAILED)
    assert "SGLang aborted the request" in str(reason(receiver))


def test_a_chunk_that_waits_for_its_event_is_not_read_after_an_abort(pair: tuple[Side, Side]) -> None:
    source, target = pair
    room = next(rooms)
    ours, theirs = Lists.draw(source, N, 31), Lists.draw(target, N, 32)
    sender, receiver = meet(source, target, room, theirs, N)
    sender.init(7, ours.row)
    event = sender._early_send_wait_event = Event()
    sender.send(ours.pages[:2], None, num_kv_tokens=32)
    sender.abort()
    for buffer in source.buffers("kv"):
        buffer[ours.pages[:2]] = 66  # another request's
    for buffer in target.buffers("kv"):
        buffer[theirs.pages] = 5
    until(receiver.poll, FAILED)
    until(sender.poll, FAILED)
    event.done = True
    until(safe(target, room), SUCCESS)
    hand_over(source, target, without=[*map(int, theirs.pages)])
    for buffer in target.buffers("kv"):
        assert (buffer[theirs.pages] == 5).all()


def test_no_request_succeeds_from_pages_that_were_used_again(pair: tuple[Side, Side]) -> None:
    """SGLang frees the pages of an aborted request at once, except in the queue where it waits for the transfer."""
    source, target = pair
    draw = random.Random(33)
    for _ in range(60):
        room = next(rooms)
        ours, theirs = Lists.draw(source, N, room), Lists.draw(target, N, -room % 997)
        sender, receiver = meet(source, target, room, theirs, N)
        sender.init(7, ours.row)
        for first in range(0, draw.randrange(0, 7)):  # never the last page
            sender.send(ours.pages[first : first + 1], None, num_kv_tokens=16)
        time.sleep(draw.choice([0.0, 0.001]))
        sender.abort()
        for buffer in source.buffers("kv"):
            buffer[ours.pages] = 66
        until(receiver.poll, FAILED)
        until(safe(target, room), SUCCESS)
        for buffer in target.buffers("kv"):
            buffer[theirs.pages] = 5  # the next owner's
        hand_over(source, target, without=[*map(int, theirs.pages)])
        for buffer in target.buffers("kv"):
            assert (buffer[theirs.pages] == 5).all()


def test_an_abort_after_the_last_chunk_leaves_the_right_bytes_or_a_failed_request(pair: tuple[Side, Side]) -> None:
    source, target = pair
    draw = random.Random(34)
    ends = set()
    for number in range(80):
        room = next(rooms)
        ours, theirs = Lists.draw(source, N, room), Lists.draw(target, N, -room % 997)
        source.fill(number)
        sent = [buffer[ours.pages].copy() for buffer in source.buffers("kv")]
        sender, receiver = meet(source, target, room, theirs, N)
        send(sender, source, ours, N, [48])
        time.sleep(draw.choice([0.0, 0.0, 0.0005, 0.002]))
        draw.choice([sender, receiver]).abort()
        seen: list[int] = []
        while not seen or seen[-1] not in (FAILED, SUCCESS):
            seen.append(sender.poll())
        for buffer in source.buffers("kv"):
            buffer[ours.pages] = 66  # SGLang has freed the pages
        while (end := receiver.poll()) not in (FAILED, SUCCESS):
            time.sleep(0.0005)
        ends.add(end)
        if end == SUCCESS:
            for a, b in zip(sent, target.buffers("kv"), strict=True):
                assert np.array_equal(a, b[theirs.pages])
        else:
            receiver.ensure_abort_notified(force_arm=True)
            until(safe(target, room), SUCCESS)
    assert FAILED in ends


class _Read:
    """A room from which a transfer still reads, and that fails when it is told to."""

    room, quiesced, tokens, prefix, status = 1, False, N, 0, WAITING
    reason: Reason | None = None
    taken = ""

    def lose(self) -> None:
        self.status, self.reason = FAILED, Reason("peer.lost", "decode was lost", {})

    def poll(self) -> Any:
        return self.status

    def push(self, items: Any, **more: Any) -> None: ...

    def abort(self, why: str) -> None: ...

    def take_back(self, why: str) -> None:
        self.taken = why


@pytest.fixture
def read(pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> _Read:
    """The room of the next sender."""
    room = _Read()
    monkeypatch.setattr(pair[0].link, "send", lambda number, **named: room)
    return room


def test_a_failed_request_keeps_its_pages_while_they_are_read_but_not_for_ever(
    pair: tuple[Side, Side], read: _Read
) -> None:
    source, _ = pair
    ours = Lists.draw(source, N, 43)
    sender = source.sender(next(rooms))
    sender.init(7, ours.row)
    sender.send(ours.pages[:2], None, num_kv_tokens=32)
    read.lose()
    assert [sender.poll() for _ in range(3)] == [TRANSFERRING] * 3
    with mock.patch.object(source, "timeouts", Timeouts(60.0, 60.0, hold=0.05)):
        until(sender.poll, FAILED)
    assert not read.taken
    assert "decode was lost" in str(reason(sender))
    assert read.taken  # the link counts that SGLang gives the pages to others


def test_a_request_that_has_sent_nothing_fails_at_once(pair: tuple[Side, Side], read: _Read) -> None:
    """SGLang's bootstrap queue ends the server if it sees a request on its way."""
    sender = pair[0].sender(next(rooms))
    assert sender.poll() == WAITING
    read.lose()
    assert sender.poll() == FAILED


@pytest.mark.parametrize(
    ("own", "bound", "limit"), [(30.0, None, math.inf), (30.0, 20.0, 30.0), (30.0, 60.0, 65.0), (90.0, 60.0, 90.0)]
)
def test_sglangs_time_limit_is_above_the_links_bound(
    pair: tuple[Side, Side], own: float, bound: float | None, limit: float
) -> None:
    queue = SimpleNamespace(deferred_kv_release_timeout=own)
    Manager.raise_limit(SimpleNamespace(link=SimpleNamespace(quiet_within=bound)), queue)  # type: ignore[arg-type]
    assert queue.deferred_kv_release_timeout == limit
    assert pair[1].link.quiet_within is not None  # over tcp there is one


def test_a_room_may_be_used_again_once_both_sides_are_done(pair: tuple[Side, Side]) -> None:
    source, target = pair
    room = next(rooms)
    for number in range(5):
        source.fill(100 + number)
        hand_over(source, target, room)


def test_a_room_that_was_aborted_may_be_used_again(pair: tuple[Side, Side]) -> None:
    source, target = pair
    room = next(rooms)
    sender, receiver = meet(source, target, room, Lists.draw(target, N, 35), N)
    receiver.abort()
    until(sender.poll, FAILED)
    until(safe(target, room), SUCCESS)
    give_back(receiver)
    hand_over(source, target, room)


def test_a_request_whose_forward_ran_before_decode_had_asked(pair: tuple[Side, Side]) -> None:
    """Optimistic prefill: the forward is over, and may have been run twice, before `init` and the chunks come."""
    source, target = pair
    room = next(rooms)
    sender, receiver = source.sender(room), target.receiver(room, N)
    assert [sender.poll() for _ in range(3)] == [1] * 3
    ours, theirs = Lists.draw(source, N, 36), Lists.draw(target, N, 37)
    source.fill(38)
    receiver.init(0)
    accept(receiver, target, theirs, N)
    assert set(until(sender.poll, WAITING)) <= {1, WAITING}
    send(sender, source, ours, N, [])
    until(receiver.poll, SUCCESS)
    for a, b in zip(source.buffers("kv"), target.buffers("kv"), strict=True):
        assert np.array_equal(a[ours.pages], b[theirs.pages])
