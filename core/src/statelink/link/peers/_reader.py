"""Reading the handshakes of peers: small ones at once, large ones on a thread of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from statelink.errors import WireError
from statelink.link.runtime import reason_of
from statelink.wire import MAX_EFFORT, MAX_HANDSHAKE, read_handshake

if TYPE_CHECKING:
    import msgspec

    from statelink.errors import Reason
    from statelink.link.runtime import Workers
    from statelink.wire import Channel, Handshake

__all__ = ["HandshakeReader"]

log = logging.getLogger("statelink.link")

SMALL_HANDSHAKE, SMALL_EFFORT = 16 << 10, 1 << 12
"""Bytes up to which, and effort with which, the control thread reads a handshake: that takes milliseconds at most."""
MAX_WAITING = 4 * MAX_HANDSHAKE
"""Most bytes of handshakes that wait to be read."""

Made = TypeVar("Made")


class HandshakeReader:
    """Reads and checks handshakes. Belongs to the control thread; none of its methods blocks.

    Args:
        channel: Counts those that are dropped.
        workers: Read large ones.
    """

    def __init__(self, channel: Channel, workers: Workers) -> None:
        self._channel = channel
        self._workers = workers
        self._reading: set[str] = set()
        self._waiting = 0

    def read(
        self,
        peer: str,
        raw: msgspec.Raw,
        check: Callable[[Handshake], Made],
        then: Callable[[Made | None, Reason | None], None],
    ) -> None:
        """Read a handshake and check it; a large one on a thread of its own, and one of a peer at a time.

        A handshake that comes while an earlier one of the same peer is being read is dropped: a peer that gets no
        answer repeats it. One that comes while too many bytes wait is dropped and counted.

        Args:
            peer: Whose it is: its link name or address.
            raw: The handshake.
            check: Looks at it and makes something of it, on the same thread.
            then: Called on the control thread with what was made, or with why the handshake is refused.
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
            self._channel.count(WireError("a description came at a bad time", cause=cause, code="wire.busy"))
            return
        self._reading.add(peer)
        self._waiting += nbytes

        def done(read: tuple[Made | None, Reason | None] | None, defect: Reason | None) -> None:
            self._reading.discard(peer)
            self._waiting -= nbytes
            made, reason = read if read is not None else (None, defect)
            then(made, reason)

        self._workers.run(self._workers.readers, "read", lambda: _read(raw, check, MAX_EFFORT), done)


def _read(raw: msgspec.Raw, check: Callable[[Handshake], Made], effort: int) -> tuple[Made | None, Reason | None]:
    try:
        return check(read_handshake(raw, effort)), None
    except BaseException as error:  # whatever is in it, it is the peer's
        return None, reason_of(error)
