"""Decode's uses of room ids that ended, and of which prefill may not have opened its side. Bounded.

Requests name them, so that prefill does not take a later use of an id for one of these. Prefill has tombstones of its
own, for rooms that ended there first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from statelink.link._forgotten import SPAN, Forgotten
from statelink.wire import MAX_UNMET, Unmet

if TYPE_CHECKING:
    from statelink.link._header import RoomKey

__all__ = ["Tombstones"]

REMEMBERED = 65536
"""Most rooms whose uses are remembered one by one."""


@dataclass
class _Use:
    """One use that ended.

    Attributes:
        ended: When.
        lacks: Link names of the prefill ranks that have not said that they had a room for it; ``None`` for all.
    """

    ended: float
    lacks: set[str] | None


class Tombstones:
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

    def ended(self, key: RoomKey, generation: int, ranks: Iterable[str] | None) -> None:
        """A use failed, and these prefill ranks, or all, have not said that they had a room for it."""
        lacks = None if ranks is None else set(ranks)
        if lacks is not None and not lacks:
            return
        uses = self._rooms.setdefault(key, {})
        self._rooms.move_to_end(key)
        now = self._now()
        while len(uses) >= MAX_UNMET:  # those that are not kept one by one are never said to be met
            oldest = next(iter(uses))
            self._keys.pop(oldest, None)
            del uses[oldest]
            uses[0] = _Use(now, None)
        uses[generation] = _Use(now, lacks)
        self._keys[generation] = key
        while len(self._rooms) > REMEMBERED:
            lost, uses = self._rooms.popitem(last=False)
            for generation in uses:
                self._keys.pop(generation, None)
            self._forgotten.add(lost)

    def met(self, generation: int, rank: str) -> None:
        """A prefill rank says that it had a room for a use."""
        key = self._keys.get(generation)
        if key is None:
            return
        uses = self._rooms[key]
        lacks = uses[generation].lacks
        if lacks is None:
            return
        lacks.discard(rank)
        if not lacks:
            del uses[generation], self._keys[generation]
            if not uses:
                del self._rooms[key]

    def named(self, key: RoomKey, rank: str) -> tuple[Unmet, ...]:
        """What a request of a room has to say of earlier uses to a prefill rank."""
        now = self._now()
        if key in self._forgotten:
            return (Unmet(0, 0),)
        return tuple(
            Unmet(generation, int(1000 * (now - use.ended)))
            for generation, use in self._rooms.get(key, {}).items()
            if (use.lacks is None or rank in use.lacks) and now - use.ended < SPAN
        )
