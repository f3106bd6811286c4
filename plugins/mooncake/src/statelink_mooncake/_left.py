"""Connections that the library keeps to engines that are gone."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from typing import Any

import numpy as np

__all__ = ["Left"]

LANES = 4
"""Connections that the TCP transport has to a peer; a batch of as many entries uses each of them."""
MOST = 256
"""Most sessions that are remembered."""
LOOKS = 8
"""Most sessions that are looked at each time."""
PATIENCE = 0.2
"""Seconds to wait for an answer of one of them."""


class Left:
    """Sessions that were disconnected. Over TCP, the library notices only in a transfer that one of them is dead.

    It keeps its connections to an engine for good, also when that engine's process has ended. So once nobody listens at
    a session any more, something is asked of it, which fails at once, and with which the library closes them.
    Methods are for any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: deque[tuple[str, int]] = deque(maxlen=MOST)
        self._scratch = np.zeros(LANES, np.uint8)

    def add(self, session: str, address: int) -> None:
        """A session was disconnected; ``address`` is somewhere in the memory that it registered."""
        with self._lock:
            self._sessions.append((session, address))

    def remove(self, session: str) -> None:
        """A session is connected again."""
        with self._lock:
            for each in [each for each in self._sessions if each[0] == session]:
                self._sessions.remove(each)

    def look(self, engine: Any) -> None:
        """Have ``engine`` close its connections to those that are gone. Blocks for a few seconds at most."""
        with self._lock:
            chosen = [self._sessions.popleft() for _ in range(min(LOOKS, len(self._sessions)))]
        for session, address in chosen:
            if not _gone(session):
                self.add(session, address)  # others have their turn before it is looked at again
                continue
            here = int(self._scratch.ctypes.data)
            places = [here + lane for lane in range(LANES)]
            engine.batch_transfer_sync_read(session, places, [address] * LANES, [1] * LANES)


def _gone(session: str) -> bool:
    """Whether it is certain that nobody listens there."""
    host, _, port = session.rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        try:
            socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
        except ConnectionRefusedError:
            return True
    return False
