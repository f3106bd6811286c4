"""The table of registered ranks, whose entries expire. It has no sockets and no clock."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from statelink.errors import ConfigError, PeerError
from statelink.wire import MAX_LISTED, Listed, parse_endpoint

if TYPE_CHECKING:
    from statelink.wire import Register

__all__ = ["MAX_ENTRIES", "Registry"]

MAX_ENTRIES = 65536
"""Most ranks of all instances together."""
MAX_FORMER = 8
"""Most earlier processes of one rank that are remembered."""


@dataclass
class Entry:
    """One rank.

    Attributes:
        link: Link name of the process. It contains its incarnation.
        address: Its address.
        ranks: Number of ranks of its instance, as it says.
        until: When the entry expires.
        former: Link names of the earlier processes of this rank.
    """

    link: str
    address: str
    ranks: int
    until: float
    former: tuple[str, ...] = ()


class Registry:
    """Instances and their ranks.

    Args:
        lifetime: Seconds for which a silent rank is kept.
        limit: Most ranks of all instances together.
    """

    def __init__(self, lifetime: float, limit: int = MAX_ENTRIES) -> None:
        self._lifetime = lifetime
        self._limit = limit
        self._instances: dict[str, dict[int, Entry]] = {}
        self._names: list[str] = []  # of the instances, in order
        # By link. The one that spoke last is at the end.
        self._places: OrderedDict[str, tuple[str, int]] = OrderedDict()

    def register(self, message: Register, key: str, now: float) -> None:
        """Register a rank, or renew its registration.

        A process replaces an earlier process of the same rank. The earlier one cannot register again.

        Args:
            message: The registration.
            key: The key that it has proven to hold; empty without security.
            now: The time, in seconds.

        Raises:
            PeerError: The registration is refused, and nothing has changed.
        """
        self.expire(now)
        _check_address(message, key)
        ranks = self._instances.get(message.instance, {})
        entry = ranks.get(message.rank)
        former: tuple[str, ...] = ()
        if entry is not None:
            former = entry.former
            if message.sender in former:
                raise _refused(message, f"{entry.link} has taken its place", code="rendezvous.replaced")
            if entry.link != message.sender:
                former = (*former, entry.link)[-MAX_FORMER:]
        for rank, other in ranks.items():
            if rank != message.rank and other.ranks != message.ranks:
                cause = f"it says that there are {message.ranks} ranks, rank {rank} that there are {other.ranks}"
                raise _refused(message, cause, code="rendezvous.ranks")
        place = (message.instance, message.rank)
        if entry is None and message.sender not in self._places and len(self._places) >= self._limit:
            raise _refused(message, f"the server knows {self._limit} ranks already", code="rendezvous.full")
        if self._places.get(message.sender, place) != place:
            self.leave(message.sender)
        if entry is not None:
            self._places.pop(entry.link, None)
        until = now + self._lifetime
        made = Entry(message.sender, message.address, message.ranks, until, former)
        if message.instance not in self._instances:
            insort(self._names, message.instance)
        self._instances.setdefault(message.instance, {})[message.rank] = made
        self._places[message.sender] = place
        self._places.move_to_end(message.sender)

    def leave(self, link: str) -> None:
        """A process says goodbye."""
        place = self._places.pop(link, None)
        if place is not None:
            instance, rank = place
            del self._instances[instance][rank]
            if not self._instances[instance]:
                del self._instances[instance]
                del self._names[bisect_left(self._names, instance)]

    def expire(self, now: float) -> None:
        """Remove entries that have expired."""
        while self._places:
            link, (instance, rank) = next(iter(self._places.items()))
            if self._instances[instance][rank].until > now:
                return
            self.leave(link)

    def resolve(self, instance: str, now: float) -> tuple[tuple[str, ...], int, int]:
        """Addresses in order of rank (none while a rank is missing), registered ranks, and all ranks."""
        self.expire(now)
        ranks = self._instances.get(instance)
        if not ranks:
            return (), 0, 0
        wanted = next(iter(ranks.values())).ranks
        # Each rank is below the number of ranks, and all name the same number. So if the count fits, all ranks are
        # there.
        complete = len(ranks) == wanted
        return (tuple(ranks[rank].address for rank in sorted(ranks)) if complete else ()), len(ranks), wanted

    def browse(self, instance: str, rank: int, now: float) -> tuple[Listed, ...]:
        """The next ranks after a rank of an instance, in order of both; from the first on if the name is empty."""
        self.expire(now)
        found: list[Listed] = []
        at = bisect_left(self._names, instance)
        while at < len(self._names) and len(found) < MAX_LISTED:
            name = self._names[at]
            ranks = self._instances[name]
            numbers = sorted(ranks)
            first = bisect_right(numbers, rank) if name == instance else 0
            for number in numbers[first : first + MAX_LISTED - len(found)]:
                entry = ranks[number]
                found.append(Listed(name, number, entry.ranks, entry.address, entry.link))
            at += 1
        return tuple(found)

    def snapshot(self) -> dict[str, str]:
        """Instances, and how many of their ranks are present."""
        return {name: f"{len(ranks)} of {next(iter(ranks.values())).ranks}" for name, ranks in self._instances.items()}


def _check_address(message: Register, key: str) -> None:
    try:
        endpoint = parse_endpoint(message.address)
    except ConfigError as error:
        raise _refused(message, str(error.reason.what), code="rendezvous.address") from error
    if endpoint.key != key:
        raise _refused(message, "the key in its address is not the one that it holds", code="rendezvous.key")


def _refused(message: Register, cause: str, *, code: str) -> PeerError:
    what = f"rank {message.rank} of instance {message.instance!r:.80} is refused by the rendezvous server"
    return PeerError(what, cause=cause, code=code, peer=message.sender[:80])
