"""What prefill remembers of rooms that are not open here, and of the ranks that asked for them. Bounded.

If an engine uses an id again with the same attempt, a request does not say which use it means. So prefill counts: when
a room ended here before a rank of decode asked for it, that rank's next request means the room that ended, and not a
later room with the same id. A tombstone keeps the end until the rank has asked. See "Using an id again" in
docs/design.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from statelink.link._forgotten import Forgotten

if TYPE_CHECKING:
    from statelink.errors import Reason
    from statelink.link._header import RoomKey

    from ._delivery import RequestId
    from ._to import To

__all__ = ["REMEMBERED", "AskingRank", "GivenUp", "Tombstone", "Tombstones"]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

REMEMBERED = 65536
"""Most ends, and most uses, that are remembered one by one."""
MOST_OF_A_ROOM = 16
"""Most ends of one room and attempt that are remembered one by one."""


class AskingRank(NamedTuple):
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


class Tombstone:
    """How a room ended on prefill before every rank of decode knew of it.

    Args:
        reason: Why.
        until: Until when decode may have begun its side of it.
        to: Whom it was for, if the engine said so.
        told: Link names of the ranks of decode that know, with their instances.
        many: Whether it stands for any number of uses: being told of one of them does not settle it.
    """

    __slots__ = ("_told", "_until", "many", "reason", "to")

    def __init__(
        self, reason: Reason, until: float, to: To | None, told: Mapping[str, str], *, many: bool = False
    ) -> None:
        self.reason = reason
        self.to = to
        self.many = many
        self._until = until
        self._told = dict(told)

    def concerns(self, rank: AskingRank, now: float, lasts: float) -> bool:
        """Whether a rank whose use may take ``lasts`` seconds may mean this one when it asks."""
        if rank.name in self._told or self._until + lasts <= now:
            return False
        return self.to is None or self.to.admits(rank.instance, rank.key)

    def tell(self, rank: AskingRank) -> bool:
        """A rank is told of the end; whether all ranks of its instance know by now."""
        self._told[rank.name] = rank.instance
        return sum(instance == rank.instance for instance in self._told.values()) >= rank.ranks


class GivenUp:
    """A room that ranks of a decode instance gave up before prefill opened it.

    Args:
        reason: Why, in the words of the first.
        instance: The instance.

    Attributes:
        until: When it stops to count.
        ranks: How many ranks of that instance ask this rank for each room.
        uses: Link name to generation, of those that gave it up.
    """

    def __init__(self, reason: Reason, instance: str) -> None:
        self.reason = reason
        self.instance = instance
        self.until = 0.0
        self.ranks = 0
        self.uses: dict[str, int] = {}
        self._keys: dict[str, str] = {}
        """Link name to public key, likewise."""
        self._words: set[str] = set()

    def join(self, rank: AskingRank, generation: int) -> None:
        """One more rank has given its use up."""
        self.uses[rank.name] = generation
        self._keys[rank.name] = rank.key

    def extend(self, rank: AskingRank, until: float) -> set[str]:
        """It counts for longer; under which words it is found: its instance, and the keys of its ranks."""
        self.until = until
        self.ranks = max(self.ranks, rank.ranks)
        self._words.update(word for word in (rank.instance, rank.key) if word)
        return self._words

    def leave(self, name: str) -> None:
        """The use of a rank has met a room of this side."""
        del self.uses[name]

    @property
    def words(self) -> set[str]:
        """Under which it is found."""
        return self._words

    def has_key(self, key: str) -> bool:
        """Whether one of its ranks holds a public key."""
        return key in {self._keys[name] for name in self.uses}

    def of(self, to: To | None) -> dict[str, int]:
        """Those of ``uses`` who can have a room for ``to``: others may only say that they are of the instance."""
        return {n: use for n, use in self.uses.items() if to is None or to.admits(self.instance, self._keys[n])}


class Tombstones:
    """Ends of rooms of which the other side has not spoken yet, and uses that were answered. Control thread only.

    Args:
        now: The link's clock.
        lifetime: Seconds within which both sides begin one use of an id.
    """

    def __init__(self, now: Callable[[], float], lifetime: float) -> None:
        self.lifetime = lifetime
        self._now = now
        self._ends: OrderedDict[RoomKey, list[Tombstone]] = OrderedDict()
        self._ends_count = 0
        self._forgotten = Forgotten(now)
        self._gone: OrderedDict[tuple[RoomKey, str], GivenUp] = OrderedDict()
        self._uses: OrderedDict[RequestId, bool] = OrderedDict()
        self._landing: set[RequestId] = set()
        """Uses whose bytes may still land at their destination, also once the room is forgotten. Each of them keeps
        memory of its destination in quarantine, so that there are not many."""

    # Uses.

    def admit(self, use: RequestId) -> bool:
        """Note a use; whether it is the first time. A request that is repeated, or late, was answered before."""
        if use in self._uses:
            return False
        _remember(self._uses, use, False)
        return True

    def meet(self, use: RequestId) -> None:
        """Note that a room of this side belonged to a use of decode."""
        _remember(self._uses, use, True)

    def met(self, use: RequestId) -> bool:
        """Whether a room of this side belonged to it. What was forgotten counts as not."""
        return self._uses.get(use, False)

    def may_land(self, use: RequestId) -> None:
        """Writes for a use may still land at its destination: it must not be called drained."""
        self._landing.add(use)

    def cannot_land(self, use: RequestId) -> None:
        """No write for a use can land any more."""
        self._landing.discard(use)

    def drained(self, use: RequestId) -> bool:
        """Whether no write for a use can land, as far as this side knows."""
        return use not in self._landing

    def destinations(self) -> set[str]:
        """Link names of the ranks at which writes may still land."""
        return {name for name, _, _ in self._landing}

    # Ends on this side.

    def ended(self, key: RoomKey, reason: Reason, to: To | None, told: Mapping[str, str]) -> None:
        """Keep the end of a room of which some rank of decode has yet to speak."""
        ends = self._ends.setdefault(key, [])
        self._ends.move_to_end(key)
        until = self._now() + self.lifetime
        if len(ends) == MOST_OF_A_ROOM:
            ends[-1] = Tombstone(reason, until, to if to == ends[-1].to else None, {}, many=True)
            return
        ends.append(Tombstone(reason, until, to, told))
        self._ends_count += 1
        while self._ends_count > REMEMBERED:
            forgotten, lost = self._ends.popitem(last=False)
            self._ends_count -= len(lost)
            self._forgotten.add(forgotten)

    def due(self, key: RoomKey, rank: AskingRank, lasts: float) -> Tombstone | None:
        """The earliest end that a rank may mean when it asks for a room, and of which it was not told."""
        now = self._now()
        return next((end for end in self._ends.get(key, ()) if end.concerns(rank, now, lasts)), None)

    def settle(self, key: RoomKey, rank: AskingRank, end: Tombstone) -> None:
        """A rank is told of an end."""
        if end.many or not end.tell(rank):
            return
        ends = self._ends[key]
        ends.remove(end)
        self._ends_count -= 1
        if not ends:
            del self._ends[key]

    def forgot(self, key: RoomKey) -> bool:
        """Whether an end of a room may have been forgotten because there were too many."""
        return key in self._forgotten

    # Ends on decode's side, before this one had the room.

    def give_up(self, key: RoomKey, rank: AskingRank, generation: int, reason: Reason) -> GivenUp:
        """Keep that a rank of decode gave a room up."""
        gone = self.gone(key, (rank.instance,)) or GivenUp(reason, rank.instance)
        gone.join(rank, generation)
        for word in gone.extend(rank, self._now() + self.lifetime):
            _remember(self._gone, (key, word), gone)
        return gone

    def gone(self, key: RoomKey, words: Iterable[str]) -> GivenUp | None:
        """What is known of an instance that gave a room up, by its name or by the key of a rank."""
        now = self._now()
        for word in words:
            gone = self._gone.get((key, word))
            if gone is not None:
                for name, generation in list(gone.uses.items()):
                    if self.met((name, key[0], generation)):  # by another room of this side
                        gone.leave(name)
                if gone.uses and gone.until > now:
                    return gone
                self.settle_gone(key, gone)
        return None

    def settle_gone(self, key: RoomKey, gone: GivenUp) -> None:
        """A room of this side belonged to what an instance gave up."""
        for word in gone.words:
            if self._gone.get((key, word)) is gone:
                del self._gone[key, word]

    def load(self) -> dict[str, int]:
        """What is kept, by kind. Any thread."""
        return {"tombstones": self._ends_count, "gone": len(self._gone), "seen": len(self._uses)}


def _remember(table: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > REMEMBERED:
        table.popitem(last=False)
