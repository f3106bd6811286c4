"""Remembers decode's uses of ids that have ended, and for which prefill may not have opened a room yet. Bounded.

A request for the same id names these earlier uses. So prefill can tell that a room which it opens late may belong to
one of them, and not to the request. Prefill has tombstones of its own, for rooms that ended there first.
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

__all__ = ["UnmetUses"]

REMEMBERED = 65536
"""Most room ids and attempts whose uses are kept one by one."""


@dataclass
class _Use:
    """One use that ended.

    Attributes:
        ended: When it ended.
        lacks: Link names of the prefill ranks that have not said that they had a room for it. ``None`` stands for all
            prefill ranks.
    """

    ended: float
    lacks: set[str] | None


class UnmetUses:
    """Keeps uses that ended before every prefill rank had a room for them. Belongs to the control thread.

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
        """Keep a use that failed. ``ranks``: prefill ranks that have not said that they had a room for it, or all."""
        lacks = None if ranks is None else set(ranks)
        if lacks is not None and not lacks:
            return
        uses = self._rooms.setdefault(key, {})
        self._rooms.move_to_end(key)
        now = self._now()
        # Beyond the limit, one entry with generation 0 stands for the oldest uses. It stays until it is too old.
        while len(uses) >= MAX_UNMET:
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
        """Note that a prefill rank says that it had a room for a use."""
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
        """The earlier uses that a request to a prefill rank has to name."""
        if key in self._forgotten:
            return (Unmet(0, 0),)
        uses = self._rooms.get(key)
        if uses is None:
            return ()
        now = self._now()
        return tuple(
            Unmet(generation, int(1000 * (now - use.ended)))
            for generation, use in uses.items()
            if (use.lacks is None or rank in use.lacks) and now - use.ended < SPAN
        )
