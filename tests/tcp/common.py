"""What the tests of the embedded backend share."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from statelink.backend import Batch, Blocks, Op
from statelink.tcp import Options, _handshake
from statelink.tcp._descriptor import Descriptor, pair_key
from statelink.tcp._stream import Stream, Waker

from .node import Node, Remote

U64 = npt.NDArray[np.uint64]

SPACE = 24 << 20
POISON = 0xA5
MODES = ("COPY", "SEND")
SMALL_BUFFERS = {"send_buffer": 32 << 10, "receive_buffer": 32 << 10}


def u64(*values: int) -> U64:
    return np.array(values, np.uint64)


@contextlib.contextmanager
def extra_process(nbytes: int = SPACE) -> Iterator[Remote]:
    remote = Remote(nbytes)
    remote.memory[:] = POISON
    try:
        yield remote
    finally:
        remote.end()


def join(source: Any, target: Any, mode: str = "COPY", *, a: str = "source", b: str = "target", **options: Any) -> None:
    """Open a link at both ends and connect them; everything at the target is claimed to be one region."""
    options = {"same_host_copy": mode == "COPY", **options}
    ours, theirs = source.do("open", a, **options), target.do("open", b, **options)
    source.do("connect", a, b, theirs)
    target.do("connect", b, a, ours)


def grant_all(target: Any, room: int = 1, generation: int = 1, *, a: str = "source", b: str = "target") -> None:
    target.do("grant", b, a, room, generation, u64(target.address), u64(len(target.memory)))


def write(source: Any, target: Any, *, room: int = 1, generation: int = 1, at: int = 0, nbytes: int = 1000) -> Any:
    """Write one block to ``at`` of the target; the outcome."""
    blocks = u64(source.address), u64(target.address + at), u64(nbytes)
    return source.do("outcome", source.do("write", "source", "target", room, generation, *blocks))


def untouched(memory: npt.NDArray[np.uint8]) -> bool:
    return bool((memory == POISON).all())


HEADER = struct.Struct("<4sBxxxI4xQQQQ")


def batch_of(node: Node, **changes: Any) -> Batch:
    zeros = np.zeros(1, np.uint32)
    columns = {
        "source": u64(node.address),
        "target": u64(1000),
        "nbytes": u64(10),
        "source_region": zeros,
        "target_region": zeros,
    }
    return Batch(Op.WRITE, Blocks(**{**columns, **changes}), 1, 1)


class Caller:
    """Somebody who calls a data port as a backend of ``node`` would; ``key`` is what it believes to be the key."""

    def __init__(self, node: Node, own_name: str, peer: bytes, peer_name: str) -> None:
        self.peer = Descriptor.decode(peer, peer_name)
        self.waker = Waker()
        self.pose(node, own_name)

    def pose(self, node: Node, own_name: str) -> None:
        """Be another backend of ``node`` from now on."""
        backend = node.backends[own_name]
        self.own = backend._own
        self.key = pair_key(backend._private, self.own, self.peer)

    def dial(self) -> Stream:
        options = Options(connect_timeout=2.0)
        return _handshake.dial(self.own, self.peer, self.key, options, self.waker, lambda: None)[0]

    def plain(self) -> socket.socket:
        sock = socket.create_connection((self.peer.host, self.peer.port))
        sock.settimeout(10)
        return sock
