"""A prefill instance as a decode rank sees it: found, greeted, planned for, attached."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from statelink.link.peers import INSTANCE, InstanceEvent, InstanceState

from ._prefill_rank import PrefillRank

if TYPE_CHECKING:
    from statelink.errors import Reason
    from statelink.link.peers import Peer
    from statelink.wire import Endpoint, Handshake

__all__ = ["Instance", "InstanceUser"]


class InstanceUser(Protocol):
    """A room that waits for an instance or uses it. Called on the control thread."""

    @property
    def room(self) -> int:
        """Its id."""

    def instance_ready(self, instance: Instance) -> None:
        """Rooms may be requested of the instance. May be called again and again."""

    def instance_refused(self, reason: Reason) -> None:
        """The two instances cannot work together."""

    def rank_lost(self, rank: PrefillRank, why: str) -> None:
        """A rank is gone; the instance is about to be greeted anew."""


class Instance:
    """A prefill instance. The control thread changes it; any thread may read it.

    Args:
        key: What the engine or router calls it, as text.
        peer: The same as it was given.
        now: When it was first asked for.

    Attributes:
        state: How far it is.
        since: When it entered the state.
        ranks: Its ranks by the address they were dialled at.
        siblings: Handshakes of this decode instance's other ranks, by address; ``None`` until they answer.
        rooms: Rooms that wait for it or use it, by id.
        reason: Why it was refused.
        suspect: Whether one of its ranks is silent.
        asked: How often its ranks were asked who they are, since it was found or a rank was lost.
        ask_at: When to ask again.
        turn: Counts its steps, so that a job can tell whether what it found out is out of date.
    """

    def __init__(self, key: str, peer: Peer, now: float) -> None:
        self.key = key
        self.peer = peer
        self.since = now
        self.state = InstanceState.RESOLVING
        self.ranks: dict[str, PrefillRank] = {}
        self.siblings: dict[str, Handshake | None] = {}
        self.rooms: dict[int, InstanceUser] = {}
        self.reason: Reason | None = None
        self.suspect = False
        self.asked = 0
        self.ask_at = 0.0
        self.turn = 0

    def step(self, event: InstanceEvent, now: float) -> bool:
        """Take the step that an event leads to; whether there is one from here."""
        state = INSTANCE[self.state].get(event)
        if state is None:
            return False
        self.state, self.since = state, now
        self.turn += 1
        return True

    # Who waits for it.

    def join(self, room: InstanceUser) -> None:
        """A room waits for it."""
        self.rooms[room.room] = room

    def leave(self, room: InstanceUser) -> None:
        """Nothing of it can land in a room's memory any more, and the room does not wait for it."""
        if self.rooms.get(room.room) is room:  # else its id is in use again
            del self.rooms[room.room]

    def tell_ready(self) -> None:
        """Tell the rooms that they may be requested."""
        for room in list(self.rooms.values()):
            room.instance_ready(self)

    # Who it is.

    def find(self, endpoints: Iterable[Endpoint], siblings: Iterable[str], now: float) -> None:
        """Its addresses are known, and those of this decode instance's other ranks."""
        self.ranks = {str(endpoint): PrefillRank(endpoint, now) for endpoint in endpoints}
        self.siblings = dict.fromkeys(siblings)
        self.asked = 0

    def renew(self, rank: PrefillRank, siblings: Iterable[str], now: float) -> None:
        """A rank is gone: another process may answer at its address."""
        self.ranks[rank.address] = PrefillRank(rank.endpoint, now)
        self.siblings = dict.fromkeys(siblings)
        self.asked = 0

    def ask(self, now: float, first: float, longest: float) -> int:
        """Everybody who has not answered is asked now; how often that makes. Later and later, up to ``longest``."""
        self.ask_at = now + min(first * 2 ** min(self.asked, 16), longest)
        self.asked += 1
        return self.asked

    def answer_sibling(self, address: str, handshake: Handshake) -> None:
        """Another rank of this decode instance said who it is."""
        self.siblings[address] = handshake

    def explain(self, reason: Reason | None) -> None:
        """Why it was refused; ``None`` when it is tried again."""
        self.reason = reason

    def suspect_silence(self, suspect: bool) -> None:
        """Whether one of its ranks is silent."""
        self.suspect = suspect

    @property
    def addresses(self) -> list[str]:
        """Of its ranks, and of this decode instance's other ranks."""
        return [*self.ranks, *self.siblings]

    @property
    def parts(self) -> list[PrefillRank]:
        """The ranks that have something to do with this decode rank, in order of rank."""
        return [rank for rank in self.ranks.values() if rank.part is not None]

    @property
    def greeted(self) -> bool:
        """Whether everybody who was asked has answered."""
        return all(rank.handshake for rank in self.ranks.values()) and all(self.siblings.values())

    @property
    def unanswered(self) -> list[str]:
        """Addresses of who has not answered."""
        mute = [address for address, rank in self.ranks.items() if rank.handshake is None]
        return mute + [address for address, handshake in self.siblings.items() if handshake is None]

    def silent(self) -> str:
        """Who has not answered, for messages."""
        return ", ".join(address.partition("|")[0] for address in self.unanswered)

    @property
    def words(self) -> str:
        """How it stands, in words."""
        return f"{self.state.value}{' (suspect)' if self.suspect else ''}"
