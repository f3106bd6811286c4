"""Keeps connections that were given up before their receivers had confirmed that they stopped."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._stream import Lost

if TYPE_CHECKING:
    from statelink.backend import Transfer

    from ._stream import Stream

__all__ = ["Linger", "Lingering"]


class Linger:
    """A connection that was given up before its receiver confirmed that it stopped, and its transfers.

    The transfers have failed, and are not settled.

    Its receiver closes the other end after its last copy, even if its process was stopped for a while. If the process
    has ended, the kernel closes the end once no thread is left. Both prove that the bytes have stopped.
    """

    def __init__(self, stream: Stream, writes: Sequence[Transfer]) -> None:
        self._lock = threading.Lock()
        self._stream: Stream | None = stream
        self._writes = writes

    def look(self) -> bool:
        """Settle the transfers if the other end is closed.

        Return whether it is. Callable from any thread; never blocks.
        """
        with self._lock:
            scratch = memoryview(bytearray(4096))
            while self._stream is not None:
                try:
                    if not self._stream.receive(scratch):  # otherwise a reply came, which changes nothing
                        return False
                except Lost as lost:
                    if lost.ended:
                        for write in self._writes:
                            write.settle()
                    self._close()
            return True

    def close(self) -> None:
        """Give it up. Any thread."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = None


class Lingering:
    """Every `Linger` of one backend. Callable from any thread; never blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Linger] = []
        self._closed = False

    def add(self, linger: Linger) -> None:
        """Keep a connection until its receiver has stopped."""
        with self._lock:
            if not self._closed:
                self._all.append(linger)
                return
        linger.close()

    def look(self) -> None:
        """Settle what has stopped."""
        if self._all:
            with self._lock:
                self._all = [each for each in self._all if not each.look()]

    def close(self) -> None:
        """Give all of them up."""
        with self._lock:
            self._closed = True
            given_up, self._all = self._all, []
        for each in given_up:
            each.close()
