"""A prefill instance as a decode rank sees it: its state, its ranks, and the rooms that need it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING, Protocol

from statelink.backend import UNKNOWN
from statelink.link._reasons import PeerInfo
from statelink.link.peers import INSTANCE, InstanceEvent, InstanceState

if TYPE_CHECKING:
    from statelink.errors import Reason
    from statelink.link.peers import Connection, Peer, Witness
    from statelink.plan import PairPlan
    from statelink.wire import Bye, Endpoint, Handshake, Trouble

    from ._part import Part

__all__ = ["Instance", "InstanceUser", "PrefillRank"]


class PrefillRank:
    """A rank of a prefill instance, at an address. The control thread changes it; any thread may read it.

    Args:
        endpoint: Where it is dialled.
        now: When dialling began.

    Attributes:
        endpoint: Where it is dialled.
        address: The same, as text.
        handshake: Its handshake, once it answered.
        name: Its link name; empty while it is not known.
        heard: When its last message came; before the first one, when dialling began.
        part: What it writes for this decode rank, if anything.
        attached: Whether it confirmed its part.
        connecting: Whether its backend still connected when it did.
        connected: Whether this side's backend is connected to it.
        connection: This side's connection to it, while it has a part.
        witness: Tells whether its process has ended; ``None`` where that cannot be seen from here.
        transport: The transport that its backend says carries its bytes.
    """

    def __init__(self, endpoint: Endpoint, now: float) -> None:
        self.endpoint = endpoint
        self.address = str(endpoint)
        self.heard = now
        self._spoke = False
        self.handshake: Handshake | None = None
        self.name = ""
        self.part: Part | None = None
        self.attached = False
        self.connecting = False
        self.connected = False
        self.connection: Connection | None = None
        self.witness: Witness | None = None
        self.transport = UNKNOWN

    @property
    def rank(self) -> int | None:
        """Its rank, once it answered."""
        return self.handshake.inventory.rank if self.handshake else None

    @property
    def plan(self) -> PairPlan | None:
        """The compiled part, if it has one."""
        return self.part.plan if self.part else None

    @property
    def exited(self) -> bool:
        """Whether it is proven that its process has ended."""
        return self.witness is not None and self.witness.ended()

    @property
    def info(self) -> PeerInfo:
        """What diagnostics say of it."""
        if self.handshake is None:
            return PeerInfo(self.endpoint.address, None, self.heard if self._spoke else None)
        return PeerInfo(self.name, self.rank, self.heard)

    def may_leave(self, bye: Bye) -> bool:
        """Whether a goodbye of it is up to date. If not, it has come back before the goodbye came."""
        return self.handshake is None or bye.registration >= self.handshake.registration

    def answer(self, handshake: Handshake, now: float) -> None:
        """Note its handshake."""
        self.handshake, self.name, self.heard = handshake, handshake.link, now

    def hear(self, now: float) -> None:
        """A message of it came."""
        self.heard, self._spoke = now, True

    def count_sleep(self, late: float) -> None:
        """Do not count the seconds for which this process did not run as silence of the rank."""
        self.heard += late

    def assign(self, part: Part) -> bool:
        """Give it a part, which it has yet to confirm. Returns whether it had one before."""
        known = self.part is not None
        self.part, self.attached = part, False
        return known

    def reach(self, witness: Witness | None) -> None:
        """Note that the connection is made, and set the witness. `Attach` may be sent to it now."""
        self.connected = True
        self.witness = witness

    def detach(self) -> Connection | None:
        """Take its part away. Returns its connection, which the caller has to leave."""
        self.part, self.attached, self.connected = None, False, False
        connection, self.connection = self.connection, None
        return connection


class InstanceUser(Protocol):
    """A room that waits for an instance or uses it. Called on the control thread."""

    def instance_ready(self, instance: Instance) -> None:
        """The instance takes requests. Called again with every heartbeat."""

    def instance_refused(self, reason: Reason) -> None:
        """The two instances cannot work together."""

    def rank_lost(self, rank: PrefillRank, why: str) -> None:
        """A rank was lost. The handshake with it begins again."""

    def instance_silent(self, instance: Instance, limit: float) -> None:
        """Nobody has answered for the instance for ``limit`` seconds or longer. Called with every heartbeat."""

    def waits_at(self, addresses: Container[str]) -> bool:
        """Whether it waits for the word of a process that was dialled at one of some addresses."""

    def move(self, instance: Instance) -> None:
        """From now on, wait for ``instance`` instead: the processes that answered here belong to it."""


class Instance:
    """A prefill instance. The control thread changes it; any thread may read it.

    Args:
        key: The name or addresses that the engine gave for it, as one text.
        peer: The same, as the engine gave it.
        now: When a room first needed it.

    Attributes:
        state: How far it is.
        since: When it entered the state.
        ranks: Its ranks by the address they were dialled at.
        siblings: Handshakes of this decode instance's other ranks, by address; ``None`` until they answer.
        others: Names of other instances that answered at addresses of its ranks or siblings.
        rooms: Rooms that wait for it or use it, in order. Two of them may have one id, of which one has ended.
        reason: Why it was refused.
        suspect: Whether one of its ranks is silent.
        asked: How often `Hello` was sent since its addresses were found or a rank was lost.
        ask_at: When to send it again.
        turn: Counts its steps. A job whose result comes in a later turn is out of date.
    """

    def __init__(self, key: str, peer: Peer, now: float) -> None:
        self.key = key
        self.peer = peer
        self.since = now
        self.state = InstanceState.RESOLVING
        self.ranks: dict[str, PrefillRank] = {}
        self.siblings: dict[str, Handshake | None] = {}
        self.others: dict[str, str] = {}
        self.rooms: dict[InstanceUser, None] = {}
        self.reason: Reason | None = None
        self.suspect = False
        self.asked = 0
        self.ask_at = 0.0
        self.turn = 0

    def step(self, event: InstanceEvent, now: float) -> bool:
        """Take the step that an event leads to. Returns whether the table has one for the present state."""
        state = INSTANCE[self.state].get(event)
        if state is None:
            return False
        self.state, self.since = state, now
        self.turn += 1
        return True

    # The rooms that need it.

    def tell_ready(self) -> None:
        """Tell all its rooms that it takes requests."""
        for room in list(self.rooms):
            room.instance_ready(self)

    # Its ranks.

    def find(self, endpoints: Iterable[Endpoint], siblings: Iterable[str], now: float) -> None:
        """Set the addresses of its ranks, and of this decode instance's other ranks."""
        self.ranks = {str(endpoint): PrefillRank(endpoint, now) for endpoint in endpoints}
        self.siblings = dict.fromkeys(siblings)
        self.others = {}
        self.asked = 0

    def move(self, endpoints: Iterable[Endpoint], siblings: Iterable[str], now: float) -> list[PrefillRank]:
        """Replace the addresses. Keeps ranks at addresses that it had before. Returns the ranks that are left out."""
        ranks, known = self.ranks, self.siblings
        self.ranks = {str(each): ranks.get(str(each)) or PrefillRank(each, now) for each in endpoints}
        self.siblings = {address: known.get(address) for address in siblings}
        self.others = {}
        self.asked = 0
        return [rank for address, rank in ranks.items() if address not in self.ranks]

    def renew(self, rank: PrefillRank, siblings: Iterable[str], now: float) -> None:
        """Forget what is known of a rank that was lost, because another process may answer at its address."""
        self.ranks[rank.address] = PrefillRank(rank.endpoint, now)
        self.others.pop(rank.address, None)
        self.siblings = dict.fromkeys(siblings)
        self.asked = 0

    def ask(self, now: float, first: float, longest: float) -> int:
        """Note that `Hello` is sent now, and set when it is sent again. Returns how often it was sent.

        The first pause is ``first`` seconds. Each further pause is twice as long, up to ``longest`` seconds.
        """
        self.ask_at = now + min(first * 2 ** min(self.asked, 16), longest)
        self.asked += 1
        return self.asked

    @property
    def named(self) -> bool:
        """Whether the engine gave a name for it, not addresses."""
        return isinstance(self.peer, str) and not self.peer.startswith("tcp://")

    @property
    def addresses(self) -> list[str]:
        """Addresses of its ranks, and of this decode instance's other ranks."""
        return [*self.ranks, *self.siblings]

    @property
    def parts(self) -> list[PrefillRank]:
        """The ranks that write to this decode rank, in the order of the addresses."""
        return [rank for rank in self.ranks.values() if rank.part is not None]

    @property
    def greeted(self) -> bool:
        """Whether the handshakes of all its ranks, and of this instance's other ranks, are there."""
        return all(rank.handshake for rank in self.ranks.values()) and all(self.siblings.values())

    @property
    def unanswered(self) -> list[str]:
        """The addresses that have not answered."""
        silent = [address for address, rank in self.ranks.items() if rank.handshake is None]
        return silent + [address for address, handshake in self.siblings.items() if handshake is None]

    @property
    def called(self) -> str:
        """What texts call it: its name, or its addresses without keys, which the allow-list spells in another way."""
        return self.key if self.named else ",".join(address.partition("@")[0] for address in self.key.split(","))

    def silent(self, trouble: Callable[[str], Trouble | None]) -> str:
        """The addresses that have not answered, as a text without keys, each with its trouble, if that is known."""
        found = ((address.partition("@")[0], trouble(address)) for address in self.unanswered)
        return ", ".join(f"{address} ({each.what})" if each else address for address, each in found)

    @property
    def words(self) -> str:
        """Its state, as a text."""
        return f"{self.state.value}{' (suspect)' if self.suspect else ''}"
