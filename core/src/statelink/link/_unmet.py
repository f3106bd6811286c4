"""Decode's uses of room ids that ended, and of which prefill may not have opened its side. Bounded.

Requests name them, so that prefill does not take a later use of an id for one of these: see `Past` for its side.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from statelink.wire import MAX_UNMET
from statelink.wire import Unmet as Named

from ._forgotten import SPAN, Forgotten, RoomKey

if TYPE_CHECKING:
    from ._receiving import Receiving

__all__ = ["Unmet"]

REMEMBERED = 65536
"""Most rooms whose uses are remembered one by one."""


@dataclass
class _Use:
    """One of them.

    Attributes:
        ended: When.
        lacks: Link names of the prefill ranks that have not said that they had a room for it; ``None`` for all.
    """

    ended: float
    lacks: set[str] | None


class Unmet:
    """Belongs to the control thread.

    Args:
        now: The link's clock.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._rooms: OrderedDict[RoomKey, dict[int, _Use]] = OrderedDict()
        self._keys: dict[int, RoomKey] = {}
        self._forgotten = Forgotten(now)

    def __len__(self) -> int:
        return len(self._rooms)

    def ended(self, room: Receiving, sources: Iterable[str] | None) -> None:
        """A use failed, and these ranks, or all, have not said that they had a room for it."""
        lacks = None if sources is None else set(sources)
        if lacks is not None and not lacks:
            return
        key = room._key
        uses = self._rooms.setdefault(key, {})
        self._rooms.move_to_end(key)
        now = self._now()
        while len(uses) >= MAX_UNMET:  # those that are not kept one by one are never said to be met
            oldest = next(iter(uses))
            self._keys.pop(oldest, None)
            del uses[oldest]
            uses[0] = _Use(now, None)
        uses[room.generation] = _Use(now, lacks)
        self._keys[room.generation] = key
        while len(self._rooms) > REMEMBERED:
            lost, uses = self._rooms.popitem(last=False)
            for generation in uses:
                self._keys.pop(generation, None)
            self._forgotten.add(lost)

    def met(self, generation: int, source: str) -> None:
        """A prefill rank says that it had a room for a use."""
        key = self._keys.get(generation)
        if key is None:
            return
        uses = self._rooms[key]
        lacks = uses[generation].lacks
        if lacks is None:
            return
        lacks.discard(source)
        if not lacks:
            del uses[generation], self._keys[generation]
            if not uses:
                del self._rooms[key]

    def named(self, key: RoomKey, source: str) -> tuple[Named, ...]:
        """What a request of a room has to say of earlier uses to a prefill rank."""
        now = self._now()
        if key in self._forgotten:
            return (Named(0, 0),)
        return tuple(
            Named(generation, int(1000 * (now - use.ended)))
            for generation, use in self._rooms.get(key, {}).items()
            if (use.lacks is None or source in use.lacks) and now - use.ended < SPAN
        )
