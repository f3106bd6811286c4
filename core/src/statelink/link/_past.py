"""What prefill remembers of rooms that are not open here, and of who asked for them. Bounded.

An id that is used again without another attempt tells nobody which of its uses is meant. Prefill counts: a use that
ended here before a rank of decode asked for it is due to that rank's next request, and not the use that is open by
then. See "Using an id again" in docs/design.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ._forgotten import Forgotten, RoomKey

if TYPE_CHECKING:
    from statelink.errors import Reason

    from ._to import To

__all__ = ["REMEMBERED", "End", "Gone", "Past", "UseId", "Who"]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

UseId = tuple[str, int, int]
"""One use of a room by one destination: its name, the room and the generation."""

REMEMBERED = 65536
"""Most ends, and most uses, that are remembered one by one."""
MOST_OF_A_ROOM = 16
"""Most ends of one room and attempt that are remembered one by one."""


class Who(NamedTuple):
    """A rank of decode, as far as ends are concerned.

    Attributes:
        name: Its link name.
        instance: Its instance.
        key: The public key that it holds; empty without security.
        ranks: How many ranks of its instance ask this rank for each room.
    """

    name: str
    instance: str
    key: str
    ranks: int


@dataclass
class End:
    """How a room ended on prefill before every rank of decode knew of it.

    Attributes:
        reason: Why.
        until: Until when decode may have begun its side of it.
        to: Whom it was for, if the engine said so.
        told: Link names of the ranks of decode that know, with their instances.
        many: Whether it stands for any number of uses: being told of one of them does not settle it.
    """

    reason: Reason
    until: float
    to: To | None
    told: dict[str, str] = field(default_factory=dict)
    many: bool = False

    def concerns(self, who: Who, now: float, lasts: float) -> bool:
        """Whether a rank whose use may take ``lasts`` seconds may mean this one when it asks."""
        if who.name in self.told or self.until + lasts <= now:
            return False
        return self.to is None or self.to.admits(who.instance, who.key)

    def complete(self, who: Who) -> bool:
        """Whether all ranks of an instance know."""
        return sum(instance == who.instance for instance in self.told.values()) >= who.ranks


@dataclass
class Gone:
    """A room that ranks of a decode instance gave up before prefill opened it.

    Attributes:
        reason: Why, in the words of the first.
        instance: The instance.
        until: When it stops to count.
        ranks: How many ranks of that instance ask this rank for each room.
        uses: Link name to generation, of those that gave it up.
        keys: Link name to public key, likewise.
        words: Its instance, and the keys of its ranks.
    """

    reason: Reason
    instance: str
    until: float
    ranks: int
    uses: dict[str, int] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    words: set[str] = field(default_factory=set)

    def of(self, to: To | None) -> dict[str, int]:
        """Those of ``uses`` who can have a room for ``to``: others may only say that they are of the instance."""
        return {n: use for n, use in self.uses.items() if to is None or to.admits(self.instance, self.keys[n])}


class Past:
    """Ends of rooms whose other side has not spoken yet, and uses that were answered. Control thread only.

    Args:
        now: The link's clock.
        lifetime: Seconds within which both sides begin one use of an id.

    Attributes:
        restless: Uses whose bytes may still land at their destination: also once the room is forgotten, these are never
            said to be drained. Each of them keeps memory of its destination in quarantine, and so there are not many.
    """

    def __init__(self, now: Callable[[], float], lifetime: float) -> None:
        self._now = now
        self.lifetime = lifetime
        self._ends: OrderedDict[RoomKey, list[End]] = OrderedDict()
        self._ends_count = 0
        self._forgotten = Forgotten(now)
        self._gone: OrderedDict[tuple[RoomKey, str], Gone] = OrderedDict()
        self._uses: OrderedDict[UseId, bool] = OrderedDict()
        self.restless: set[UseId] = set()

    # Uses.

    def admit(self, use: UseId) -> bool:
        """Note a use; whether it is the first time. What comes twice, or after its end, was answered before."""
        if use in self._uses:
            return False
        _remember(self._uses, use, False)
        return True

    def meet(self, use: UseId) -> None:
        """Note that a room of this side belonged to a use of decode."""
        _remember(self._uses, use, True)

    def met(self, use: UseId) -> bool:
        """Whether a room of this side belonged to it. What was forgotten counts as not."""
        return self._uses.get(use, False)

    # Ends on this side.

    def ended(self, key: RoomKey, reason: Reason, to: To | None, told: Mapping[str, str]) -> None:
        """Keep the end of a room of which some rank of decode has yet to speak."""
        ends = self._ends.setdefault(key, [])
        self._ends.move_to_end(key)
        until = self._now() + self.lifetime
        if len(ends) == MOST_OF_A_ROOM:
            ends[-1] = End(reason, until, to if to == ends[-1].to else None, {}, many=True)
            return
        ends.append(End(reason, until, to, dict(told)))
        self._ends_count += 1
        while self._ends_count > REMEMBERED:
            forgotten, lost = self._ends.popitem(last=False)
            self._ends_count -= len(lost)
            self._forgotten.add(forgotten)

    def due(self, key: RoomKey, who: Who, lasts: float) -> End | None:
        """The earliest end that a rank may mean when it asks for a room, and of which it was not told."""
        now = self._now()
        return next((end for end in self._ends.get(key, ()) if end.concerns(who, now, lasts)), None)

    def settle(self, key: RoomKey, who: Who, end: End) -> None:
        """A rank is told of an end."""
        if end.many:
            return
        end.told[who.name] = who.instance
        if end.complete(who):
            ends = self._ends[key]
            ends.remove(end)
            self._ends_count -= 1
            if not ends:
                del self._ends[key]

    def forgot(self, key: RoomKey) -> bool:
        """Whether an end of a room may have been forgotten because there were too many."""
        return key in self._forgotten

    # Ends on decode's side, before this one had the room.

    def give_up(self, key: RoomKey, who: Who, generation: int, reason: Reason) -> Gone:
        """Keep that a rank of decode gave a room up."""
        gone = self.gone(key, (who.instance,))
        if gone is None:
            gone = Gone(reason, who.instance, 0.0, who.ranks)
        gone.until = self._now() + self.lifetime
        gone.ranks = max(gone.ranks, who.ranks)
        self.join(gone, who, generation)
        gone.words.update(word for word in (who.instance, who.key) if word)
        for word in gone.words:
            _remember(self._gone, (key, word), gone)
        return gone

    @staticmethod
    def join(gone: Gone, who: Who, generation: int) -> None:
        """A rank's use is one of those."""
        gone.uses[who.name] = generation
        gone.keys[who.name] = who.key

    def gone(self, key: RoomKey, words: Iterable[str]) -> Gone | None:
        """What is known of an instance that gave a room up, by its name or by the key of a rank."""
        now = self._now()
        for word in words:
            gone = self._gone.get((key, word))
            if gone is not None:
                for name, generation in list(gone.uses.items()):
                    if self.met((name, key[0], generation)):  # by another room of this side
                        del gone.uses[name]
                if gone.uses and gone.until > now:
                    return gone
                self.settle_gone(key, gone)
        return None

    def settle_gone(self, key: RoomKey, gone: Gone) -> None:
        """A room of this side belonged to what an instance gave up."""
        for word in gone.words:
            if self._gone.get((key, word)) is gone:
                del self._gone[key, word]

    def load(self) -> dict[str, int]:
        """What is kept, by kind."""
        return {"tombstones": self._ends_count, "gone": len(self._gone), "seen": len(self._uses)}


def _remember(table: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > REMEMBERED:
        table.popitem(last=False)
