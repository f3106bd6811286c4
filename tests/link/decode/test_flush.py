"""On decode, what peers wrote becomes visible to the device before anybody is told that it is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.links import Rank, hand_over

from statelink import Status
from statelink.errors import RoomError, TransferError
from statelink.pointers import Checked

if TYPE_CHECKING:
    import statelink

PATIENCE = 20.0


class Flush:
    """A flush that takes until the test lets it go on, or that fails."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.error = threading.Event(), threading.Event(), ""
        self.count = 0
        self.effect: Callable[[], object] = lambda: None

    def __call__(self) -> None:
        self.count += 1
        self.begun.set()
        assert self.go_on.wait(PATIENCE)
        self.effect()
        if self.error:
            raise TransferError("writes to device 0 could not be flushed", cause=self.error)


@pytest.fixture
def flush(monkeypatch: pytest.MonkeyPatch) -> Flush:
    """What the memory of links needs from now on."""
    made = Flush()
    monkeypatch.setattr(Checked, "flushing", lambda checked: made)
    return made


Pair = tuple["statelink.Link", "statelink.Link", Rank, Rank]


@pytest.fixture
def pair(flush: Flush) -> Iterator[Callable[..., Pair]]:
    opened: list[statelink.Link] = []

    def make(**config: Any) -> Pair:
        ranks = Rank("prefill", 1), Rank("decode")
        for role, rank in zip(("prefill", "decode"), ranks, strict=True):
            opened.append(rank.open({"role": role, "backend": "tcp", **config}))
        return (opened[0], opened[1], *ranks)

    yield make
    flush.go_on.set()
    for each in opened:
        each.close(5)


def begin(prefill: statelink.Link, decode: statelink.Link) -> tuple[Any, Any]:
    sending = prefill.send(1, 160)
    sending.push({"kv": range(10)})
    return sending, decode.receive(1, prefill.address, 160, {"kv": range(20, 30)})


def test_a_room_succeeds_after_the_flush(flush: Flush, pair: Callable[..., Pair]) -> None:
    prefill, decode, *_ = pair()
    sending, receiving = begin(prefill, decode)
    assert flush.begun.wait(PATIENCE)
    assert receiving.wait(0.2) is Status.WAITING or receiving.status is Status.TRANSFERRING
    assert sending.status is Status.TRANSFERRING  # prefill is told nothing yet
    assert not receiving.quiesced
    flush.go_on.set()
    assert receiving.wait(PATIENCE) is Status.SUCCEEDED
    assert sending.wait(PATIENCE) is Status.SUCCEEDED
    assert flush.count == 1


def test_digests_are_compared_after_the_flush(flush: Flush, pair: Callable[..., Pair]) -> None:
    """The bytes are stale until then."""
    prefill, decode, _, target = pair(verify="digest")
    sending, receiving = begin(prefill, decode)
    assert flush.begun.wait(PATIENCE)
    arrived = target.arrays.copy()
    target.arrays[:] = 0
    flush.effect = lambda: np.copyto(target.arrays, arrived)
    flush.go_on.set()
    assert receiving.wait(PATIENCE) is Status.SUCCEEDED
    assert sending.wait(PATIENCE) is Status.SUCCEEDED


def test_hooks_read_after_a_flush(flush: Flush, pair: Callable[..., Pair]) -> None:
    """Staging scatters what arrived in its ring."""
    flush.go_on.set()
    prefill, decode, source, target = pair(staging={"mode": "always"})
    hand_over(prefill, decode, source, target)
    assert flush.count > 1  # for the hooks, and for the room


def test_a_flush_that_fails(flush: Flush, pair: Callable[..., Pair]) -> None:
    flush.error = "CUDA error 700"
    prefill, decode, *_ = pair()
    _, receiving = begin(prefill, decode)
    assert flush.begun.wait(PATIENCE)
    flush.go_on.set()
    assert receiving.wait(PATIENCE) is Status.FAILED
    with pytest.raises(RoomError, match="could not be flushed"):
        receiving.check()


def test_a_room_that_ends_meanwhile(flush: Flush, pair: Callable[..., Pair]) -> None:
    prefill, decode, *_ = pair()
    _, receiving = begin(prefill, decode)
    assert flush.begun.wait(PATIENCE)
    receiving.abort("not needed any more")
    assert receiving.wait(PATIENCE, quiesced=True) is Status.FAILED
    flush.go_on.set()
    assert receiving.wait(1) is Status.FAILED


def test_prefill_flushes_nothing(flush: Flush, pair: Callable[..., Pair]) -> None:
    pair()
    assert flush.count == 0
