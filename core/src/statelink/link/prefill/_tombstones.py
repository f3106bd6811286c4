"""What prefill remembers of rooms that are not open here, and of requests that it answered. Bounded.

If an engine uses an id again, a request does not say which use it means. So prefill keeps a tombstone of a room that
ended here before a decode rank asked for it. That rank's next request then means the room that ended, and not a later
room with the same id. Its answer acknowledges the tombstone for this rank. See "Using an id again" in docs/design.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from statelink.link._forgotten import Forgotten

if TYPE_CHECKING:
    from statelink.errors import Reason

    from ._in_flight import RequestId

__all__ = ["AskingRank", "GivenUp", "Tombstone", "Tombstones"]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

MOST_TOMBSTONES = 65536
"""Most tombstones, most uses of decode, and most ids that decode gave up, that are kept one by one."""
MOST_OF_A_ROOM = 16
"""Most tombstones of one room id, and most instances that gave it up, that are kept one by one."""


class AskingRank(NamedTuple):
    """A decode rank, as far as tombstones depend on it.

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
    """A room that ended on prefill before every decode rank knew.

    Args:
        reason: Why the room ended.
        until: Latest time at which decode may have begun its use of the id.
        informed: Link names of the decode ranks that know of the end, with their instances.
        many: Whether this stands for any number of ended rooms. Telling a rank of one acknowledges nothing.
    """

    __slots__ = ("_informed", "_until", "many", "reason")

    def __init__(self, reason: Reason, until: float, informed: Mapping[str, str], *, many: bool = False) -> None:
        self.reason = reason
        self.many = many
        self._until = until
        self._informed = dict(informed)

    def concerns(self, rank: AskingRank, now: float, lasts: float) -> bool:
        """Whether a rank that asks, and whose use may last ``lasts`` seconds, may mean this room."""
        return rank.name not in self._informed and self._until + lasts > now

    def tell(self, rank: AskingRank) -> bool:
        """Note that a rank is told of the end. Returns whether all ranks of its instance know by now."""
        self._informed[rank.name] = rank.instance
        return sum(instance == rank.instance for instance in self._informed.values()) >= rank.ranks


class GivenUp:
    """A use of an id that ranks of a decode instance gave up before a room of prefill belonged to it.

    Args:
        reason: Why the first rank gave it up.
        instance: The instance.

    Attributes:
        until: When this is forgotten.
        ranks: How many ranks of that instance ask this rank for each room.
        uses: The ranks that gave it up: link name to generation.
        kept: Whether a room was open that another rank had asked to keep. Such a room outlives this, and no other room
            ends with it alone.
    """

    def __init__(self, reason: Reason, instance: str) -> None:
        self.reason = reason
        self.instance = instance
        self.until = 0.0
        self.ranks = 0
        self.uses: dict[str, int] = {}
        self.kept = True
        self._keys: dict[str, str] = {}
        """The same ranks: link name to public key."""

    def join(self, rank: AskingRank, generation: int) -> None:
        """Note that one more rank gave its use up."""
        self.uses[rank.name] = generation
        self.ranks = max(self.ranks, rank.ranks)
        self._keys[rank.name] = rank.key

    def has_key(self, key: str) -> bool:
        """Whether one of its ranks holds a public key."""
        return key in {self._keys[name] for name in self.uses}


