"""Senders and receivers between SGLang's real pools, driven as SGLang's queues drive them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.pools import GROUP, make
from support.sides import (
    ADDRESS,
    BOOTSTRAPPING,
    FAILED,
    SUCCESS,
    TRANSFERRING,
    WAITING,
    Event,
    Lists,
    Side,
    accept,
    ask,
    at,
    give_back,
    hand_over,
    meet,
    reason,
    rooms,
    send,
    sides,
    until,
)

from statelink import Room
from statelink_sglang.backend import Receiver, Timeouts, TransferFailed

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("sglang_context")]

N = 100


@pytest.mark.parametrize("prefix", [0, 64])
@pytest.mark.parametrize("kind", ["mha", "mxfp8", "mla", "swa", "swa_mxfp8", "hybrid", "gdn", "qsa", "dsa", "minimax"])
def test_every_item_arrives_in_chunks(kind: str, prefix: int) -> None:
    with sides(kind) as ((source,), (target,)):
        source.fill(1)
        room = next(rooms)
        ours, theirs = Lists.draw(source, N, 2), Lists.draw(target, N, 3)
        sender, receiver = meet(source, target, room, theirs, N, prefix=prefix)
        assert sender.pop_decode_prefix_len() == prefix
        send(sender, source, ours, N, [64] if kind == "dsa" else [32, 96])
        until(receiver.poll, SUCCESS)
        until(sender.poll, SUCCESS)
        for part in source.parts:
            sent, arrived = ours.indices(part, source, N, prefix), theirs.indices(part, target, N, prefix)
            for a, b in zip(source.buffers(part), target.buffers(part), strict=True):
                assert np.array_equal(a[sent], b[arrived]), part
                others = np.setdiff1d(np.arange(len(b)), arrived)
                assert not b[others].any(), f"{part}: items that were not named have changed"
        metric = sender.get_transfer_metric()
        assert metric.transfer_latency_s > 0
        assert metric.transfer_total_bytes > 0


@pytest.mark.parametrize(("tokens", "spare"), [(259, 0), (259, 3), (257, 1), (260, 0)])
def test_the_open_group_of_index_keys_arrives(tokens: int, spare: int) -> None:
    """Decode's ring may have more rows, for drafts."""
    pools = iter([make("pooled"), make("pooled", spare=spare)])
    with sides(lambda tp: next(pools)) as ((source,), (target,)):
        source.fill(1)
        room = next(rooms)
        ours, theirs = Lists.draw(source, tokens, 2), Lists.draw(target, tokens, 3)
        sender, receiver = meet(source, target, room, theirs, tokens)
        send(sender, source, ours, tokens, [256])
        until(receiver.poll, SUCCESS)
        positions = np.arange(tokens - tokens % GROUP, tokens)
        rings = (side.made.pools.pages.full_kv_pool.get_compress_tail_buffers(0) for side in (source, target))
        for a, b in zip(*rings, strict=True):
            sent, ring = a.view(torch.int16).numpy(), b.view(torch.int16).numpy()
            arrived = ring[theirs.slot, positions % (GROUP + spare)]
            assert np.array_equal(sent[ours.slot, positions % GROUP], arrived)
            assert np.count_nonzero(ring.any(axis=2)) == len(positions)


class _Unread:
    """The room of a rank from which no decode rank reads: the link ends it as soon as decode has asked."""

    tokens, prefix, reason, quiesced, status = N, 0, None, True, SUCCESS

    def __init__(self) -> None:
        self.pushed: list[tuple[int, int]] = []

    def poll(self) -> Any:
        return SUCCESS

    def push(self, items: Any, *, span: tuple[int, int], layers: Any = None, ready: Any, last: bool) -> None:
        self.pushed.append(span)


