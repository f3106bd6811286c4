"""A client or a server that cannot be opened leaves nothing."""

from __future__ import annotations

import errno
import gc
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.helpers.links import client
from tests.helpers.peers import until

from statelink.errors import ConfigError
from statelink.rendezvous import RendezvousServer

ADDRESS = "tcp://127.0.0.1:1"
Opens = Callable[[], Any]
OF_STATELINK = [
    pytest.param(lambda: client(ADDRESS, "link"), id="client"),
    pytest.param(RendezvousServer, id="server"),
]
ETCD = pytest.param(lambda: client("etcd://127.0.0.1:1", "link"), id="etcd")


def leaves_nothing(opens: Opens, kind: type[Exception], text: str) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(kind, match=text) as caught:
        opens()
    # The error holds what the constructor had, so that nothing is closed by chance. ZeroMQ's own threads take a moment.
    until(lambda: len(os.listdir("/proc/self/fd")) == before, 5.0, f"the end of what was open at {caught.value!r}")


@pytest.mark.parametrize("opens", [*OF_STATELINK, ETCD])
def test_no_thread(opens: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    start: Any = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        if thread.name == "statelink-rendezvous":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", none_left)
    leaves_nothing(opens, RuntimeError, "can't start new thread")


@pytest.mark.parametrize("opens", OF_STATELINK)
def test_no_descriptors_for_a_pair_of_sockets(opens: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socketpair", none_left)
    leaves_nothing(opens, OSError, "Too many open files")


def test_an_address_that_nobody_can_listen_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        leaves_nothing(lambda: RendezvousServer(f"tcp://127.0.0.1:{port}"), ConfigError, "cannot listen")


def test_a_server_that_cannot_be_dialled() -> None:
    dial = "tcp://127.0.0.1:1@" + "A" * 43
    leaves_nothing(lambda: client(dial, "link"), ConfigError, "cannot dial")
