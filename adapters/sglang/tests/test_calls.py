"""The thread that makes prefill's calls to the link: their order, and requests that end before their calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.sides import (
    ADDRESS,
    BOOTSTRAPPING,
    FAILED,
    SUCCESS,
    TRANSFERRING,
    WAITING,
    Lists,
    Side,
    ask,
    at,
    hand_over,
    meet,
    reason,
    rooms,
    safe,
    send,
    sides,
    until,
)

from statelink import Sending
from statelink_sglang.backend import Calls, Sender

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("sglang_context")]

N = 100


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def gate(pair: tuple[Side, Side]) -> Iterator[threading.Event]:
    """Prefill's thread of calls makes no call before this is set."""
    opened = threading.Event()
    pair[0].calls.put((opened.wait, ()))
    yield opened
    opened.set()


def test_calls_are_made_in_order_on_one_other_thread(calls: Calls) -> None:
    made: list[tuple[int, int]] = []
    for number in range(1000):
        calls.put((lambda each: made.append((each, threading.get_ident())), (number,)))
    assert calls.drain()
    assert [number for number, _ in made] == list(range(1000))
    (thread,) = {thread for _, thread in made}
    assert thread != threading.get_ident()


def test_a_call_that_raises_is_logged_and_the_next_one_is_made(calls: Calls, caplog: pytest.LogCaptureFixture) -> None:
    calls.put((int, ("no number",)))
    assert calls.drain()
    assert "no number" in caplog.text


def test_drain_says_that_a_call_has_not_returned(calls: Calls) -> None:
    opened = threading.Event()
    calls.put((opened.wait, ()))
    assert not calls.drain(0.01)
    opened.set()
    assert calls.drain()


def test_the_schedulers_thread_opens_no_room_and_pushes_nothing(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    threads: list[int] = []

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **more: Any) -> Any:
            threads.append(threading.get_ident())
            return call(*given, **more)

        return wrapped

    monkeypatch.setattr(source.link, "send", noted(source.link.send))
    monkeypatch.setattr(Sending, "push", noted(Sending.push))
    room = next(rooms)
    sender, receiver = Sender(source, "unused", room), ask(target, room, Lists.draw(target, N, 50), N)
    until(sender.poll, WAITING)
    send(sender, source, Lists.draw(source, N, 51), N, [32])
    until(receiver.poll, SUCCESS)
    until(sender.poll, SUCCESS)
    assert len(threads) == 3  # the room, and two chunks
    assert threading.get_ident() not in threads


def test_a_request_whose_room_is_not_open_waits_for_decode(pair: tuple[Side, Side], gate: threading.Event) -> None:
    source, target = pair
    room = next(rooms)
    sender = Sender(source, "unused", room)
    ask(target, room, Lists.draw(target, N, 52), N)
    assert [sender.poll() for _ in range(3)] == [BOOTSTRAPPING] * 3
    assert all(each.room != room for each in source.link.rooms())
    gate.set()
    assert set(until(sender.poll, WAITING)) <= {BOOTSTRAPPING, WAITING}
    sender.abort()


@pytest.mark.parametrize(
    ("gives_up", "said"),
    [
        (Sender.abort, "SGLang aborted the request"),
        (Sender.clear, "SGLang gave the request up"),
        (reason, "the vote of this server"),
    ],
)
def test_decode_learns_of_a_request_that_ended_before_its_room_was_open(
    pair: tuple[Side, Side], gate: threading.Event, gives_up: Callable[[Sender], object], said: str
) -> None:
    source, target = pair
    room = next(rooms)
    sender, receiver = Sender(source, "unused", room), ask(target, room, Lists.draw(target, N, 53), N)
    gives_up(sender)
    assert (sender.poll() == FAILED) == (gives_up is not Sender.clear)
    gate.set()
    until(receiver.poll, FAILED)
    assert said in str(reason(receiver))
    until(safe(target, room), SUCCESS)


