"""The side that writes: it fills the memory, and waits until the other side has emptied it."""

from __future__ import annotations

import socket
import threading

import msgspec
import numpy as np

from statelink.backend import Batch, Outcome, RegionTable, Side

from ._descriptor import Descriptor, refused
from ._inbound import GREETING_SECONDS, Hello, shut
from ._segment import DONE, Request, Segment, Stream

__all__ = ["Outbound"]


class Outbound:
    """The way to one peer.

    Args:
        own: Our link's name.
        peer: Where the peer is.
        table: Its memory.
        timeout: Seconds that it has for each piece.

    Attributes:
        table: The peer's memory.
        lost: Whether this is of no more use.

    Raises:
        TransferError: The peer cannot be reached, or does not let us in.
    """

    def __init__(self, own: str, peer: Descriptor, table: RegionTable, timeout: float) -> None:
        self.table = table
        self.lost = False
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.settimeout(GREETING_SECONDS)
        try:
            channel.connect(f"\0{peer.socket}")
            channel.send(msgspec.json.encode(Hello(own, peer.secret)))
            _, files, _, _ = socket.recv_fds(channel, 64, 1)
            if not files:
                raise ConnectionRefusedError("it does not let us in")
            self._segment = Segment(files[0])
        except (OSError, ValueError) as error:
            channel.close()
            raise refused(peer.link, str(error), "both sides have to see one network namespace") from error
        channel.settimeout(timeout)
        self._channel = channel
        self._busy = threading.Lock()

    def write(self, batch: Batch) -> Outcome:
        """Move a batch that was checked; returns when the peer has put it in place, or is lost."""
        blocks, segment = batch.blocks, self._segment
        with self._busy:
            segment.table[: blocks.count] = np.column_stack((blocks.target, blocks.nbytes))
            rows, left = blocks.count, Stream(blocks.source, blocks.nbytes)
            while left and not self.lost:
                request = Request(batch.room, batch.generation, rows, segment.gather(left))
                answer, why = self._ask(request)
                if not answer:
                    return self._fail(why)
                if answer != DONE:
                    return Outcome(False, "the peer has not granted this memory, or has taken it back")
                rows = 0
            return self._fail("it was disconnected") if left else Outcome(True)

    def close(self) -> None:
        """Let go of it: once this returns, the source is not read any more. May be called twice."""
        self.lost = True
        shut(self._channel)
        with self._busy:
            self._channel.close()

    def _ask(self, request: Request) -> tuple[bytes, str]:
        """The peer's answer; or nothing, and why."""
        try:
            self._channel.send(request.encode())
            return self._channel.recv(64), "it closed the connection"
        except OSError as error:
            return b"", str(error)

    def _fail(self, why: str) -> Outcome:
        """The peer may be in the middle of putting in place what it has got; of the source it has all it gets."""
        self.lost = True
        shut(self._channel)
        return Outcome(False, f"the peer is lost: {why}", settled=Side.SOURCE)
