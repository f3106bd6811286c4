"""Answers of prefill that a router passed on with the wrong request.

The room is that of another request, which may come later, and with it the same answer. So prefill is told that nobody
asks for it only if no such request has come in the meantime. Prefill ignores that once another decode has said a word.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ._messages import Receive

if TYPE_CHECKING:
    from collections.abc import Container

    from ._params import Source

__all__ = ["Misdirected"]

PATIENCE_SECONDS = 5.0
"""Seconds for which the right request may come. It is then received, or prefill has heard of it."""
WHY = "decode got prefill's answer with another request, and not with this one: look at the router"


class Misdirected:
    """Knows such answers. Belongs to the thread of the engine core."""

    def __init__(self) -> None:
        self._due: dict[int, tuple[float, str, Receive]] = {}
        """For each room when prefill is told, the request that had its answer, and what prefill is told; the earliest
        first."""

    def add(self, name: str, source: Source, tokens: int) -> None:
        """A request has the answer to another one.

        Args:
            name: vLLM's id.
            source: Where the state of the other one is.
            tokens: Number of tokens of this one.
        """
        declined = Receive(*source, tokens, why=WHY)
        self._due.setdefault(source.room, (time.monotonic() + PATIENCE_SECONDS, name, declined))

    def drop(self, room: int) -> None:
        """The right request has come."""
        self._due.pop(room, None)

    def take(self, wanted: Container[int]) -> dict[str, Receive]:
        """What prefill is told in this step, by vLLM's id of the request that had the answer.

        Args:
            wanted: Rooms that requests here wait for.
        """
        made: dict[str, Receive] = {}
        now = time.monotonic()
        for room, (due, name, declined) in list(self._due.items()):
            if due > now:
                break
            del self._due[room]
            if room not in wanted:
                made[name] = declined
        return made

    def __bool__(self) -> bool:
        """Whether any is known."""
        return bool(self._due)
