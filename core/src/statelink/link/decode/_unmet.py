"""Remembers decode's uses of ids that have ended, and for which prefill may not have opened a room yet. Bounded.

A request for the same id names these earlier uses. So prefill can tell that a room which it opens late may belong to
one of them, and not to the request. Prefill has tombstones of its own, for rooms that ended there first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from statelink.link._forgotten import REMEMBERED_SECONDS, Forgotten
from statelink.wire import MAX_UNMET, Unmet

__all__ = ["UnmetUses"]

MOST_IDS = 65536
"""Most room ids whose uses are kept one by one."""


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
        self._rooms: OrderedDict[int, dict[int, _Use]] = OrderedDict()
        self._forgotten: Forgotten | None = None
        """Ids beyond `MOST_IDS`; made for the first one."""

    def __len__(self) -> int:
        return len(self._rooms)

    def ended(self, room: int, generation: int, ranks: Iterable[str] | None) -> None:
        """Keep a use that failed. ``ranks``: prefill ranks that have not said that they had a room for it, or all."""
        lacks = None if ranks is None else set(ranks)
        if lacks is not None and not lacks:
            return
        uses = self._rooms.setdefault(room, {})
        self._rooms.move_to_end(room)
        now = self._now()
        # Beyond the limit, one entry with generation 0 stands for the oldest uses. It stays until it is too old.
        while len(uses) >= MAX_UNMET:
            del uses[next(iter(uses))]
            uses[0] = _Use(now, None)
        uses[generation] = _Use(now, lacks)
        while len(self._rooms) > MOST_IDS:
            lost, _ = self._rooms.popitem(last=False)
            self._forgotten = self._forgotten or Forgotten(self._now)
            self._forgotten.add(lost)

    def met(self, room: int, generation: int, rank: str) -> None:
        """Note that a prefill rank says that it had a room for a use."""
        uses = self._rooms.get(room, {})
        use = uses.get(generation)
        if use is None or use.lacks is None:
            return
        use.lacks.discard(rank)
        if not use.lacks:
            del uses[generation]
            if not uses:
                del self._rooms[room]

    def named(self, room: int, rank: str) -> tuple[Unmet, ...]:
        """The earlier uses that a request to a prefill rank has to name."""
        if self._forgotten is not None and room in self._forgotten:
            return (Unmet(0, 0),)
        uses = self._rooms.get(room)
        if uses is None:
            return ()
        now = self._now()
        return tuple(
            Unmet(generation, int(1000 * (now - use.ended)))
            for generation, use in uses.items()
            if (use.lacks is None or rank in use.lacks) and now - use.ended < REMEMBERED_SECONDS
        )
