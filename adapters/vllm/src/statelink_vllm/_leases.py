"""Requests of decode that wait for blocks, while prefill keeps their state."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from ._messages import Keep

if TYPE_CHECKING:
    from ._params import Source

__all__ = ["Leases"]

LONGEST = 3600.0
"""Most seconds that prefill is asked for at once. Prefill never gives more than its own ``deadline``."""
PAUSE = 2.0
"""Most seconds between two messages about a request. Prefill may give up one of which it hears nothing for longer."""


class Leases:
    """Says when prefill has to be asked to keep a request's state. Belongs to the thread of the engine core.

    Args:
        deadline: The link's ``deadline``, in seconds.
    """

    def __init__(self, deadline: float) -> None:
        self._seconds = min(deadline, LONGEST)
        self._pause = min(deadline / 4, PAUSE)
        self._due: OrderedDict[str, tuple[float, Source]] = OrderedDict()
        """When prefill is asked next, and where; the earliest first."""

    def __bool__(self) -> bool:
        return bool(self._due)

    def add(self, name: str, source: Source) -> None:
        """A request has come. Most get blocks at once, so that prefill is first asked after a pause."""
        self._due.setdefault(name, (time.monotonic() + self._pause, source))

    def drop(self, name: str) -> None:
        """A request has got blocks, or has ended."""
        self._due.pop(name, None)

    def take(self) -> dict[str, Keep]:
        """What prefill is asked for now."""
        made: dict[str, Keep] = {}
        if not self._due:
            return made
        now = time.monotonic()
        for name, (due, source) in self._due.items():
            if due > now:
                break
            made[name] = Keep(*source, self._seconds)
        for name in made:
            self._due[name] = now + self._pause, self._due[name][1]
            self._due.move_to_end(name)
        return made
