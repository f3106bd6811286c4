"""The numbers by which uses of a room's id are told apart."""

from __future__ import annotations

import secrets
from collections import deque

__all__ = ["Generations"]

BITS = 62
AT_ONCE = 64
WIDTH = 8
"""Bytes that are drawn for each number."""


class Generations:
    """Draws numbers above zero that no peer can foresee. Any thread.

    It asks the system for many at once. Each such call lets go of the interpreter, and the engine's thread, which opens
    rooms, may wait long to get it back.
    """

    def __init__(self) -> None:
        self._ready: deque[int] = deque()

    def draw(self) -> int:
        """The next number: 62 random bits, plus one."""
        while True:
            try:
                return self._ready.popleft()
            except IndexError:
                drawn = secrets.token_bytes(WIDTH * AT_ONCE)
            each = (drawn[at : at + WIDTH] for at in range(0, len(drawn), WIDTH))
            self._ready.extend((int.from_bytes(number, "little") >> (8 * WIDTH - BITS)) + 1 for number in each)
