"""What prefill remembers of rooms that are not open here, and of requests that it answered. Bounded.

If an engine uses an id again with the same attempt, a request does not say which use it means. So prefill keeps a
tombstone of a room that ended here before a decode rank asked for it. That rank's next request then means the room that
ended, and not a later room with the same id. Its answer acknowledges the tombstone for this rank. See "Using an id
again" in docs/design.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from statelink.link._forgotten import Forgotten

if TYPE_CHECKING:
    from statelink.errors import Reason
    from statelink.link._header import RoomKey

    from ._in_flight import RequestId
    from ._to import To

__all__ = ["ANYBODY", "NAMED", "REMEMBERED", "AskingRank", "GivenUp", "Tombstone", "Tombstones"]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

REMEMBERED = 65536
"""Most tombstones, and most uses, that are kept one by one."""
ANYBODY = ""
"""Stands for the instance of a room for which the engine named none."""
NAMED = "\0"
"""Before a name or key: what is kept under it is only for rooms that are for this name or key."""
MOST_OF_A_ROOM = 16
"""Most tombstones of one room id and attempt that are kept one by one."""


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
        to: The decode instance that the room was for, if the engine named one.
        informed: Link names of the decode ranks that know of the end, with their instances.
        many: Whether this stands for any number of ended rooms. Telling a rank of one acknowledges nothing.
    """

    __slots__ = ("_informed", "_until", "many", "reason", "to")

    def __init__(
        self, reason: Reason, until: float, to: To | None, informed: Mapping[str, str], *, many: bool = False
    ) -> None:
        self.reason = reason
        self.to = to
        self.many = many
        self._until = until
        self._informed = dict(informed)

    def concerns(self, rank: AskingRank, now: float, lasts: float) -> bool:
        """Whether a rank that asks, and whose use may last ``lasts`` seconds, may mean this room."""
        if rank.name in self._informed or self._until + lasts <= now:
            return False
        return self.to is None or self.to.admits(rank.instance, rank.key)

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
    """

    def __init__(self, reason: Reason, instance: str) -> None:
        self.reason = reason
        self.instance = instance
        self.until = 0.0
        self.ranks = 0
        self.uses: dict[str, int] = {}
        self._keys: dict[str, str] = {}
        """The same ranks: link name to public key."""
        self._words: set[str] = set()
        """The name of the instance and the public keys of its ranks, with `NAMED` before those of ranks that were not
        attached, and `ANYBODY` if no other instance will ask: `Tombstones` finds this under each of them."""

    def join(self, rank: AskingRank, generation: int) -> None:
        """Note that one more rank gave its use up."""
        self.uses[rank.name] = generation
        self._keys[rank.name] = rank.key

    def extend(self, rank: AskingRank, until: float, declined: bool, named: bool) -> set[str]:
        """Count until a later time, and add a rank's instance and key to the words. Returns all words."""
        self.until = until
        self.ranks = max(self.ranks, rank.ranks)
        self._words.update((NAMED if named else "") + word for word in (rank.instance, rank.key) if word)
        if declined:
            self._words.add(ANYBODY)
        return self._words

    def leave(self, name: str) -> None:
        """Take out a rank, whose use belonged to another room of this side."""
        del self.uses[name]

    @property
    def words(self) -> set[str]:
        """The words under which `Tombstones` finds this."""
        return self._words

    @property
    def declined(self) -> bool:
        """Whether no other instance will ask for the room either."""
        return ANYBODY in self._words

    def has_key(self, key: str) -> bool:
        """Whether one of its ranks holds a public key."""
        return key in {self._keys[name] for name in self.uses}

    def of(self, to: To | None) -> dict[str, int]:
        """The part of ``uses`` whose ranks may have a room for ``to``. The other ranks have no key that proves it."""
        return {n: use for n, use in self.uses.items() if to is None or to.admits(self.instance, self._keys[n])}