class Tombstones:
    """Keeps ends of rooms that the other side does not know yet, and uses that were answered. Control thread only.

    Args:
        now: The link's clock.
        lifetime: Seconds within which both sides begin one use of an id.
    """

    def __init__(self, now: Callable[[], float], lifetime: float) -> None:
        self.lifetime = lifetime
        self._now = now
        self._ends: OrderedDict[int, list[Tombstone]] = OrderedDict()
        self._ends_count = 0
        self._forgotten = Forgotten(now)
        self._gone: OrderedDict[int, dict[str, GivenUp]] = OrderedDict()
        """By room id and instance: what the instance gave up."""
        self._spent: OrderedDict[int, dict[str, GivenUp]] = OrderedDict()
        """The same, of what ended the last room of this side that was for the instance."""
        self._uses: OrderedDict[RequestId, bool] = OrderedDict()
        """Uses of decode that this side knows, and whether a room of this side belonged to each."""

    # Uses.

    def admit(self, use: RequestId) -> bool:
        """Note a use. Returns whether it is new: a repeated or late request of a known use was answered before."""
        if use in self._uses:
            return False
        _remember(self._uses, use, False)
        return True

    def meet(self, use: RequestId) -> None:
        """Note that a room of this side belonged to a use of decode."""
        _remember(self._uses, use, True)

    def met(self, use: RequestId) -> bool:
        """Whether a room of this side belonged to a use. False if the use was forgotten."""
        return self._uses.get(use, False)

    # Ends on this side.

    def ended(self, room: int, reason: Reason, informed: Mapping[str, str]) -> None:
        """Keep a tombstone of a room whose end some decode rank does not know. ``informed``: the ranks that know."""
        ends = self._ends.setdefault(room, [])
        self._ends.move_to_end(room)
        until = self._now() + self.lifetime
        if len(ends) == MOST_OF_A_ROOM:
            # The last tombstone stands for all further ends, which are not kept one by one.
            ends[-1] = Tombstone(reason, until, {}, many=True)
            return
        ends.append(Tombstone(reason, until, informed))
        self._ends_count += 1
        while self._ends_count > MOST_TOMBSTONES:
            forgotten, lost = self._ends.popitem(last=False)
            self._ends_count -= len(lost)
            self._forgotten.add(forgotten)

    def due(self, room: int, rank: AskingRank, lasts: float) -> Tombstone | None:
        """The earliest tombstone that a request of a rank may mean; ``None`` if there is none.

        Args:
            room: The room id that the rank asks for.
            rank: The rank.
            lasts: Seconds that its use may take.
        """
        now = self._now()
        return next((end for end in self._ends.get(room, ()) if end.concerns(rank, now, lasts)), None)

    def acknowledge(self, room: int, rank: AskingRank, end: Tombstone) -> None:
        """Note that a rank is told of an end. Drops the tombstone once every rank of its instance knows."""
        if end.many or not end.tell(rank):
            return
        ends = self._ends[room]
        ends.remove(end)
        self._ends_count -= 1
        if not ends:
            del self._ends[room]

    def forgot(self, room: int) -> bool:
        """Whether a tombstone of a room may have been dropped because there were too many."""
        return room in self._forgotten

    def blank(self, room: int) -> bool:
        """Whether there is no tombstone of a room, and none was dropped: so no request can mean an earlier room."""
        return room not in self._ends and room not in self._forgotten

    # Ends on decode, before a room of this side belonged to the use.

    def give_up(self, room: int, rank: AskingRank, generation: int, reason: Reason, *, kept: bool) -> GivenUp:
        """Keep that a decode rank gave a use up.

        Args:
            room: The room id.
            rank: The rank.
            generation: The number that it drew for the use.
            reason: Why.
            kept: Whether a room is open that another rank has asked to keep.
        """
        given_up = self.given_up(room, rank.instance) or GivenUp(reason, rank.instance)
        given_up.join(rank, generation)
        given_up.until = self._now() + self.lifetime
        given_up.kept &= kept
        _remember_of_a_room(self._gone, room, given_up)
        return given_up

    def given_up(self, room: int, instance: str) -> GivenUp | None:
        """What is kept of an instance that gave a room up; ``None`` if nothing is, or if it was too long ago."""
        given_up = self._gone.get(room, {}).get(instance)
        if given_up is None:
            return None
        for name, generation in list(given_up.uses.items()):
            if self.met((name, room, generation)):  # by another room of this side
                del given_up.uses[name]
        if given_up.uses and given_up.until > self._now():
            return given_up
        self.forget_given_up(room, given_up)
        return None

    def ending(self, room: int) -> GivenUp | None:
        """What is kept of an instance that gave a room up, and with which a room ends that is opened after that."""
        found = (self.given_up(room, instance) for instance in list(self._gone.get(room, ())))
        return next((each for each in found if each is not None and not each.kept), None)

    def may_be_given_up(self, room: int) -> bool:
        """Whether `ending` may find something, or `reopened` may have something to forget. Any thread."""
        return room in self._gone or room in self._spent

    def any_given_up(self) -> bool:
        """Whether anything is remembered of uses that decode gave up. Any thread."""
        return bool(self._gone or self._spent)

    def forget_given_up(self, room: int, given_up: GivenUp) -> None:
        """Forget what an instance gave up, since a room of this side belonged to it, or since it was too long ago."""
        if self._gone.get(room, {}).get(given_up.instance) is given_up:
            _forget_of_a_room(self._gone, room, given_up.instance)

    # Rooms of this side that ended with a use that decode had given up.

    def spend(self, room: int, given_up: GivenUp) -> None:
        """A room of this side ended with what an instance gave up. It may have been meant for the instance's next use.

        So the next request of the instance has a doubt, until another room of this side is opened for it. If there are
        too many doubts, the oldest is forgotten, and such a request waits for its room.
        """
        self.forget_given_up(room, given_up)
        given_up.until = self._now() + self.lifetime
        _remember_of_a_room(self._spent, room, given_up)

    def spent(self, room: int, rank: AskingRank, lasts: float) -> GivenUp | None:
        """What ended the room that a request of a rank may mean; ``None`` if there is none.

        Args:
            room: The room id that the rank asks for.
            rank: The rank.
            lasts: Seconds that its use may take.
        """
        given_up = self._spent.get(room, {}).get(rank.instance)
        # A rank with another key may only claim to be of this instance.
        if given_up is None or not given_up.has_key(rank.key):
            return None
        if given_up.until + lasts > self._now():
            return given_up
        _forget_of_a_room(self._spent, room, rank.instance)
        return None

    def reopened(self, room: int) -> None:
        """Another room of this side is open: the next request of an instance that gave the id up means this one."""
        self._spent.pop(room, None)

    def load(self) -> dict[str, int]:
        """Numbers of the things that are kept. Any thread."""
        gone = len(self._gone) + len(self._spent)
        return {"tombstones": self._ends_count, "gone": gone, "seen": len(self._uses)}


def _remember(table: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > MOST_TOMBSTONES:
        table.popitem(last=False)


def _remember_of_a_room(table: OrderedDict[int, dict[str, GivenUp]], room: int, given_up: GivenUp) -> None:
    """Keep what an instance gave up. Of too many instances, the one that came first is dropped."""
    instances = table.get(room, {})
    instances[given_up.instance] = given_up
    if len(instances) > MOST_OF_A_ROOM:
        del instances[next(iter(instances))]
    _remember(table, room, instances)


def _forget_of_a_room(table: OrderedDict[int, dict[str, GivenUp]], room: int, instance: str) -> None:
    instances = table[room]
    del instances[instance]
    if not instances:
        del table[room]