def test_a_rank_from_which_nobody_reads_ends_with_its_last_chunk_and_not_before(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = pair
    ours = Lists.draw(source, N, 20)
    unread: Any = _Unread()
    monkeypatch.setattr(source.link, "send", lambda room, **named: unread)
    sender = source.sender(next(rooms))
    assert sender.poll() == WAITING
    sender.init(7, ours.row)
    sender.send(ours.pages[:2], None, num_kv_tokens=32)
    assert sender.poll() == TRANSFERRING
    sender.send(ours.pages[2:], [], num_kv_tokens=N - 32)
    assert sender.poll() == SUCCESS
    source.calls.drain()
    assert unread.pushed == [(0, 32), (32, N)]


def test_each_queue_sees_only_states_that_it_allows(pair: tuple[Side, Side]) -> None:
    source, target = pair
    room = next(rooms)
    ours, theirs = Lists.draw(source, N, 7), Lists.draw(target, N, 8)
    sender, receiver = source.sender(room), target.receiver(room, N)
    assert sender.poll() == 1
    assert receiver.poll() == 1
    receiver.init(0)
    assert receiver.poll() == WAITING  # before anything is heard of prefill
    accept(receiver, target, theirs, N)
    before = until(sender.poll, WAITING)
    assert set(before) <= {1, WAITING}
    sender.init(7, ours.row)
    sender.send(ours.pages[:2], None, num_kv_tokens=32)
    assert sender.poll() in (WAITING, TRANSFERRING)
    assert receiver.poll() == TRANSFERRING
    sender.send(ours.pages[2:], [], num_kv_tokens=N - 32)
    assert set(until(sender.poll, SUCCESS)) <= {WAITING, TRANSFERRING, SUCCESS}
    assert set(until(receiver.poll, SUCCESS)) <= {TRANSFERRING, SUCCESS}
    for transfer in (sender, receiver):
        transfer.clear()
        assert transfer.poll() == SUCCESS


def test_a_poll_without_news_asks_no_layer_below(pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang polls each request in every round of its loop."""
    source, target = pair
    room = next(rooms)
    sender, receiver = source.sender(room), target.receiver(room, N)
    asked: list[Any] = []

    def poll(room: Room) -> Any:
        asked.append(room)
        return room.status

    monkeypatch.setattr(Room, "poll", poll)
    assert {sender.poll() for _ in range(100)} == {BOOTSTRAPPING}  # a time limit runs
    assert len(asked) == 1
    receiver.init(0)
    accept(receiver, target, Lists.draw(target, N, 40), N)
    until(sender.poll, WAITING)
    (receiving,) = (each for each in target.link.rooms() if each.room == room)
    until(lambda: receiving.status, WAITING)
    for transfer in (sender, receiver):
        before = transfer.poll()
        asked.clear()
        assert {transfer.poll() for _ in range(100)} == {before}
        assert not asked
    sender.init(7, 1)
    assert sender.poll() == WAITING
    receiver.abort()
    assert receiver.poll() == FAILED
    until(sender.poll, FAILED)


def test_a_chunk_that_is_sent_early_waits_for_its_event(pair: tuple[Side, Side]) -> None:
    source, target = pair
    room = next(rooms)
    ours, theirs = Lists.draw(source, N, 9), Lists.draw(target, N, 10)
    sender, receiver = meet(source, target, room, theirs, N)
    source.fill(11)
    sender.init(7, ours.row)
    event = sender._early_send_wait_event = Event()
    sender.send(ours.pages[:2], None, num_kv_tokens=32)
    assert sender._early_send_wait_event is None
    sender.send(ours.pages[2:], [], num_kv_tokens=N - 32)
    hand_over(source, target)  # a chunk that did not wait would have been read by now
    for buffer in source.buffers("kv"):
        buffer[ours.pages[:2]] = 77  # the forward that writes them ends only now
    event.done = True
    until(receiver.poll, SUCCESS)
    for buffer in target.buffers("kv"):
        assert (buffer[theirs.pages[:2]] == 77).all()


def test_a_rank_that_another_rank_fails_says_so_and_gives_the_room_up(pair: tuple[Side, Side]) -> None:
    from sglang.test.manual.disaggregation import test_disaggregation_peer_liveness_abort as peer_liveness

    source, target = pair
    room = next(rooms)
    sender, receiver = meet(source, target, room, Lists.draw(target, N, 15), N)
    voted = reason(receiver)
    assert voted.is_from_another_rank
    assert "the vote of this server's ranks aborted the transfer" in str(voted)
    until(sender.poll, FAILED)
    failure = reason(sender)
    assert not failure.is_from_another_rank
    assert "decode aborted the request" in str(failure)
    assert "the vote of this server's ranks aborted the transfer" in str(failure)
    # SGLang's own test of aborts takes these answers for clean ones, whatever stands around them.
    for each in (voted, failure):
        assert peer_liveness._is_abort_result(500, {"error": {"message": str(each)}})


def test_prefill_waits_for_decode_no_longer_than_sglang_says(pair: tuple[Side, Side]) -> None:
    source, _ = pair
    with mock.patch.object(source, "timeouts", Timeouts(bootstrap=0.05, waiting=60.0)):
        sender = source.sender(next(rooms))
        until(sender.poll, FAILED)
    assert "decode never asked for it" in str(reason(sender))
    assert "the limit is SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT" in str(reason(sender))


def test_decode_waits_for_the_state_no_longer_than_sglang_says(pair: tuple[Side, Side]) -> None:
    source, target = pair
    with mock.patch.object(target, "timeouts", Timeouts(bootstrap=60.0, waiting=0.05)):
        room = next(rooms)
        sender, receiver = source.sender(room), ask(target, room, Lists.draw(target, N, 16), N)
        until(receiver.poll, FAILED)
        assert "it still waits for" in str(reason(receiver))
        assert "the limit is SGLANG_DISAGGREGATION_WAITING_TIMEOUT" in str(reason(receiver))
        until(sender.poll, FAILED)


def test_a_request_that_waits_for_memory_does_not_time_out(pair: tuple[Side, Side]) -> None:
    _, target = pair
    with mock.patch.object(target, "timeouts", Timeouts(bootstrap=0.0, waiting=0.0)):
        receiver = target.receiver(next(rooms), N)
        receiver.init(0)
        assert [receiver.poll() for _ in range(3)] == [WAITING] * 3
    receiver.abort()


def test_the_reason_of_a_failure_can_be_sent(pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that a request names may put half a character into it, with which SGLang's encoder ends."""
    _, target = pair
    monkeypatch.setattr(target, "why_unknown", lambda address: "prefill is starting: \ud800 are missing")
    receiver = target.receiver(next(rooms), N)
    receiver.abort()  # SGLang has asked often enough
    assert receiver.poll() == FAILED
    assert r"prefill is starting: \ud800 are missing" in str(reason(receiver))
    assert str(reason(receiver)).encode()


@pytest.mark.parametrize("room", [0, None, -1, 1 << 64])
def test_a_room_that_is_no_room_fails_the_request_and_not_the_scheduler(pair: tuple[Side, Side], room: Any) -> None:
    source, target = pair
    sender, receiver = source.sender(room), ask(target, room, Lists.draw(target, N, 24), N)
    for transfer in (sender, receiver):
        assert transfer.poll() == FAILED
        assert "room" in str(reason(transfer))


def test_a_room_that_is_in_use_fails_the_second_request(pair: tuple[Side, Side]) -> None:
    source, _ = pair
    room = next(rooms)
    first, second = source.sender(room), source.sender(room)
    assert second.poll() == FAILED
    assert "in use" in str(reason(second))
    assert first.poll() == 1
    first.abort()


@pytest.mark.parametrize(
    ("pages", "states", "tokens", "said"),
    [
        (6, [], N, "6 of 7 pages"),
        (7, [], N - 1, r"tokens \[0, 99\) of 100"),
        (7, None, N, "before the last chunk"),
    ],
)
def test_a_chunk_that_does_not_add_up_fails_the_request(
    pair: tuple[Side, Side], pages: int, states: Any, tokens: int, said: str
) -> None:
    source, target = pair
    room = next(rooms)
    ours = Lists.draw(source, N, 17)
    sender, receiver = meet(source, target, room, Lists.draw(target, N, 18), N)
    sender.init(7, ours.row)
    sender.send(ours.pages[:pages], states, num_kv_tokens=tokens)
    until(sender.poll, FAILED)
    with pytest.raises(TransferFailed, match=said):
        sender.failure_exception()
    until(receiver.poll, FAILED)


def test_a_prefill_that_is_gone_fails_requests_that_have_not_met_it(pair: tuple[Side, Side]) -> None:
    _, target = pair
    gone = at("tcp://127.0.0.1:9")
    with mock.patch.dict(target.prefill_info_table, {ADDRESS: gone}):
        asks, queues = ask(target, next(rooms), Lists.draw(target, N, 19), N), target.receiver(next(rooms), N)
        queues.init(0)
        assert (asks.poll(), queues.poll()) == (TRANSFERRING, WAITING)
        gone.instances[0].gone = "the prefill server was started anew"
        for receiver in (asks, queues):
            until(receiver.poll, FAILED)
            assert "started anew" in str(reason(receiver))


def test_a_prefill_that_is_not_known_fails_the_request(pair: tuple[Side, Side]) -> None:
    _, target = pair
    with mock.patch.dict(target.prefill_info_table, clear=True):
        receiver = target.receiver(next(rooms), N)
        receiver.init(0)
        assert receiver.poll() == FAILED
        assert "the prefill server at 127.0.0.1:1 is not known" in str(reason(receiver))


class _Written:
    """A room to whose memory something writes until it is said to be quiet."""

    quiesced, reason, taken = False, None, ""

    def abort(self, why: str) -> None: ...

    def close(self) -> None: ...

    def take_back(self, why: str) -> None:
        self.taken = why


def _failed(target: Side, room: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Receiver, _Written]:
    """A request that has failed after it had named its memory."""
    written: Any = _Written()
    with monkeypatch.context() as patched:
        patched.setattr(target.link, "receive", lambda *given, **more: written)
        receiver = ask(target, room, Lists.draw(target, N, 42), N)
    receiver.ensure_abort_notified(force_arm=True)
    return receiver, written


def test_sglang_may_free_the_memory_of_a_failed_request_when_the_link_says_so_and_not_before(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, target = pair
    room = next(rooms)
    receiver, written = _failed(target, room, monkeypatch)
    assert not target.is_abort_release_safe(room, 0)
    written.quiesced = True
    assert target.is_abort_release_safe(room, 0)
    give_back(receiver)
    assert not written.taken


def test_memory_that_sglang_takes_back_after_its_own_time_is_released(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, written = _failed(pair[1], next(rooms), monkeypatch)
    give_back(receiver)
    assert "time limit" in written.taken


@pytest.mark.parametrize("quiet", [0, 1], ids=["the first is quiet", "the second is quiet"])
def test_two_failed_requests_with_one_room_keep_their_memory_apart(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, quiet: int
) -> None:
    """The second one fails because the first is not quiet on another rank."""
    _, target = pair
    room = next(rooms)
    requests = [_failed(target, room, monkeypatch) for _ in range(2)]
    requests[quiet][1].quiesced = True
    assert not target.is_abort_release_safe(room, 0)
    give_back(requests[quiet][0])
    _, written = requests[1 - quiet]
    assert not written.taken
    assert not target.is_abort_release_safe(room, 0)
    written.quiesced = True
    assert target.is_abort_release_safe(room, 0)
    give_back(requests[1 - quiet][0])
    assert not written.taken


def test_a_request_that_named_no_memory_here_gives_no_memory_back(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank's queue waits if memory has to be kept on one of them."""
    _, target = pair
    room = next(rooms)
    without = target.receiver(room, N)
    without.abort()
    _, written = _failed(target, room, monkeypatch)
    give_back(without)
    assert not written.taken
    assert not target.is_abort_release_safe(room, 0)
