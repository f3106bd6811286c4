"""Memory that SGLang gives away for a while, and takes back at the same addresses. Real pools, no scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from support.sides import (
    BOOTSTRAPPING,
    FAILED,
    TRANSFERRING,
    WAITING,
    Lists,
    Side,
    accept,
    ask,
    hand_over,
    meet,
    reason,
    rooms,
    sides,
    until,
)

from statelink.errors import TransferError

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("sglang_context")]

N = 100


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)], ids=["prefill", "decode", "both"])
def test_links_live_on_while_memory_is_away(pair: tuple[Side, Side], which: tuple[int, ...]) -> None:
    hand_over(*pair)
    links = [side.link for side in pair]
    for number in which:
        pair[number].deregister_buffer_to_engine()
        assert pair[number].link.suspended
    for number in which:
        pair[number].register_buffer_to_engine()
    assert [side.link for side in pair] == links  # nobody has to look for them again
    hand_over(*pair)


def test_a_request_that_comes_while_memory_is_away_fails_on_prefill_and_waits_on_decode(
    pair: tuple[Side, Side],
) -> None:
    source, target = pair
    source.deregister_buffer_to_engine()
    sender = source.sender(next(rooms))
    assert sender.poll() == FAILED
    assert "the link is suspended" in str(reason(sender))
    room = next(rooms)
    receiver = ask(target, room, Lists.draw(target, N, 1), N)
    assert receiver.poll() == TRANSFERRING
    source.register_buffer_to_engine()
    sender = source.sender(room)
    until(sender.poll, WAITING)
    sender.abort()
    until(receiver.poll, FAILED)


def test_prefill_learns_of_requests_that_decode_gave_up_while_its_memory_was_away(
    pair: tuple[Side, Side],
) -> None:
    """Prefill would wait for each until its time limit."""
    source, target = pair
    target.deregister_buffer_to_engine()
    senders, receivers = [], []
    for give_up in ("names its memory", "is aborted"):
        room = next(rooms)
        senders.append(source.sender(room))
        receiver = target.receiver(room, N)
        receivers.append(receiver)
        receiver.init(0)
        if give_up == "is aborted":
            receiver.abort()
        else:
            accept(receiver, target, Lists.draw(target, N, 3), N)
        assert receiver.poll() == FAILED
    assert [sender.poll() for sender in senders] == [BOOTSTRAPPING] * 2
    target.register_buffer_to_engine()
    for sender, why in zip(senders, ("the link is suspended", "SGLang aborted the request"), strict=True):
        until(sender.poll, FAILED)
        assert "decode declined the request" in str(reason(sender))
        assert why in str(reason(sender))
    hand_over(source, target)


@pytest.mark.parametrize("side", [0, 1], ids=["prefill", "decode"])
def test_requests_that_have_not_ended_are_given_up(pair: tuple[Side, Side], side: int) -> None:
    """A paused scheduler may have some."""
    source, target = pair
    room = next(rooms)
    transfers: Any = meet(source, target, room, Lists.draw(target, N, 2), N)
    transfers[0].init(7, 1)
    pair[side].deregister_buffer_to_engine()
    assert transfers[side].poll() == FAILED
    until(transfers[1 - side].poll, FAILED)
    for each in transfers:
        assert "SGLang gives its memory away" in str(reason(each))
    pair[side].register_buffer_to_engine()
    hand_over(source, target)


class _Used:
    """A room to whose memory something writes until it is taken back."""

    quiesced, taken = False, ""

    def abort(self, why: str) -> None: ...

    def wait(self, timeout: float, *, quiesced: bool) -> None: ...

    def take_back(self, why: str) -> None:
        self.taken = why


def test_memory_that_does_not_get_quiet_is_taken_back(pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    used: Any = _Used()
    side = pair[1]
    monkeypatch.setattr(type(side.link), "rooms", lambda link: [used])
    side.deregister_buffer_to_engine()
    assert used.taken == "SGLang gives its memory away"
    assert side.link.suspended
    side.register_buffer_to_engine()


@pytest.mark.parametrize("which", [0, 1], ids=["prefill", "decode"])
def test_a_link_that_cannot_be_suspended_is_opened_anew(
    which: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The library may have the old memory registered, whose pages another process has by then."""
    with sides("mha") as (sources, targets):
        side = (sources[0], targets[0])[which]
        before = side.link

        def suspend(timeout: float) -> None:
            raise TransferError("the memory cannot be unregistered", cause="as planned")

        monkeypatch.setattr(before, "suspend", suspend)
        side.deregister_buffer_to_engine()
        assert "transfers may still touch memory that SGLang gives away" in caplog.text
        side.register_buffer_to_engine()
        assert side.link is not before
        if which == 1:
            hand_over(sources[0], targets[0])
