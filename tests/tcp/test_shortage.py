"""The embedded backend in a process that the system refuses a thread or a file descriptor for once."""

from __future__ import annotations

import errno
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from statelink.backend import BackendContext, Region
from statelink.errors import BackendUnavailableError, TransferError
from statelink.tcp import TcpBackend

from .common import grant_all, join, u64, write

if TYPE_CHECKING:
    from .node import Node

Refuse = Callable[[str], None]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Iterator[Refuse]:
    """Has the system refuse the next thread whose name begins like this, once."""
    start: Any = threading.Thread.start
    refused: list[str] = []

    def perhaps(thread: threading.Thread) -> None:
        for begin in refused:
            if thread.name.startswith(begin):
                refused.remove(begin)
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", perhaps)
    yield refused.append
    assert not refused, "nobody has started such a thread"


def no_descriptor(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_refused_thread_that_sends_fails_one_batch(here: Node, refuse: Refuse) -> None:
    join(here, here, "SEND")
    grant_all(here)
    refuse("tcp-send-target")
    with pytest.raises(TransferError, match="no thread can be started"):
        write(here, here, at=5000)
    assert write(here, here, at=5000).ok
    here.disconnect("source", "target")


def test_a_peer_whose_thread_was_refused_can_be_disconnected(here: Node, refuse: Refuse) -> None:
    join(here, here, "SEND")
    refuse("tcp-send-target")
    with pytest.raises(TransferError, match="no thread can be started"):
        write(here, here, at=5000)
    here.disconnect("source", "target")


@pytest.mark.parametrize("times", [1, 5])
def test_refused_threads_that_receive_delay_the_sender(here: Node, refuse: Refuse, times: int) -> None:
    join(here, here, "SEND")
    grant_all(here)
    for _ in range(times):
        refuse("tcp-receive-source")
    assert write(here, here, at=5000).ok
    here.disconnect("target", "source")


def test_a_receiver_without_threads_gets_all_over_the_connections_it_has(
    here: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(here, here, "SEND")
    grant_all(here)
    large = {"nbytes": 2100 << 10}
    assert write(here, here).ok
    assert write(here, here, **large).ok
    begin: Any = threading.Thread.start

    def unless_it_receives(thread: threading.Thread) -> None:
        if thread.name.startswith("tcp-receive-"):
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", unless_it_receives)
    place = u64(here.address), u64(here.address), u64(large["nbytes"])
    for _ in range(8):
        together = [here.write("source", "target", 1, 1, *place) for _ in range(4)]
        assert [here.outcome(each).ok for each in together] == [True] * 4


def test_a_refused_thread_that_listens_leaves_the_port_free(refuse: Refuse) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    refuse("tcp-listen")
    with pytest.raises(BackendUnavailableError, match="no thread can be started"):
        TcpBackend(BackendContext(options=TcpBackend.Options(port=port), link="link"))
    TcpBackend(BackendContext(options=TcpBackend.Options(port=port), link="link")).close()


def test_a_required_transport_that_no_thread_finds_out(refuse: Refuse) -> None:
    """The peer is not connected then, and can be connected later."""
    options = TcpBackend.Options()
    ours = TcpBackend(BackendContext(options=options, link="ours", require=frozenset({"socket"}), role="prefill"))
    theirs = TcpBackend(BackendContext(options=options, link="theirs"))
    theirs.register([])
    ours.register([])
    theirs.connect("ours", ours.descriptor(), [])
    refuse("tcp-send-theirs")
    with pytest.raises(TransferError, match="no thread can be started"):
        ours.connect("theirs", theirs.descriptor(), [])
    ours.connect("theirs", theirs.descriptor(), [])
    assert ours.transport("theirs") in ("socket", "process_vm")
    ours.close()
    theirs.close()


@pytest.mark.parametrize("left", [0, 1])
def test_connect_without_descriptors_leaves_nothing(here: Node, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    for link in ("source", "target"):
        here.open(link, same_host_copy=False)
    made: Any = socket.socketpair
    pairs = iter([made] * left)
    gc.collect()
    before = here.held()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", lambda *args: next(pairs, no_descriptor)(*args))
        with pytest.raises(TransferError, match=r"cannot connect .*Too many open files"):
            here.connect("source", "target", here.descriptor("target"))
    assert here.held() == before
    here.connect("source", "target", here.descriptor("target"))
    here.connect("target", "source", here.descriptor("source"))
    grant_all(here)
    assert write(here, here, at=5000).ok


def test_a_batch_without_a_descriptor_for_its_connection_fails(here: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    join(here, here, "SEND")
    grant_all(here)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", no_descriptor)
        outcome = write(here, here, at=5000)
    assert not outcome.ok
    assert "Too many open files" in outcome.reason
    assert write(here, here, at=5000).ok


def test_a_stranger_does_not_end_the_target_of_a_measurement() -> None:
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    ends = [
        TcpBackend.raw("tcp", TcpBackend.Options(), "127.0.0.1", [Region(each.ctypes.data, 64)])
        for each in (source, target)
    ]
    address = ends[1].address()
    host, port = address[16:].decode().split()  # behind the token
    with socket.create_connection((host, int(port))):
        pass  # it hangs up
    ends[0].connect(address, *(np.array([[each.ctypes.data, 64]], np.uint64) for each in (source, target)))
    ends[0].move()
    assert bytes(target) == bytes(source)
    for end in ends:
        end.close()