class Tombstones:
    """Keeps ends of rooms that the other side does not know yet, and uses that were answered. Control thread only.

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
        self._spent: OrderedDict[RoomKey, dict[str, GivenUp]] = OrderedDict()
        """By instance: what was given up, and ended the last room of this side that was for the instance."""
        self._uses: OrderedDict[RequestId, bool] = OrderedDict()
        """Uses of decode that this side knows, and whether a room of this side belonged to each."""

    # Uses.

    def admit(self, use: RequestId) -> bool:
        """Note a use. Returns whether it is new: a repeated or late request of a known use was answered before."""
        if use in self._uses:
            return False
        self._uses[use] = False
        if len(self._uses) > REMEMBERED:
            self._uses.popitem(last=False)
        return True

    def meet(self, use: RequestId) -> None:
        """Note that a room of this side belonged to a use of decode."""
        _remember(self._uses, use, True)

    def met(self, use: RequestId) -> bool:
        """Whether a room of this side belonged to a use. False if the use was forgotten."""
        return self._uses.get(use, False)

    # Ends on this side.

    def ended(self, key: RoomKey, reason: Reason, to: To | None, informed: Mapping[str, str]) -> None:
        """Keep a tombstone of a room whose end some decode rank does not know. ``informed``: the ranks that know."""
        ends = self._ends.setdefault(key, [])
        self._ends.move_to_end(key)
        until = self._now() + self.lifetime
        if len(ends) == MOST_OF_A_ROOM:
            # The last tombstone stands for all further ends, which are not kept one by one.
            ends[-1] = Tombstone(reason, until, to if to == ends[-1].to else None, {}, many=True)
            return
        ends.append(Tombstone(reason, until, to, informed))
        self._ends_count += 1
        while self._ends_count > REMEMBERED:
            forgotten, lost = self._ends.popitem(last=False)
            self._ends_count -= len(lost)
            self._forgotten.add(forgotten)

    def due(self, key: RoomKey, rank: AskingRank, lasts: float) -> Tombstone | None:
        """The earliest tombstone that a request of a rank may mean; ``None`` if there is none.

        Args:
            key: The room id and the attempt that the rank asks for.
            rank: The rank.
            lasts: Seconds that its use may take.
        """
        ends = self._ends.get(key)
        if ends is None:
            return None
        now = self._now()
        return next((end for end in ends if end.concerns(rank, now, lasts)), None)

    def acknowledge(self, key: RoomKey, rank: AskingRank, end: Tombstone) -> None:
        """Note that a rank is told of an end. Drops the tombstone once every rank of its instance knows."""
        if end.many or not end.tell(rank):
            return
        ends = self._ends[key]
        ends.remove(end)
        self._ends_count -= 1
        if not ends:
            del self._ends[key]

    def forgot(self, key: RoomKey) -> bool:
        """Whether a tombstone of a room may have been dropped because there were too many."""
        return key in self._forgotten

    def blank(self, key: RoomKey) -> bool:
        """Whether there is no tombstone of a room, and none was dropped: so no request can mean an earlier room."""
        return key not in self._ends and key not in self._forgotten

    # Ends on decode, before a room of this side belonged to the use.

    def give_up(
        self, key: RoomKey, rank: AskingRank, generation: int, reason: Reason, declined: bool, *, named: bool
    ) -> GivenUp:
        """Keep that a decode rank gave a use up.

        Args:
            key: The room id and the attempt.
            rank: The rank.
            generation: The number that it drew for the use.
            reason: Why.
            declined: Whether no other instance will ask for the room either.
            named: Whether only rooms that name this instance or its key have to hear of it.
        """
        words = (rank.instance, NAMED + rank.instance)
        given_up = self.given_up(key, words) or GivenUp(reason, rank.instance)
        given_up.join(rank, generation)
        for word in given_up.extend(rank, self._now() + self.lifetime, declined, named):
            _remember(self._gone, (key, word), given_up)
        return given_up

    def given_up(self, key: RoomKey, words: Iterable[str]) -> GivenUp | None:
        """What is kept of an instance that gave a room up.

        Args:
            key: The room id and the attempt.
            words: Names of instances, or public keys of ranks, or `ANYBODY`.
        """
        if not self._gone:
            return None
        now = self._now()
        for word in words:
            given_up = self._gone.get((key, word))
            if given_up is not None:
                for name, generation in list(given_up.uses.items()):
                    if self.met((name, key[0], generation)):  # by another room of this side
                        given_up.leave(name)
                if given_up.uses and given_up.until > now:
                    return given_up
                self.forget_given_up(key, given_up)
        return None

    def may_be_given_up(self, key: RoomKey, words: Iterable[str]) -> bool:
        """Whether `given_up` may find something, or `reopened` may have something to forget. Any thread."""
        return key in self._spent or any((key, word) in self._gone for word in words)

    def any_given_up(self) -> bool:
        """Whether anything is remembered of uses that decode gave up. Any thread."""
        return bool(self._gone or self._spent)

    def forget_given_up(self, key: RoomKey, given_up: GivenUp) -> None:
        """Forget what an instance gave up, since a room of this side belonged to it, or since it was too long ago."""
        for word in given_up.words:
            if self._gone.get((key, word)) is given_up:
                del self._gone[key, word]

    # Rooms of this side that ended with a use that decode had given up.

    def spend(self, key: RoomKey, given_up: GivenUp) -> None:
        """A room of this side ended with what an instance gave up. It may have been meant for the instance's next use.

        So the next request of the instance has a doubt, until another room of this side is opened for it. If there are
        too many doubts, the oldest is forgotten, and such a request waits for its room.
        """
        self.forget_given_up(key, given_up)
        given_up.until = self._now() + self.lifetime
        _remember(self._spent, key, {**self._spent.get(key, {}), given_up.instance: given_up})

    def spent(self, key: RoomKey, rank: AskingRank, lasts: float) -> GivenUp | None:
        """What ended the room that a request of a rank may mean; ``None`` if there is none.

        Args:
            key: The room id and the attempt that the rank asks for.
            rank: The rank.
            lasts: Seconds that its use may take.
        """
        given_up = self._spent.get(key, {}).get(rank.instance)
        # A rank with another key may only claim to be of this instance.
        if given_up is None or not given_up.has_key(rank.key):
            return None
        if given_up.until + lasts > self._now():
            return given_up
        self._forget_spent(key, rank.instance)
        return None

    def _forget_spent(self, key: RoomKey, instance: str) -> None:
        by_instance = self._spent[key]
        del by_instance[instance]
        if not by_instance:
            del self._spent[key]

    def reopened(self, key: RoomKey, to: To | None) -> None:
        """Another room of this side is open: the next requests of the instances that may have it mean this one."""
        by_instance = self._spent.get(key, {})
        for instance in [name for name, given_up in by_instance.items() if given_up.of(to)]:
            self._forget_spent(key, instance)

    def load(self) -> dict[str, int]:
        """Numbers of the things that are kept. Any thread."""
        gone = len(self._gone) + len(self._spent)
        return {"tombstones": self._ends_count, "gone": gone, "seen": len(self._uses)}


def _remember(table: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > REMEMBERED:
        table.popitem(last=False)
