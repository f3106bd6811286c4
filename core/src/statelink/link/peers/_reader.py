"""Reads peers' handshakes, and keeps those that come while the link is suspended.

Small ones are read at once, on the control thread, and large ones on a data thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from statelink._logs import logger
from statelink.errors import WireError
from statelink.link.runtime import reason_of
from statelink.wire import MAX_EFFORT, MAX_HANDSHAKE, read_handshake

if TYPE_CHECKING:
    from statelink.errors import Reason
    from statelink.link.runtime import Workers
    from statelink.wire import Channel, Handshake, Hello

__all__ = ["MAX_WAITING", "HandshakeReader", "HeldHellos"]

log = logger("statelink.link")

SMALL_HANDSHAKE, SMALL_EFFORT = 16 << 10, 1 << 12
"""The most bytes, and the most effort, of a handshake that the control thread reads: milliseconds of work at most."""
MAX_WAITING = 4 * MAX_HANDSHAKE
"""Most bytes of handshakes that wait to be read, and of those that wait until a suspended link is resumed."""

Made = TypeVar("Made")


class HandshakeReader:
    """Reads and checks handshakes. Belongs to the control thread; none of its methods blocks.

    Args:
        channel: Counts the handshakes that are dropped.
        workers: Read the large ones.
    """

    def __init__(self, channel: Channel, workers: Workers) -> None:
        self._channel = channel
        self._workers = workers
        self._reading: set[str] = set()
        """Peers of which a large handshake is queued or being read."""
        self._waiting = 0
        """Bytes of these handshakes."""

    def read(
        self,
        peer: str,
        raw: msgspec.Raw,
        check: Callable[[Handshake], Made],
        then: Callable[[Made | None, Reason | None], None],
    ) -> None:
        """Read a handshake and check it. A large one is read on a data thread, one of each peer at a time.

        A large handshake that comes while an earlier one of the same peer is being read is dropped: a peer that gets no
        answer repeats its handshake. One that comes while too many bytes wait is dropped and counted.

        Args:
            peer: The peer's link name or address.
            raw: The handshake.
            check: Called on the thread that reads, which may be a data thread. Raises if the handshake is refused;
                otherwise returns what ``then`` needs.
            then: Called on the control thread with what ``check`` returned, or with why the handshake is refused.
        """
        nbytes = len(memoryview(raw))
        if nbytes <= SMALL_HANDSHAKE:
            read, reason = _read(raw, check, SMALL_EFFORT)
            if reason is None or reason.code != "wire.effort":
                then(read, reason)
                return
        if peer in self._reading:
            return
        if self._waiting + nbytes > MAX_WAITING:
            cause = f"{self._waiting} bytes of others wait to be read"
            what = "a handshake came while too many others wait"
            self._channel.count(WireError(what, cause=cause, code="wire.busy"))
            return
        self._reading.add(peer)
        self._waiting += nbytes

        # Runs on the control thread.
        def done(read: tuple[Made | None, Reason | None] | None, defect: Reason | None) -> None:
            self._reading.discard(peer)
            self._waiting -= nbytes
            made, reason = read if read is not None else (None, defect)
            then(made, reason)

        self._workers.run(self._workers.readers.submit, "read", lambda: _read(raw, check, MAX_EFFORT), done)


def _read(raw: msgspec.Raw, check: Callable[[Handshake], Made], effort: int) -> tuple[Made | None, Reason | None]:
    try:
        return check(read_handshake(raw, effort)), None
    except BaseException as error:  # the peer sent it: no content may do more than get it refused
        return None, reason_of(error)


class HeldHellos:
    """The latest `Hello` of each peer. Belongs to the control thread; none of its methods blocks.

    Args:
        most: Most peers.
        most_bytes: Most bytes of their handshakes together.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._held: dict[str, Hello] = {}
        self._nbytes = 0

    def add(self, hello: Hello) -> None:
        """Keep a handshake, instead of an earlier one of its sender.

        Raises:
            WireError: Too many others are kept (``wire.busy``). A peer that gets no answer repeats its handshake.
        """
        earlier = self._held.pop(hello.sender, None)
        if earlier is not None:
            self._nbytes -= _length(earlier)
        if len(self._held) >= self._most or self._nbytes + _length(hello) > self._most_bytes:
            raise WireError(
                "a handshake came while too many others wait",
                cause=f"{self._nbytes} bytes of {len(self._held)} others wait until this link is resumed",
                code="wire.busy",
            )
        # A copy, because the handshake is a view of the whole message, which may be larger.
        self._held[hello.sender] = msgspec.structs.replace(hello, handshake=hello.handshake.copy())
        self._nbytes += _length(hello)

    @property
    def all(self) -> Iterable[Hello]:
        """Every one that is kept."""
        return self._held.values()


def _length(hello: Hello) -> int:
    return len(memoryview(hello.handshake))
