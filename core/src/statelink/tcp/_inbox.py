"""What has come over a connection: frames, which often come several at a time, and payload."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from . import _iovec
from ._iovec import Vectors
from ._stream import POLLIN, Lost

if TYPE_CHECKING:
    import numpy.typing as npt

    from ._stream import Stream

__all__ = ["Inbox"]

SPACE: Final = 16 << 10
"""Bytes that are taken from the socket in one call at most, unless one frame is larger."""


class Inbox:
    """Takes the frames of one connection, and puts payload into place. Only the receiver's thread uses it.

    Where frames follow each other without payload, one call takes all that have come. Payload goes directly from the
    socket to its place. What came with a frame, and turns out to be payload, is copied from here.

    Args:
        stream: The connection.
        ahead: Whether to take more than was asked for, since the peer is expected to send no payload.
    """

    def __init__(self, stream: Stream, *, ahead: bool) -> None:
        self.ahead = ahead
        self._stream = stream
        self._first = self._last = 0
        """Where in `_data` the bytes are that have come, and that nobody has taken yet."""
        self._hold(SPACE)

    def _hold(self, nbytes: int) -> None:
        self._space = nbytes
        self._data = np.empty(nbytes, np.uint8)
        self._address: int = self._data.__array_interface__["data"][0]

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """The next so many bytes, valid until the next call. Waits for them.

        Raises:
            Lost: The stream ended.
            Interrupted: As `Stream.wait`.
        """
        if self._last - self._first < nbytes:
            self._fill(nbytes)
        first = self._first
        self._first = first + nbytes
        return self._data[first : first + nbytes]

    def _fill(self, nbytes: int) -> None:
        """Receive until so many bytes are there."""
        rest = self._data[self._first : self._last]
        self._first, self._last = 0, self._last - self._first
        if nbytes > self._space:
            self._hold(nbytes)
        if self._last:
            self._data[: self._last] = rest
        most = self._space if self.ahead else nbytes
        while self._last < nbytes:
            received = self._stream.receive_at(self._address + self._last, most - self._last)
            if not received:
                self._stream.wait(POLLIN)
            self._last += received

    def receive(self, target: Vectors, position: int, limit: int) -> int:
        """Put up to ``limit`` bytes of payload to ``position`` on; 0 if there are none now.

        Raises:
            Lost: The stream ended.
        """
        nbytes = min(self._last - self._first, limit, target.total - position)
        if not nbytes:
            return self._stream.receive_vectors(target, position, limit)
        address, length = np.array([self._address + self._first], np.uint64), np.array([nbytes], np.uint64)
        try:
            moved = _iovec.copy(os.getpid(), Vectors(address, length), target, position, nbytes)
        except OSError as error:
            raise Lost(f"its payload cannot be put into place ({error})") from error
        self._first += moved
        return moved

    def drop(self, scratch: memoryview[Any]) -> int:
        """Receive up to as many bytes of payload as fit, and forget them; 0 if there are none now.

        Raises:
            Lost: The stream ended.
        """
        nbytes = min(self._last - self._first, len(scratch))
        self._first += nbytes
        return nbytes or self._stream.receive(scratch)
