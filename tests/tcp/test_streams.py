"""Several connections between two links: small batches do not wait for large ones."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from tests.helpers.peers import until

from statelink.errors import ConfigError
from statelink.tcp import TcpBackend

from . import by_hand
from .common import MODES, POISON, SLOWLY, SPACE, grant_all, join, u64, write

if TYPE_CHECKING:
    from .node import Node
    from .remote import Remote

LARGE = 3 << 20
"""Bytes that do not go over the first connection."""


def receiving() -> int:
    """Threads of this process that receive: one for each connection."""
    return sum(each.name.startswith("tcp-receive-") for each in threading.enumerate())


def start(source: Any, target: Any, count: int, nbytes: int = LARGE) -> list[int]:
    """Start batches that write the same memory."""
    place = u64(source.address), u64(target.address), u64(nbytes)
    return [source.do("write", "source", "target", 1, 1, *place) for _ in range(count)]


@pytest.mark.parametrize("mode", MODES)
def test_a_small_batch_does_not_wait_for_a_large_one(source: Remote, target: Remote, mode: str) -> None:
    target.do("reads", **SLOWLY)
    join(source, target, mode)
    grant_all(target)
    source.memory[:] = 1
    (large,) = start(source, target, 1, SPACE - 1000)
    until(lambda: target.memory[0] == 1, what="the first byte")
    assert write(source, target, at=SPACE - 1000).ok
    assert source.do("pending", large), "the large batch had ended"
    assert (target.memory[-1000:] == 1).all()
    target.do("reads")
    assert source.do("outcome", large).ok
    assert (target.memory == 1).all()


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [({}, {}, 4), ({"streams": 2}, {}, 2), ({}, {"streams": 3}, 3), ({"streams": 1}, {}, 1)],
    ids=["as many as usual", "as the sender says", "as the receiver says", "one"],
)
def test_there_are_as_many_connections_as_both_sides_allow(
    source: Remote, here: Node, ours: dict[str, int], theirs: dict[str, int], expected: int
) -> None:
    sent = source.do("open", "source", same_host_copy=False, **ours)
    source.do("connect", "source", "target", here.do("open", "target", same_host_copy=False, **theirs))
    here.connect("target", "source", sent)
    grant_all(here)
    before = receiving()
    assert write(source, here).ok
    assert receiving() - before == 1, "small batches need one"
    assert all(source.do("outcome", each).ok for each in start(source, here, 20))
    assert receiving() - before == expected
    np.testing.assert_array_equal(here.memory[:LARGE], source.memory[:LARGE])
    here.disconnect("target", "source")
    assert receiving() == before


def test_threads_that_submit_together_make_no_connection_too_many(here: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver would hang up on it, and its batches would fail."""
    join(here, here, "SEND", streams=2)
    grant_all(here)
    assert write(here, here).ok
    made: Any = socket.socketpair
    together, begun, numbers = threading.Barrier(4), threading.Event(), list[int]()

    def slowly(*args: Any) -> Any:
        begun.set()
        time.sleep(0.3)  # the others look meanwhile
        return made(*args)

    def submit() -> None:
        together.wait(10)
        numbers.extend(start(here, here, 1, 2100 << 10))

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", slowly)
        threads = [threading.Thread(target=submit) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert begun.is_set()
    assert sum(each.name.startswith("tcp-send-target") for each in threading.enumerate()) == 2
    assert [here.outcome(each).ok for each in numbers] == [True] * 4


def test_a_peer_that_knows_of_no_more_gets_one(source: Remote, here: Node) -> None:
    """Its description does not say a number."""
    sent = source.do("open", "source")
    described = by_hand.fields_of(here.open("target"))
    del described["streams"]
    source.do("connect", "source", "target", by_hand.MAGIC + msgspec.msgpack.encode(described))
    here.connect("target", "source", sent)
    grant_all(here)
    assert all(source.do("outcome", each).ok for each in start(source, here, 5))
    assert receiving() == 1


def test_on_one_host_there_is_one_for_large_batches(source: Remote, here: Node) -> None:
    """Several threads share such a batch anyway."""
    join(source, here)
    grant_all(here)
    assert write(source, here).ok
    assert all(source.do("outcome", each).ok for each in start(source, here, 20))
    assert receiving() == 2


def test_a_process_without_descriptors_goes_on_with_the_connections_it_has(here: Node) -> None:
    join(here, here, "SEND")
    grant_all(here)
    assert write(here, here).ok
    here.memory[:] = POISON
    half = len(here.memory) // 2
    place = u64(here.address), u64(here.address + half), u64(half)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as lowest:
        free = lowest.fileno()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        large = here.do("write", "source", "target", 1, 1, *place)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert here.do("outcome", large).ok


@pytest.mark.parametrize("streams", [0, 65])
def test_a_number_that_makes_no_sense_is_refused(streams: int) -> None:
    with pytest.raises(ConfigError):
        TcpBackend.Options(streams=streams)
