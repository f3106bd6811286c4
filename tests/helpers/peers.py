"""Peers made of bare sockets, that say what a link would never say."""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import zmq

from statelink import wire

if TYPE_CHECKING:
    from statelink.state import Inventory

Socket = zmq.Socket[bytes]
_connections = itertools.count()
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
        "kinds": tuple({each.kind.name: each.kind for each in inventory.components}.values()),
        "strategies": {each.name: "direct" for each in inventory.components},
        "descriptor": b"",
        "inventory": inventory,
    }
    return wire.Handshake(**{**usual, **changes})


def routing_id(name: str) -> bytes:
    """How the socket of a new connection of a link introduces itself; none may come back before it is gone."""
    return f"{name}#{next(_connections)}".encode()


def cut(frames: Sequence[bytes]) -> Iterator[list[bytes]]:
    """The messages that a kind and a body travel in: of a large one kind, part, and where that begins of how much."""
    kind, body = frames
    if len(body) <= PART:
        yield [kind, body]
        return
    for first in range(0, len(body), PART):
        yield [kind, body[first : first + PART], struct.pack("<QQ", first, len(body))]


def until(found: Callable[[], Any], timeout: float = 100.0, what: str = "it") -> Any:
    """Wait for something that happens elsewhere: the first true value."""
    end = time.monotonic() + timeout
    while not (value := found()):
        assert time.monotonic() < end, f"{what} did not happen within {timeout:g} s"
        time.sleep(0.001)
    return value


@contextlib.contextmanager
def dialled(address: str, name: str = "", own: dict[str, str] | None = None) -> Iterator[Socket]:
    """A bare socket that is connected to a link's port, under a name.

    Args:
        address: The link's.
        name: Who it says that it is.
        own: The keys that it holds, ``public`` and ``secret``; none without.
    """
    context: zmq.Context[Socket] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    if name:
        dealer.routing_id = routing_id(name)
    plain, key = wire.parse_endpoint(address)
    if own is not None:
        dealer.curve_serverkey = key.encode()
        dealer.curve_secretkey, dealer.curve_publickey = own["secret"].encode(), own["public"].encode()
    dealer.connect(plain)
    try:
        yield dealer
    finally:
        dealer.close()
        context.term()


def keyed(address: str, holder: dict[str, str]) -> str:
    """An address with the public key of the link that listens there."""
    return str(wire.Endpoint(address, holder["public"]))


def connect(address: str) -> socket.socket:
    """A bare connection to ``tcp://host:port``, whatever follows."""
    host, _, port = address.partition("@")[0].removeprefix("tcp://").rpartition(":")
    made = socket.create_connection((host, int(port)), timeout=10)
    made.settimeout(20)
    return made


class Recorder:
    """Stands between a caller and a port, and keeps what the caller says."""

    def __init__(self, address: str) -> None:
        self._target = address
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.said: list[bytes] = []
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        with self._server.accept()[0] as ours, connect(self._target) as theirs, contextlib.suppress(OSError):
            while True:
                for source in select.select([ours, theirs], [], [])[0]:
                    raw = source.recv(1 << 16)
                    if not raw:
                        return
                    if source is ours:
                        self.said.append(raw)
                    (theirs if source is ours else ours).sendall(raw)

    def replay(self) -> bool:
        """Say it again, piece by piece as it was said; whether the port cut us off."""
        with connect(self._target) as again:
            again.settimeout(0.1)
            for piece in [*self.said, b""]:
                try:
                    again.sendall(piece)
                    if not again.recv(1 << 16):
                        return True
                except TimeoutError:
                    continue
                except OSError:
                    return True
        return False

    def close(self) -> None:
        """Wait until one of them has hung up."""
        self._thread.join(10)
        self._server.close()


def raw_bytes(address: str, sent: bytes) -> None:
    """Bytes that are not even the socket library's."""
    with connect(address) as plain, contextlib.suppress(OSError):
        plain.sendall(sent)
        plain.settimeout(0.05)
        plain.recv(64)
