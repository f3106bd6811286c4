"""What prefill remembers of rooms that are not open here: bounded, and only as long as somebody may still ask."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from statelink.errors import Reason

__all__ = ["REMEMBERED", "End", "Past", "UseId"]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

UseId = tuple[str, int, int]
"""One use of a room by one destination: its name, the room and the generation."""

REMEMBERED = 65536
"""Most ends, and most uses, that are remembered."""


class End(NamedTuple):
    """How a room ended before both sides knew of it.

    Attributes:
        reason: Why.
        remote: Whether decode gave it up; otherwise prefill did.
        until: When it stops to count.
        told: Ranks of decode that know.
        instance: Theirs, where decode gave it up.
        ranks: How many of them there are then.
    """

    reason: Reason
    remote: bool
    until: float
    told: set[str]
    instance: str
    ranks: int


class Past:
    """Ends of rooms whose other side has not spoken yet, and uses that were answered. Control thread only.

    Args:
        now: The link's clock.
        lifetime: Seconds for which an end counts.

    Attributes:
        restless: Uses whose bytes may still land at their destination: also once the room is forgotten, these are never
            said to be drained. Each of them keeps memory of its destination in quarantine, and so there are not many.
    """

    def __init__(self, now: Callable[[], float], lifetime: float) -> None:
        self._now = now
        self._lifetime = lifetime
        self._ends: OrderedDict[int, End] = OrderedDict()
        self._uses: OrderedDict[UseId, None] = OrderedDict()
        self.restless: set[UseId] = set()

    def admit(self, use: UseId) -> bool:
        """Note a use; whether it is the first time. What comes twice, or after its end, was answered before."""
        if use in self._uses:
            return False
        _remember(self._uses, use, None)
        return True

    def ended(
        self, room: int, reason: Reason, *, remote: bool, told: Iterable[str] = (), instance: str = "", ranks: int = 0
    ) -> None:
        """Keep the end of a room of which prefill, or a rank of decode that was not ``told``, has yet to speak."""
        _remember(self._ends, room, End(reason, remote, self._now() + self._lifetime, set(told), instance, ranks))

    def end_of(self, room: int) -> End | None:
        """Take out what was kept of a room's end, unless it is too old to concern who asks."""
        end = self._ends.pop(room, None)
        return end if end is not None and end.until > self._now() else None

    def end_for(self, room: int, rank: str, ranks: int, instance: str) -> End | None:
        """The same for a rank of decode, if it speaks of the use that ended: each of the ``ranks`` is told once."""
        end = self.end_of(room)
        if end is None or rank in end.told:
            return None
        if end.remote and (len(end.told) >= end.ranks or end.instance != instance):
            return None
        end.told.add(rank)
        if end.remote or len(end.told) < ranks:  # where decode gave it up, prefill has yet to open it
            _remember(self._ends, room, end)
        return end

    def load(self) -> dict[str, int]:
        """What is kept, by kind."""
        return {"ends": len(self._ends), "seen": len(self._uses)}


def _remember(table: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > REMEMBERED:
        table.popitem(last=False)
