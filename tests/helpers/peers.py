"""Peers made of bare sockets, that say what a link would never say."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import zmq

from statelink.wire._channel import MARK

__all__ = ["dialled", "raw_bytes", "until"]

Socket = zmq.Socket[bytes]


def until(true: Callable[[], bool], timeout: float = 20.0) -> None:
    """Wait for something that happens in another process."""
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@contextlib.contextmanager
def dialled(address: str, name: str = "") -> Iterator[Socket]:
    """A bare socket that is connected to a link's port."""
    context: zmq.Context[Socket] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    if name:
        dealer.setsockopt_string(zmq.ROUTING_ID, f"{name}{MARK}0")
    dealer.connect(address)
    try:
        yield dealer
    finally:
        dealer.close()
        context.term()


def raw_bytes(address: str, sent: bytes) -> None:
    """Bytes that are not even the socket library's."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as plain, contextlib.suppress(OSError):
        plain.sendall(sent)
        plain.settimeout(0.05)
        plain.recv(64)
