"""The connections of one pair of links, in one direction: the first carries small batches, the others large ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from statelink.backend import logger

from ._share import Share
from ._stream import Lost

if TYPE_CHECKING:
    from statelink.backend import Batch

    from ._receiver import Caller, Receiver
    from ._sender import Sender
    from ._write import Write

__all__ = ["Receivers", "Senders"]

log = logger("statelink.tcp")

SMALL_BYTES = 2 << 20
"""Most bytes of a batch that the first connection carries, where there are others."""
LONG_SECONDS = 5e-3
"""From this round trip on, a line is long: a connection fills little of it."""
FULL = 2
"""A line is full while so many batches, or more, are on each connection."""
FEW = 4
"""Most connections over another line: more of them only cost threads."""


class Senders:
    """Moves batches to one peer over as many connections as both sides take.

    On the first one, a small batch waits for other small ones alone. A large batch, or a piece of one, goes to that of
    the others where the fewest wait. Another connection is made while some wait on all, and batches wait for it only as
    long as there is none. A long line gets all of them with its first large batch, since it takes round trips to make
    one. What its connections send together follows from what it was seen to move (`Share`).

    Args:
        make: Makes the sender of a connection, given its number. Raises `OSError` if the process has no file
            descriptors left.
        most: Most connections.
        peer: The peer's link name.

    Raises:
        OSError: What ``make`` raises for the first one.
    """

    def __init__(self, make: Callable[[int], Sender], most: int, peer: str) -> None:
        self._make = make
        self._most = most
        self._peer = peer
        self._lock = threading.Lock()
        """Held while a sender is made, and no longer."""
        self._stopping = False
        self._all = [make(0)]
        self._share: Share | None = None
        """Of the line, once it is known to be long."""

    @property
    def transport(self) -> str:
        """The transport of the last connection; empty before the first one. Any thread."""
        return next((found for sender in self._all if (found := sender.transport)), "")

    def find_out(self) -> None:
        """See `Sender.find_out`."""
        self._all[0].find_out()

    def want(self) -> None:
        """See `Sender.want`."""
        self._all[0].want()

    def submit(self, batch: Batch, nbytes: int) -> Write:
        """Send a batch of so many bytes, or queue it. See `Sender.submit`."""
        if self._most == 1 or (nbytes <= SMALL_BYTES and not batch.piece):
            return self._all[0].submit(batch)
        round_trip = max(each.round_trip for each in self._all)
        long = round_trip >= LONG_SECONDS
        write = self._for_large(long).submit(batch)
        if long:
            self._share_line(write, nbytes, round_trip)
        return write

    def _share_line(self, write: Write, nbytes: int, round_trip: float) -> None:
        """Have the connections that send together send as fast as the line is."""
        if self._share is None:
            self._share = Share(round_trip)
        waiting = [each.waiting for each in self._all[1:]]
        self._share.begins(write, nbytes, time.monotonic(), full=min(waiting, default=0) >= FULL)
        sending = len(waiting) - waiting.count(0)
        for each, some in zip(self._all[1:], waiting, strict=False):
            if some:
                each.pace(self._share.of(sending))

    def _for_large(self, long: bool) -> Sender:
        """The connection for a large batch."""
        number = self._most if long else min(self._most, FEW)
        while long and (another := self._another(number)) is not None:
            another.want()
        known = [each for each in self._all[1:] if each.transport]
        best: Sender | None = None
        for each in known or self._all[1:]:
            if not each.waiting:
                return each
            if best is None or each.waiting < best.waiting:
                best = each
        another = self._another(number)
        if another is not None and not known:
            return another
        if another is not None:
            another.want()
        return best or self._all[0]

    def _another(self, number: int) -> Sender | None:
        """One more sender; ``None`` if there are so many, or there cannot be one."""
        if len(self._all) >= number:
            return None
        with self._lock:
            if self._stopping or len(self._all) >= min(number, self._most):  # another thread may have made it
                return None
            try:
                sender = self._make(len(self._all))
            except OSError as error:
                log.warning("%s gets no more than %d connections: %s", self._peer, len(self._all), error)
                self._most = len(self._all)
                return None
            self._all.append(sender)
            return sender

    def stop(self) -> None:
        """See `Sender.stop`."""
        with self._lock:
            self._stopping = True
        for sender in self._all:
            sender.stop()

    def join(self) -> None:
        """See `Sender.join`."""
        for sender in self._all:
            sender.join()


class Receivers:
    """Serves the incoming connections of one peer.

    Args:
        make: Makes the receiver of a connection, given its number. Raises `OSError` if the process has no file
            descriptors left.
        most: Most connections.
    """

    def __init__(self, make: Callable[[int], Receiver], most: int) -> None:
        self._make = make
        self._most = most
        self._lock = threading.Lock()
        self._all: dict[int, Receiver] = {0: make(0)}
        self._stopping = False

    def offer(self, caller: Caller) -> None:
        """Serve a connection. See `Receiver.offer`.

        Raises:
            Lost: There is no such connection, or it cannot be served. The connection is still the caller's.
        """
        number = caller.hello.stream
        if number >= self._most:
            raise Lost(f"connection {number} of {self._most}")
        with self._lock:
            receiver = self._all.get(number)
            if receiver is None:
                if self._stopping:
                    raise Lost("this side is closing")
                try:
                    receiver = self._all[number] = self._make(number)
                except OSError as error:
                    raise Lost(f"connection {number} cannot be served: {error}") from error
        receiver.offer(caller)

    def stop(self) -> None:
        """See `Receiver.stop`."""
        with self._lock:
            self._stopping = True
        for receiver in self._all.values():
            receiver.stop()

    def join(self) -> None:
        """See `Receiver.join`."""
        for receiver in self._all.values():
            receiver.join()