def test_a_failed_request_keeps_its_pages_until_no_push_of_it_is_to_come(pair: tuple[Side, Side]) -> None:
    source, target = pair
    room = next(rooms)
    ours, theirs = Lists.draw(source, N, 54), Lists.draw(target, N, 55)
    sender, receiver = meet(source, target, room, theirs, N)
    for buffer in target.buffers("kv"):
        buffer[theirs.pages] = 5
    opened = threading.Event()
    source.calls.put((opened.wait, ()))
    try:
        send(sender, source, ours, N, [])
        sender.abort()
        until(receiver.poll, FAILED)
        assert [sender.poll() for _ in range(3)] == [TRANSFERRING] * 3
    finally:
        opened.set()
    assert set(until(sender.poll, FAILED)) <= {TRANSFERRING, FAILED}
    until(safe(target, room), SUCCESS)
    for buffer in target.buffers("kv"):
        assert (buffer[theirs.pages] == 5).all()


def _pages(ours: Lists) -> tuple[Any, list[Any]]:
    return np.full_like(ours.pages, 1 << 20), []


def _states(ours: Lists) -> tuple[Any, list[Any]]:
    return ours.pages, [[1]]


class _Unreadable:
    def __iter__(self) -> Any:
        raise NotImplementedError("no states")


def _no_states(ours: Lists) -> tuple[Any, Any]:
    return ours.pages, _Unreadable()


@pytest.mark.parametrize(
    ("wrong", "said"), [(_pages, "component 'kv'"), (_states, "zip()"), (_no_states, "NotImplementedError: no states")]
)
def test_a_chunk_that_is_refused_fails_the_request_and_not_the_thread(
    pair: tuple[Side, Side], wrong: Callable[[Lists], tuple[Any, list[Any]]], said: str
) -> None:
    source, target = pair
    room = next(rooms)
    sender, receiver = meet(source, target, room, Lists.draw(target, N, 56), N)
    sender.init(7, 1)
    sender.send(*wrong(Lists.draw(source, N, 57)), num_kv_tokens=N)
    until(sender.poll, FAILED)
    assert said in str(reason(sender))
    until(receiver.poll, FAILED)
    assert source.calls.drain(60.0)


def test_memory_is_given_away_only_after_the_calls_that_were_put_before(
    pair: tuple[Side, Side], gate: threading.Event
) -> None:
    source, _ = pair
    sender = Sender(source, "unused", next(rooms))
    threading.Timer(0.2, gate.set).start()
    source.deregister_buffer_to_engine()
    source.register_buffer_to_engine()
    until(sender.poll, FAILED)
    assert "SGLang gives its memory away" in str(reason(sender))


def test_requests_fail_while_the_calls_are_waited_for(pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that both waits can share one deadline."""
    source, _ = pair
    sender = source.sender(next(rooms))
    drain: Callable[[float], bool] = source.calls.drain
    seen: list[int] = []

    def drained(timeout: float) -> bool:
        seen.extend(until(sender.poll, FAILED))
        return drain(timeout)

    monkeypatch.setattr(source.calls, "drain", drained)
    source.deregister_buffer_to_engine()
    source.register_buffer_to_engine()
    assert seen[-1] == FAILED


@pytest.mark.parametrize("returns", ["while the memory is away", "after it is back"])
def test_memory_stays_registered_under_a_call_that_does_not_return(
    returns: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with sides("mha") as ((source,), (target,)):
        before, opened, ends = source.link, threading.Event(), list[str]()

        def noted(name: str, end: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*given: Any) -> Any:
                ends.append(f"{name}, call {'over' if opened.is_set() else 'running'}")
                return end(*given)

            return wrapped

        for name in ("suspend", "close"):
            monkeypatch.setattr(before, name, noted(name, getattr(before, name)))
        sender = source.sender(next(rooms))
        source.calls.put((opened.wait, ()))
        late = Sender(source, "unused", next(rooms))
        try:
            with monkeypatch.context() as short:
                drain = source.calls.drain
                short.setattr(source.calls, "drain", lambda timeout: drain(0.01))
                source.deregister_buffer_to_engine()
            assert sender.poll() == FAILED
            assert "SGLang gives its memory away" in str(reason(sender))
            assert "rank 0 of 1: SGLang gives its memory away, and it stays registered" in caplog.text
            assert not ends
            if returns == "after it is back":
                source.register_buffer_to_engine()
        finally:
            opened.set()
        assert source.calls.drain(60.0)
        until(late.poll, FAILED)
        if returns == "while the memory is away":
            assert ends == ["close, call over"]
            source.register_buffer_to_engine()
        assert source.link is not before
        assert not any(end.startswith("suspend") for end in ends)
        target.prefill_info_table[ADDRESS] = at(source.link.address)
        hand_over(source, target)
