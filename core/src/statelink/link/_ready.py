"""The engine's ready events, which guard memory: each is asked once at a time, however many rooms wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .runtime import Loop

__all__ = ["Ready", "ReadyEvents"]

POLL_SECONDS = 0.0005
"""Seconds between two queries of an event. One that has happened already is queried once."""


class Ready(Protocol):
    """A ready event, which guards memory: anything with ``query()``, such as a device event."""

    def query(self) -> bool:
        """Whether the memory may be touched. Must not block; called on the control thread."""


class ReadyEvents:
    """The events that have not happened, and who waits for each. Belongs to the control thread.

    Args:
        loop: The link's loop.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiting: dict[int, tuple[Ready, dict[object, Callable[[], None]]]] = {}
        """By the identity of an event."""
        self._looks = False

    def happened(self, ready: Ready, who: object, then: Callable[[], None]) -> bool:
        """Whether an event has happened. If not, ``then`` is called soon after it has, or has failed.

        Args:
            ready: The event.
            who: Who waits. It waits once for an event, whatever it asks meanwhile.
            then: What it does next, such as asking here again.

        Raises:
            BaseException: What the event's ``query()`` raises.
        """
        if id(ready) not in self._waiting and ready.query():
            return True
        self._waiting.setdefault(id(ready), (ready, {}))[1][who] = then
        self._look_later()
        return False

    def forget(self, who: object) -> None:
        """Somebody waits for nothing any more."""
        for _, waiting in self._waiting.values():
            waiting.pop(who, None)

    def _look_later(self) -> None:
        if not self._looks:
            self._looks = True
            self._loop.after(POLL_SECONDS, self._look)

    def _look(self) -> None:
        self._looks = False
        for key, (ready, waiting) in list(self._waiting.items()):
            if waiting and not _is_over(ready):
                continue
            del self._waiting[key]
            for then in waiting.values():
                self._loop.post_job(then)
        if self._waiting:
            self._look_later()


def _is_over(ready: Ready) -> bool:
    """Whether an event has happened or failed. Whoever waits for it asks it again, and learns which."""
    try:
        return ready.query()
    except BaseException:
        return True
