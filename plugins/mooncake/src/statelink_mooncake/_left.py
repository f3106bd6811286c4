"""Closes connections that the library keeps to engines that have ended."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from typing import Any

import numpy as np

__all__ = ["Left"]

LANES = 4
"""Connections of the TCP transport to a peer. A batch with this many entries uses each of them."""
MOST = 256
"""Most sessions that are remembered."""
LOOKS = 8
"""Most sessions that are checked each time."""
CLOSE_SECONDS = 0.2
"""Seconds to wait for an answer from one session."""


class Left:
    """Sessions that were disconnected. Over TCP, the library notices only in a transfer that a session is dead.

    It keeps its connections to an engine even after that engine's process has ended. So once nobody listens at a
    session, this class makes a transfer to it. The transfer fails at once, and the library then closes the connections.
    Methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: deque[tuple[str, int]] = deque(maxlen=MOST)
        self._scratch = np.zeros(LANES, np.uint8)

    def add(self, session: str, address: int) -> None:
        """A session was disconnected. ``address`` is in the memory that it registered."""
        with self._lock:
            self._sessions.append((session, address))

    def remove(self, session: str) -> None:
        """A session is connected again."""
        with self._lock:
            for each in [each for each in self._sessions if each[0] == session]:
                self._sessions.remove(each)

    def look(self, engine: Any) -> None:
        """Make ``engine`` close its connections to sessions that are gone. Blocks for a few seconds at most."""
        with self._lock:
            chosen = [self._sessions.popleft() for _ in range(min(LOOKS, len(self._sessions)))]
        for session, address in chosen:
            if not _gone(session):
                self.add(session, address)  # checked again after the others
                continue
            here = int(self._scratch.ctypes.data)
            places = [here + lane for lane in range(LANES)]
            engine.batch_transfer_sync_read(session, places, [address] * LANES, [1] * LANES)


def _gone(session: str) -> bool:
    """Whether it is certain that nobody listens there."""
    host, _, port = session.rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        try:
            socket.create_connection((host.strip("[]"), int(port)), CLOSE_SECONDS).close()
        except ConnectionRefusedError:
            return True
    return False
