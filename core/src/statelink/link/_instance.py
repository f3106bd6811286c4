"""A prefill instance as decode sees it: found, greeted, planned for, attached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from statelink.backend import UNKNOWN
from statelink.errors import PeerError, Reason
from statelink.plan import Assignment, PairPlan, compile_pair, match, route

from ._stages import INSTANCE, InstanceEvent, Stage

if TYPE_CHECKING:
    from statelink.state import Inventory
    from statelink.wire import Endpoint, Handshake

    from ._connections import Connection
    from ._process import Witness
    from ._receiving import Receiving
    from ._rendezvous import Peer

__all__ = ["Instance", "Route", "Source", "plan_instance"]


@dataclass
class Source:
    """One rank of a prefill instance.

    Attributes:
        endpoint: Where it was dialled.
        card: Who it is, once it answered.
        heard: When it was last heard.
        assignment: Its part for this decode rank, if it has anything to do with it.
        plan: The compiled part.
        readers: Decode ranks that it serves for each room.
        attached: Whether it confirmed its part.
        connected: Whether this side's backend can be reached by it.
        connection: This side's backend's to it, while it has a part.
        witness: Who can say that its process has ended, if anybody here can.
        transport: What its backend says carries its bytes.
    """

    endpoint: Endpoint
    heard: float
    card: Handshake | None = None
    assignment: Assignment | None = None
    plan: PairPlan | None = None
    readers: int = 1
    attached: bool = False
    connected: bool = False
    connection: Connection | None = None
    witness: Witness | None = None
    transport: str = UNKNOWN

    @property
    def ended(self) -> bool:
        """Whether it is proven that its process has ended."""
        return self.witness is not None and self.witness.ended()

    @property
    def name(self) -> str:
        """Its link name; empty while it is not known."""
        return self.card.link if self.card else ""

    @property
    def address(self) -> str:
        """The address that it was dialled at."""
        return str(self.endpoint)


@dataclass
class Instance:
    """A prefill instance.

    Attributes:
        key: What the engine or router calls it, as text.
        peer: The same as it was given.
        since: When the stage was entered.
        stage: How far it is.
        sources: Its ranks by the address they were dialled at.
        siblings: Cards of this instance's other ranks, by address; ``None`` until they answer.
        rooms: Rooms that wait for it or use it.
        reason: Why it was refused.
        suspect: Whether one of its ranks is silent.
        asked: How often it was asked who it is, since it was found or lost.
        ask_at: When to ask it again.
        turn: Counts its steps, so that what a job found out can be told from what is true by now.
    """

    key: str
    peer: Peer
    since: float
    stage: Stage = Stage.RESOLVING
    sources: dict[str, Source] = field(default_factory=dict)
    siblings: dict[str, Handshake | None] = field(default_factory=dict)
    rooms: dict[int, Receiving] = field(default_factory=dict)
    reason: Reason | None = None
    suspect: bool = False
    asked: int = 0
    ask_at: float = 0.0
    turn: int = 0

    def step(self, event: InstanceEvent, now: float) -> bool:
        """Take the step that an event leads to; whether there is one from here."""
        stage = INSTANCE[self.stage].get(event)
        if stage is None:
            return False
        self.stage, self.since = stage, now
        self.turn += 1
        return True

    @property
    def parts(self) -> list[Source]:
        """The ranks that have something to do with this decode rank, in order of rank."""
        return [source for source in self.sources.values() if source.assignment is not None]

    @property
    def greeted(self) -> bool:
        """Whether everybody who was asked has answered."""
        return all(source.card for source in self.sources.values()) and all(self.siblings.values())

    @property
    def unanswered(self) -> list[str]:
        """Addresses of who has not answered."""
        mute = [address for address, source in self.sources.items() if source.card is None]
        return mute + [address for address, card in self.siblings.items() if card is None]

    def silent(self) -> str:
        """Who has not answered, for messages."""
        return ", ".join(address.partition("|")[0] for address in self.unanswered)


@dataclass
class Route:
    """What planning found: per source address, its part, the compiled plan and how many destinations it serves."""

    parts: dict[str, tuple[Assignment, PairPlan, int]]


def plan_instance(ours: Handshake, siblings: Sequence[Handshake], sources: dict[str, Handshake]) -> Route:
    """Check that the ranks are complete, match the instances, route every byte, and compile our part.

    Raises:
        PeerError: Ranks are missing, doubled, or of several instances.
        MismatchError: The instances do not fit.
    """
    prefill = _complete([card.inventory for card in sources.values()], "prefill")
    decode = _complete([ours.inventory, *(card.inventory for card in siblings)], "decode")
    match(prefill, decode)
    assignments = route(prefill, decode)
    readers: dict[int, int] = {}
    for assignment in assignments:
        readers[assignment.source] = readers.get(assignment.source, 0) + 1
    mine = {each.source: each for each in assignments if each.target == ours.inventory.rank}
    parts = {}
    for address, card in sources.items():
        part = mine.get(card.inventory.rank)
        if part is not None:
            plan = compile_pair(card.inventory, ours.inventory, part)
            parts[address] = (part, plan, readers[part.source])
    return Route(parts)


def _complete(inventories: list[Inventory], role: str) -> list[Inventory]:
    """The inventories in order of rank, if every rank of one instance is there exactly once."""
    first = inventories[0]
    names = {inventory.instance for inventory in inventories}
    if len(names) > 1:
        raise PeerError(
            f"ranks of several {role} instances were given as one",
            cause=", ".join(sorted(names)),
            code="peer.instance",
        )
    sizes = {inventory.ranks: inventory.rank for inventory in reversed(inventories)}
    if len(sizes) > 1:
        raise PeerError(
            f"the ranks of the {role} instance {first.instance!r} disagree about their number",
            cause=", ".join(f"rank {rank} says {size}" for size, rank in sorted(sizes.items())),
            hint="every rank of an instance states the same number of ranks",
            code="peer.ranks",
        )
    ranks = sorted(inventory.rank for inventory in inventories)
    if ranks != list(range(first.ranks)):
        raise PeerError(
            f"the {role} instance {first.instance!r} is not complete",
            cause=f"it has ranks 0 to {first.ranks - 1}, and the given addresses reach ranks {ranks}",
            hint="give the address of every rank once"
            + ("" if role == "prefill" else "; a decode rank learns of the others through 'siblings'"),
            code="peer.ranks",
        )
    return sorted(inventories, key=lambda inventory: inventory.rank)
