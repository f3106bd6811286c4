"""Peers made of bare sockets, that say what a link would never say."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import zmq

from statelink import wire

if TYPE_CHECKING:
    from statelink.state import Inventory

__all__ = ["PART", "cut", "dialled", "handshake_of", "raw_bytes", "routing_id", "until"]

Socket = zmq.Socket[bytes]
PART = wire.MAX_FRAME - 1024
"""Most bytes of a body in one message; a larger one is cut into parts."""


def handshake_of(name: str, role: str, inventory: Inventory, **changes: Any) -> wire.Handshake:
    """How a link over tcp introduces itself, with some fields changed."""
    usual: dict[str, Any] = {
        "link": name,
        "protocol": wire.PROTOCOL,
        "version": "0",
        "role": role,
        "backend": "tcp",
        "ops": ("write",),
        "kinds": tuple({each.kind.name: each.kind for each in inventory.components}.values()),
        "strategies": {each.name: "direct" for each in inventory.components},
        "descriptor": b"",
        "inventory": inventory,
    }
    return wire.Handshake(**{**usual, **changes})


def routing_id(name: str) -> bytes:
    """How the socket of a link's first connection introduces itself."""
    return f"{name}#0".encode()


def cut(frames: Sequence[bytes]) -> Iterator[list[bytes]]:
    """The messages that a kind and a body travel in: of a large one kind, part, and where that begins of how much."""
    kind, body = frames
    if len(body) <= PART:
        yield [kind, body]
        return
    for first in range(0, len(body), PART):
        yield [kind, body[first : first + PART], struct.pack("<QQ", first, len(body))]


def until(true: Callable[[], bool], timeout: float = 20.0) -> None:
    """Wait for something that happens in another process."""
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@contextlib.contextmanager
def dialled(address: str, name: str = "", own: dict[str, str] | None = None, server: str = "") -> Iterator[Socket]:
    """A bare socket that is connected to a link's port, under a name.

    Args:
        address: The link's.
        name: Who it says that it is.
        own: The keys that it holds, ``public`` and ``secret``; none without.
        server: The public key of who listens, where the address does not have it.
    """
    context: zmq.Context[Socket] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    if name:
        dealer.routing_id = routing_id(name)
    plain, _, key = address.partition("|")
    if own is not None:
        dealer.curve_serverkey = (server or key).encode()
        dealer.curve_secretkey, dealer.curve_publickey = own["secret"].encode(), own["public"].encode()
    dealer.connect(plain)
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
